"""The engines side by side: a panel a figure, a bar an engine.

Invariant: bars are medians and whiskers the least and the most of any round, nothing else.
matplotlib is loaded here only, without a display.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.report import FIGURES, OURS, TITLES, Round, ratios, values_of

_BLUE, _GREY, _DARK = "#2563eb", "#94a3b8", "#475569"


def draw(rounds: Sequence[Round], subtitle: str, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _DARK,
    }
    compared = ratios(rounds)
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            1, len(FIGURES), figsize=(3.0 * len(FIGURES), 4.4), layout="constrained"
        )
        figure.get_layout_engine().set(rect=(0.005, 0, 0.99, 0.86))
        text = {"va": "top"}
        figure.text(0.01, 0.975, "Shoal beside its peers", fontsize=13, fontweight="bold", **text)
        figure.text(0.01, 0.92, subtitle, fontsize=9.5, color=_DARK, **text)
        for panel, short in zip(axes, FIGURES, strict=True):
            _panel(panel, rounds, short, compared)
        figure.savefig(path, dpi=130, format="png")
        pyplot.close(figure)


def _panel(axes: Any, rounds: Sequence[Round], short: str, compared: dict[str, float]) -> None:
    name, title = FIGURES[short]
    axes.set_title(title.replace(", ", ",\n", 1), loc="left", fontsize=10)
    engines = [engine for engine in TITLES if values_of(rounds, engine, name)]
    for place, engine in enumerate(engines):
        values = values_of(rounds, engine, name)
        median = statistics.median(values)
        whiskers = [[median - min(values)], [max(values) - median]]
        axes.bar(
            place,
            median,
            width=0.65,
            color=_BLUE if engine == OURS else _GREY,
            yerr=whiskers if len(values) > 1 else None,
            ecolor=_DARK,
            capsize=3,
        )
        ratio = compared.get(f"{short}_vs_{engine}")
        label = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        if ratio is not None:
            label += f"\nShoal {ratio:.2f}×"
        axes.annotate(
            label, (place, max(values)), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    names = [TITLES[engine].replace(", ", ",\n") for engine in engines]
    axes.set_xticks(range(len(engines)), names)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.18)
