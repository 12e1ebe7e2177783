"""The parts of `shoal bench scheduler`, in order, as flat figures."""

from collections.abc import Callable

from bench.scheduler.burst import measure_burst
from bench.scheduler.overlap import measure_model, measure_overlap
from bench.scheduler.parts import load_executor, measure_parts
from bench.scheduler.planning import measure_planning

Figures = dict[str, float | int | str]


def bench_scheduler(quick: bool, progress: Callable[[str], None]) -> Figures:
    figures: Figures = {"benchmark": "scheduler"}
    for count in (16,) if quick else (16, 256, 1024):
        progress(f"plans with {count} running")
        for key, value in measure_planning(count, 60 if quick else 2000).items():
            figures[f"{key}_{count}"] = round(value, 1)
    progress("a burst of batch work under interactive requests (simulated clock)")
    burst = measure_burst(40 if quick else 200)
    figures |= {key: round(value, 3) for key, value in burst.items()}
    if quick:
        return figures
    for gil_pct in (0, 30):
        progress(f"overlap with steps of 5 ms that hold the GIL for {gil_pct} %")
        overlap = measure_overlap(gil_pct / 100)
        figures |= {f"{key}_{gil_pct}": round(value, 3) for key, value in overlap.items()}
    progress("the default model with 64 streams, and idle")
    figures |= {key: round(value, 3) for key, value in measure_model().items()}
    parts = measure_parts(load_executor(), progress)
    return figures | {key: round(value, 3) for key, value in parts.items()}
