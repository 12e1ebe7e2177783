"""The parts of `shoal bench cache`, in order, as flat figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.cache.costs import measure_evict, measure_lookup, measure_pool
from bench.cache.model import measure_share, measure_tiers
from bench.cache.parts import measure_parts
from bench.cache.replay import Chain, replay_cache, replay_lru, replay_optimum
from bench.cache.rivals import measure_rivals
from bench.cache.workloads import drifting_chains, num_distinct, scanned_chains, trace_chains
from bench.figures import Figures, Progress

_TRACES = ("conversation", "synthetic")
_SHARES_PCT = (1, 5, 20)
_NUM_WINDOWS = 20
_SEED = 11


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    sizes: dict[str, int]
    """Blocks cached, by the name that figures have for it."""
    rounds: int
    drift_blocks: int
    drift_requests: int
    trace_requests: int | None
    with_model: bool


FULL = Extent(
    {"1k": 1_000, "10k": 10_000, "100k": 100_000, "1m": 1_000_000},
    7,
    100_000,
    60_000,
    None,
    True,
)
QUICK = Extent({"1k": 1_000}, 2, 1_000, 2_000, 1_000, False)


def bench_cache(extent: Extent, traces: Path, progress: Progress) -> Figures:
    """All figures: ns a block, hit rates in per cent, differences in points."""
    figures: Figures = {"benchmark": "cache", "rounds": extent.rounds}
    skipped: list[str] = []
    for name, num_blocks in extent.sizes.items():
        progress(f"cost with {name} blocks cached")
        for measure in (measure_lookup, measure_pool, measure_evict):
            for key, value in measure(num_blocks, extent.rounds).items():
                figures[f"{key}_{name}"] = round(value, 1)
    name, num_blocks = list(extent.sizes.items())[min(2, len(extent.sizes) - 1)]
    progress(f"other structures with {name} blocks cached")
    rivals, reasons = measure_rivals(num_blocks, extent.rounds)
    figures |= {f"lookup_ns_per_block_128_{name}_{key}": round(v, 1) for key, v in rivals.items()}
    skipped += reasons
    progress("parts of blocks")
    parts = measure_parts(extent.drift_requests // 3)
    figures |= {key: round(value, 2) for key, value in parts.items()}
    progress("hit rate on a drifting hot set")
    figures |= _drift(extent)
    progress("hit rate under scans")
    figures |= _scan(extent)
    for trace in _TRACES:
        path = traces / f"mooncake_{trace}.jsonl.gz"
        if not path.is_file():
            skipped.append(f"{path.name} is not in the folder of traces")
            continue
        progress(f"hit rate on the {trace} trace")
        figures |= _trace(trace, trace_chains(path, extent.trace_requests))
    if extent.with_model:
        progress("share of the default model's steps")
        figures |= {key: round(value, 3) for key, value in measure_share().items()}
        progress("time to first token from each tier")
        figures |= {key: round(value, 1) for key, value in measure_tiers().items()}
    figures["skipped"] = "; ".join(skipped)
    return figures


def _drift(extent: Extent) -> Figures:
    num_blocks = extent.drift_blocks
    chains = drifting_chains(Random(_SEED), extent.drift_requests, num_blocks // 5)
    own, lru = replay_cache(chains, num_blocks), replay_lru(chains, num_blocks)
    windows = zip(
        own.window_rates_pct(_NUM_WINDOWS), lru.window_rates_pct(_NUM_WINDOWS), strict=True
    )
    gains = [ours - theirs for ours, theirs in windows]
    name = f"{num_blocks // 1000}k"
    return {
        f"hit_rate_swing_pct_{name}": round(min(gains), 2),
        f"hit_rate_swing_best_pct_{name}": round(max(gains), 2),
        f"hit_pct_drift_{name}": round(own.rate_pct, 2),
    }


def _scan(extent: Extent) -> Figures:
    num_blocks = extent.drift_blocks // 10
    chains = scanned_chains(Random(_SEED), extent.drift_requests // 3, num_blocks // 20)
    own, lru = replay_cache(chains, num_blocks), replay_lru(chains, num_blocks)
    return {
        "hit_minus_lru_pct_scan": round(own.rate_pct - lru.rate_pct, 2),
        "hit_pct_scan": round(own.rate_pct, 2),
    }


def _trace(name: str, chains: Sequence[Chain]) -> Figures:
    figures: Figures = {}
    distinct = num_distinct(chains)
    longest = max(map(len, chains))
    for share in _SHARES_PCT:
        num_blocks = max(longest, distinct * share // 100)
        own = replay_cache(chains, num_blocks).rate_pct
        figures[f"hit_pct_{name}_{share}"] = round(own, 2)
        for rival, replay in (("lru", replay_lru), ("optimum", replay_optimum)):
            rate = replay(chains, num_blocks).rate_pct
            figures[f"hit_minus_{rival}_pct_{name}_{share}"] = round(own - rate, 2)
    return figures
