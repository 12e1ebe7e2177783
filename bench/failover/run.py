"""The parts of `shoal bench failover`, in order, as flat figures."""

import asyncio

from bench.failover.chaos import measure_chaos, measure_poison
from bench.failover.real import measure_real
from bench.figures import Figures, Progress


def bench_failover(quick: bool, progress: Progress) -> Figures:
    return asyncio.run(_bench(quick, progress))


async def _bench(quick: bool, progress: Progress) -> Figures:
    figures: Figures = {"benchmark": "failover"}
    figures |= await measure_chaos(*((40, 150, 1) if quick else (200, 400, 5)), progress)
    progress("one request that kills what computes it, among 50")
    figures |= await measure_poison(50, 60 if quick else 200)
    if not quick:
        figures |= await measure_real("float32", 24, 300, 2, progress)
        figures |= await measure_real("bfloat16", 24, 300, 2, progress)
    return figures
