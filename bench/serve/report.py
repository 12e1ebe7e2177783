"""What is shown: the table, the warnings, the progress line.

Invariant: pure; figures and records in, text out. What was not measured is a dash.
"""

from collections.abc import Mapping, Sequence

from bench.serve.metrics import LATENCIES, PERCENTILES, Figure, failures
from bench.serve.records import Record

_LABEL_WIDTH = 14
_COLUMN_WIDTH = 11
_BAR_WIDTH = 24


def table(figures: Mapping[str, Figure], titles: Sequence[str]) -> str:
    """For a terminal; the figures of `metrics.figures` under lines that say what was run."""
    lines = [*titles, "", _line("requests", _requests(figures)), *_throughput(figures)]
    if "goodput_share" in figures:
        good = _number(figures["goodput_requests_per_s"])
        share = _share(figures["goodput_share"])
        lines.append(_line("goodput", f"{good} requests/s within the limits, {share} of all"))
    lines += ["", *_latencies(figures), "", _line("client", _client(figures))]
    return "\n".join(lines)


def problems(records: Sequence[Record], warnings: Sequence[str]) -> str:
    """Each kind of failure with the words of its first, and each warning; empty without any."""
    lines = []
    for kind, count in failures(records).most_common():
        reason = next(record.reason for record in records if record.failure == kind)
        lines.append(f"failed: {count} × {kind}" + (f", first: {reason}" if reason else ""))
    lines += [f"warning: {warning}" for warning in warnings]
    return "\n".join(lines)


def progress(done: int, failed: int, running: int, total: int | None, tokens_per_s: float) -> str:
    """One line. `total` None: a load by duration."""
    finished = done + failed
    bar = ""
    if total:
        filled = min(_BAR_WIDTH, _BAR_WIDTH * finished // total)
        bar = f"[{'█' * filled}{'·' * (_BAR_WIDTH - filled)}] "
    count = f"{finished:,}/{total:,}" if total else f"{finished:,}"
    parts = [f"{count} done", f"{running:,} running", f"{tokens_per_s:,.0f} tok/s"]
    if failed:
        parts.insert(1, f"{failed:,} failed")
    return bar + " · ".join(parts)


def _requests(figures: Mapping[str, Figure]) -> str:
    parts = [f"{figures['requests_ok']:,} complete", f"{figures['requests_failed']:,} failed"]
    if figures["requests_interrupted"]:
        parts.append(f"{figures['requests_interrupted']:,} interrupted")
    if figures["short_answers"]:
        parts.append(f"{figures['short_answers']:,} shorter than asked")
    return ", ".join(parts) + f" in {_number(figures['duration_s'])} s"


def _throughput(figures: Mapping[str, Figure]) -> list[str]:
    rates = [
        f"{_number(figures['requests_per_s'])} requests/s",
        f"{_number(figures['output_tokens_per_s'])} output tokens/s",
        f"{_number(figures['input_tokens_per_s'])} input tokens/s",
    ]
    tokens = (
        f"{_number(figures['input_tokens'])} in (by {figures['input_tokens_by'] or '–'}), "
        f"{_number(figures['output_tokens'])} out (by {figures['output_tokens_by'] or '–'})"
    )
    cached = "not reported by the server"
    if figures["cached_tokens"] is not None:
        share = _share(figures["cached_share"])
        cached = f"{_number(figures['cached_tokens'])} tokens, {share} of the input"
    return [
        _line("throughput", ", ".join(rates)),
        _line("tokens", tokens),
        _line("cached", cached),
    ]


def _latencies(figures: Mapping[str, Figure]) -> list[str]:
    columns = ["mean", *(f"p{percentile}" for percentile in PERCENTILES), "max"]
    header = "latency, ms".ljust(_LABEL_WIDTH) + "".join(
        column.rjust(_COLUMN_WIDTH) for column in columns
    )
    rows = [
        name.upper().ljust(_LABEL_WIDTH)
        + "".join(
            _number(figures[f"{name}_ms_{column}"]).rjust(_COLUMN_WIDTH) for column in columns
        )
        for name in LATENCIES
    ]
    return [header, *rows]


def _client(figures: Mapping[str, Figure]) -> str:
    return (
        f"{_share(figures['client_cpu_share'])} of a core, "
        f"{_number(figures['client_cpu_us_per_chunk'])} µs a chunk, "
        f"event loop {_number(figures['client_loop_lag_ms_p99'])} ms late (p99), "
        f"sends {_number(figures['client_send_lag_ms_p99'])} ms late (p99)"
    )


def _line(label: str, text: str) -> str:
    return label.ljust(_LABEL_WIDTH) + text


def _share(figure: Figure) -> str:
    return f"{figure:.1%}" if isinstance(figure, float | int) else "–"


def _number(figure: Figure) -> str:
    """Three digits or more that matter."""
    if not isinstance(figure, float | int):
        return "–"
    if figure == 0 or isinstance(figure, int) or abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"
