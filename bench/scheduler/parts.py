"""What each part of the scheduler gives on the default model, by switching it off alone.

Invariant: the two sides of a figure serve the same requests on the same executor, in turn, and
differ in the part in question only; a figure is the median of the rounds.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.figures import Progress
from bench.scheduler.traffic import Drive, Record, load_traffic
from cache.keys import key_root
from cache.prefix import PrefixCache
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from engine.draft import Draft
from engine.plan import Executor
from engine.scheduler import Scheduler

_ROUNDS = 3
_NUM_BLOCKS = 2048
_STEADY_BLOCKS = 512
"""For the workload that must evict."""
_WHOLE = 1 << 16
"""Tokens: no prompt is cut, and all that wait fit a step."""
_LEAST_STEPS = 5
"""In a bucket whose median is to be compared with."""
_BUCKET_TOKENS = 16
_STEADY = 1.5


class PhasedScheduler(Scheduler):
    """Prefill first, in whole prompts, and decodes only while no prompt can start: what schedulers
    did before phases were given up."""

    def _plan_running(self, draft: Draft) -> bool:
        self._plan_waiting(draft, 0.0)
        if draft.is_empty:
            super()._plan_running(draft)
        return True  # Nothing is left for `schedule` to start.


def load_executor() -> Executor:
    from engine.executors.model import ModelExecutor

    return ModelExecutor.load(EngineConfig(cache=CacheConfig(num_blocks=_NUM_BLOCKS)))


def measure_parts(executor: Executor, progress: Progress) -> dict[str, float]:
    progress("long texts: whole, in chunks, and found in the cache")
    whole, chunked, cached = _medians(
        [
            lambda: _run(executor, "long_text", _config(_WHOLE), reuse=False),
            lambda: _run(executor, "long_text", SchedulerConfig(), reuse=False),
            lambda: _run(executor, "long_text", SchedulerConfig()),
        ]
    )
    progress("phases and no overlap against none and overlap")
    phased, unified = _medians(
        [
            lambda: _run(executor, "mixed", _config(_WHOLE, overlap=False), kind=PhasedScheduler),
            lambda: _run(executor, "mixed", SchedulerConfig()),
        ]
    )
    progress("steps while the cache fills and evicts")
    steady = _run(executor, "steady", SchedulerConfig(), num_blocks=_STEADY_BLOCKS)
    return {
        "long_text_gain_pct_chunk": 100 * (chunked.tokens_per_s / whole.tokens_per_s - 1),
        "long_text_ttft_ratio_chunk": whole.ttft_p95_s / chunked.ttft_p95_s,
        "long_text_gain_pct_cache": 100 * (cached.tokens_per_s / chunked.tokens_per_s - 1),
        "v0_ratio": unified.tokens_per_s / phased.tokens_per_s,
        "v0_itl_p99_ratio": phased.gap_p99_s / unified.gap_p99_s,
        "steady_steps_pct": steady_steps_pct(steady.steps),
    }


def steady_steps_pct(steps: Sequence[tuple[int, float]]) -> float:
    """Of steps (tokens, seconds), those within 1.5 times the median of steps of as many tokens."""
    buckets: dict[int, list[float]] = defaultdict(list)
    for num_tokens, seconds in steps:
        buckets[-(-num_tokens // _BUCKET_TOKENS)].append(seconds)
    counted = [bucket for bucket in buckets.values() if len(bucket) >= _LEAST_STEPS]
    num_steady = sum(
        seconds <= _STEADY * statistics.median(bucket) for bucket in counted for seconds in bucket
    )
    return 100 * num_steady / sum(map(len, counted))


class _Side:
    """Medians of one side's rounds."""

    def __init__(self, records: Sequence[Record]) -> None:
        median = statistics.median
        self.tokens_per_s = median(record.num_tokens / record.wall_s for record in records)
        self.gap_p99_s = median(record.gap_p99_s for record in records)
        self.ttft_p95_s = median(record.ttft_p95_s for record in records)


def _medians(runs: Sequence[Callable[[], Record]]) -> list[_Side]:
    """In turn, lest one side has the better minute."""
    rounds = [[run() for run in runs] for _ in range(_ROUNDS)]
    return [_Side(records) for records in zip(*rounds, strict=True)]


def _config(num_tokens: int, overlap: bool = True) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=num_tokens, long_prefill_threshold=num_tokens, overlap=overlap
    )


def _run(
    executor: Executor,
    workload: str,
    config: SchedulerConfig,
    *,
    reuse: bool = True,
    num_blocks: int = _NUM_BLOCKS,
    kind: type[Scheduler] = Scheduler,
) -> Record:
    info = executor.info
    cache = PrefixCache(num_blocks, block_size=info.block_size)
    scheduler = kind(config, cache, info.block_size, reuse=reuse)
    root = key_root(b"k" * 32, info.fingerprint, "", info.block_size)
    return Drive(scheduler, executor, load_traffic(workload), root).run()
