"""Figures of all engines as flat values, as a table, and as ratios.

Invariant: pure. A ratio says how many times as fast Shoal is, in rates and in times alike; it is
taken within each round, where both engines had the same minutes of the machine, and its median is
reported with the least and the most of any round.
"""

import statistics
from collections.abc import Mapping, Sequence

from bench.figures import Figures

Round = Mapping[str, Mapping[str, float]]
"""By engine, by figure."""

OURS = "shoal"
TITLES = {
    "shoal": "Shoal",
    "vllm": "vLLM",
    "vllm_all_cores": "vLLM, all cores",
    "vllm_eager": "vLLM, eager",
    "llamacpp": "llama.cpp",
}
FIGURES = {
    "w1": ("w1_tokens_per_s", "W1: one stream, tok/s"),
    "w2": ("w2_prefill_tokens_per_s", "W2: prefill, tok/s"),
    "w3_cold": ("w3_cold_output_tokens_per_s", "W3: 64 on one prefix, cold, output tok/s"),
    "w3_warm": ("w3_warm_output_tokens_per_s", "W3 warm, output tok/s"),
    "ready": ("ready_s", "process start to first token, s"),
}
OTHERS = "other_cores"
"""Cores that other programs took just before an engine started."""
_QUIET_CORES = 0.1
_DIGITS = 4


def values_of(rounds: Sequence[Round], engine: str, figure: str) -> list[float]:
    """Of the rounds that have it."""
    return [each[engine][figure] for each in rounds if figure in each.get(engine, {})]


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    """By engine and figure."""
    return {
        f"{engine}_{figure}": round(statistics.median(values), _DIGITS)
        for engine in TITLES
        for figure, _ in FIGURES.values()
        if (values := values_of(rounds, engine, figure))
    }


def ratios(rounds: Sequence[Round]) -> dict[str, float]:
    """``w1_vs_vllm`` and so on, each with ``_min`` and ``_max``."""
    found: dict[str, float] = {}
    for peer in TITLES:
        if peer == OURS:
            continue
        for short, (figure, _) in FIGURES.items():
            if values := _ratios(rounds, peer, figure):
                key = f"{short}_vs_{peer}"
                found[key] = round(statistics.median(values), _DIGITS)
                found[f"{key}_min"] = round(min(values), _DIGITS)
                found[f"{key}_max"] = round(max(values), _DIGITS)
    return found


def _ratios(rounds: Sequence[Round], peer: str, figure: str) -> list[float]:
    pairs = [
        (each[OURS][figure], each[peer][figure])
        for each in rounds
        if figure in each.get(OURS, {}) and figure in each.get(peer, {})
    ]
    is_time = figure.endswith("_s") and not figure.endswith("_per_s")
    return [theirs / ours if is_time else ours / theirs for ours, theirs in pairs]


def most_others(rounds: Sequence[Round]) -> float:
    """The most cores that other programs took before any engine."""
    taken = [figures[OTHERS] for each in rounds for figures in each.values() if OTHERS in figures]
    return max(taken, default=0.0)


def table(rounds: Sequence[Round], missing: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """Markdown: medians, how many times as fast Shoal is, and what was set."""
    compared = ratios(rounds)
    engines = [engine for engine in TITLES if any(engine in each for each in rounds)]
    lines = [
        f"| median of {len(rounds)} | " + " | ".join(TITLES[engine] for engine in engines) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for short, (figure, title) in FIGURES.items():
        cells = [_cell(rounds, engine, figure, compared, short) for engine in engines]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {TITLES[engine]}: {flags[engine]}" for engine in engines if engine in flags]
    lines += [f"- {TITLES[engine]} is missing: {reason}" for engine, reason in missing.items()]
    if (taken := most_others(rounds)) > _QUIET_CORES:
        lines.append(
            f"- **Not a quiet machine: other programs took up to {taken:.2f} cores before an "
            "engine started. One engine had them and another did not: the ratios say nothing.**"
        )
    return "\n".join(lines)


def _cell(
    rounds: Sequence[Round], engine: str, figure: str, compared: Mapping[str, float], short: str
) -> str:
    values = values_of(rounds, engine, figure)
    if not values:
        return "–"
    text = f"{statistics.median(values):,.3g}"
    median = statistics.median(values)
    if median >= 100:
        text = f"{median:,.0f}"
    ratio = compared.get(f"{short}_vs_{engine}")
    return text if ratio is None else f"{text} ({ratio:.2f}×)"


def flat(rounds: Sequence[Round], missing: Mapping[str, str], flags: Mapping[str, str]) -> Figures:
    """Everything, one value a key."""
    return {
        **medians(rounds),
        **ratios(rounds),
        "other_cores_max": round(most_others(rounds), _DIGITS),
        **{f"{engine}_flags": text for engine, text in flags.items()},
        **{f"{engine}_missing": reason for engine, reason in missing.items()},
    }
