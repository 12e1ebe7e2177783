"""The figures as a picture: CDFs of TTFT and ITL, throughput over time.

Invariant: shows the records of complete answers and nothing else. matplotlib is loaded here only,
without a display.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.metrics import itl_s
from bench.serve.records import Record
from engine.errors import ShoalError

_BLUE, _ORANGE, _GREY = "#2563eb", "#ea580c", "#64748b"
_MARKS = ((50, ":"), (99, "--"))
_MAX_BINS = 60


class PlotUnavailable(ShoalError):
    """matplotlib isn't installed."""


def require_matplotlib(option: str = "--png") -> None:
    """Raises `PlotUnavailable`; called before the load, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotUnavailable(
            f"{option} needs matplotlib: pip install 'shoal[bench]', or leave {option} out"
        ) from None


def draw(records: Sequence[Record], titles: Sequence[str], path: Path) -> None:
    """Writes a PNG under these lines. Empty axes when no answer was complete."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    complete = [record for record in records if record.failure is None]
    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e2e8f0",
        "axes.edgecolor": _GREY,
        "axes.axisbelow": True,
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplot_mosaic(
            [["ttft", "itl"], ["rate", "rate"]], figsize=(11, 7.5), layout="constrained"
        )
        figure.get_layout_engine().set(rect=(0.005, 0, 0.985, 0.88))
        title, *rest = titles
        figure.text(0.012, 0.975, title, fontsize=13, fontweight="bold", va="top")
        figure.text(0.012, 0.935, "\n".join(rest), fontsize=9.5, color=_GREY, va="top")
        _cdf(
            axes["ttft"],
            [record.ttft_s for record in complete if record.ttft_s is not None],
            "Time to first token",
        )
        _cdf(
            axes["itl"],
            [gap_s for record in complete for gap_s in itl_s(record)],
            "Gap between chunks",
        )
        _throughput(axes["rate"], complete)
        figure.savefig(path, dpi=130, format="png")
        pyplot.close(figure)


def _cdf(axes: Any, values_s: Sequence[float], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of " + ("requests" if title.startswith("Time") else "gaps"))
    axes.set_ylim(0, 1.02)
    if not values_s:
        return
    values_ms = np.sort(np.asarray(values_s)) * 1000
    shares = np.arange(1, values_ms.size + 1) / values_ms.size
    axes.step(values_ms, shares, where="post", color=_BLUE, linewidth=1.8)
    for percentile, line in _MARKS:
        value_ms = float(np.percentile(values_ms, percentile))
        label = f"p{percentile}  {_ms(value_ms)}"
        axes.axvline(value_ms, color=_ORANGE, linestyle=line, linewidth=1.2, label=label)
    axes.plot([], [], " ", label=f"max  {_ms(float(values_ms[-1]))}")
    # A few outliers far to the right must not squeeze all else against the axis.
    limit_ms = min(float(values_ms[-1]), 2.5 * float(np.percentile(values_ms, 99)))
    axes.set_xlim(0, limit_ms * 1.05 or 1)
    axes.legend(loc="lower right", framealpha=0.9, edgecolor="none")


def _ms(value_ms: float) -> str:
    return f"{value_ms:,.0f} ms" if value_ms >= 100 else f"{value_ms:.3g} ms"


def _throughput(axes: Any, complete: Sequence[Record]) -> None:
    """Each chunk counts for an equal share of its answer's tokens."""
    axes.set_title("Output tokens per second over time", loc="left", fontsize=11)
    axes.set_xlabel("seconds from the start")
    axes.set_ylabel("tokens/s")
    times_s = [time_s for record in complete for time_s in record.chunk_times_s]
    if not times_s:
        return
    tokens = [
        record.output_tokens / len(record.chunk_times_s)
        for record in complete
        for _ in record.chunk_times_s
    ]
    end_s = max(times_s)
    width_s = _bin_width_s(end_s)
    edges = np.arange(0, end_s + width_s, width_s)
    counts, _ = np.histogram(times_s, bins=edges, weights=tokens)
    axes.stairs(counts / width_s, edges, fill=True, color=_BLUE, alpha=0.25)
    axes.stairs(counts / width_s, edges, color=_BLUE, linewidth=1.5)
    mean = sum(tokens) / end_s
    axes.axhline(mean, color=_ORANGE, linestyle="--", linewidth=1.2, label=f"mean  {mean:,.0f}/s")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")


def _bin_width_s(end_s: float) -> float:
    """A round width that leaves at most `_MAX_BINS` bins."""
    for width_s in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0):
        if end_s / width_s <= _MAX_BINS:
            return width_s
    return end_s / _MAX_BINS
