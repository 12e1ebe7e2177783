"""The parts of `shoal bench scheduler`, in order, as flat figures."""

from collections.abc import Collection

from bench.figures import Figures, Progress
from bench.scheduler.burst import measure_burst
from bench.scheduler.overlap import measure_model, measure_overlap
from bench.scheduler.parts import load_executor, measure_parts
from bench.scheduler.planning import measure_planning


def bench_scheduler(quick: bool, parts: Collection[str], progress: Progress) -> Figures:
    """`parts`: those to run; `quick` leaves out all but the first two."""
    figures: Figures = {"benchmark": "scheduler"}
    if "planning" in parts:
        figures |= _planning(quick, progress)
    if "burst" in parts:
        progress("a burst of batch work under interactive requests (simulated clock)")
        burst = measure_burst(40 if quick else 200)
        figures |= {key: round(value, 3) for key, value in burst.items()}
    if quick:
        return figures
    if "overlap" in parts:
        for gil_pct in (0, 30):
            progress(f"overlap with steps of 5 ms that hold the GIL for {gil_pct} %")
            overlap = measure_overlap(gil_pct / 100)
            figures |= {f"{key}_{gil_pct}": round(value, 3) for key, value in overlap.items()}
    if "model" in parts:
        progress("the default model with 64 streams, and idle")
        figures |= {key: round(value, 3) for key, value in measure_model().items()}
    if "gains" in parts:
        gains = measure_parts(load_executor(), progress)
        figures |= {key: round(value, 3) for key, value in gains.items()}
    return figures


def _planning(quick: bool, progress: Progress) -> Figures:
    figures: Figures = {}
    for count in (16,) if quick else (16, 256, 1024):
        progress(f"plans with {count} running")
        for key, value in measure_planning(count, 60 if quick else 2000).items():
            figures[f"{key}_{count}"] = round(value, 1)
    return figures
