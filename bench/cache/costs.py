"""What the cache's operations cost a block, by the number of blocks cached.

Invariant: a figure is the processor time of this process (others' load does not count as time, but
does slow memory down), the least of the rounds, with garbage collection off. Each round looks for
other chains, with keys that are new objects, so that the index comes from memory.
"""

import gc
import time
from collections.abc import Callable, Sequence
from random import Random

from bench.cache.replay import Chain
from bench.cache.workloads import copied, long_chains, mixed_queries, trace_like_chains
from cache.events import BlockKey
from cache.pool import BlockPool
from cache.prefix import PrefixCache

LENGTHS = (32, 128, 512)
_LENGTH = 128
_BATCH = 128
_QUERIED_BLOCKS = 65_536
"""Blocks looked for in a round."""
_SIDE_BY_SIDE = 64
_TURN_BLOCKS = 4
_EVICTED_SHARE = 2
"""All rounds together evict one in so many blocks."""
_SEED = 7

Figures = dict[str, float]


def least_ns(timed: Callable[[], None], count: int) -> float:
    """Nanoseconds for each of `count`, once."""
    was_on = gc.isenabled()
    gc.disable()
    start_ns = time.process_time_ns()
    timed()
    elapsed_ns = time.process_time_ns() - start_ns
    if was_on:
        gc.enable()
    return elapsed_ns / count


def filled_cache(chains: Sequence[Chain], num_blocks: int) -> PrefixCache:
    """Computed as an engine would: up to 64 requests side by side, some blocks of each in turn, so
    that a chain lies scattered over pool and index. None runs beside one that it shares with. A
    block counts as one token, its key's first bytes, so that parts can be found as in an engine."""
    cache = PrefixCache(num_blocks, block_size=1)
    running: dict[BlockKey, Chain] = {}
    for keys in chains:
        if keys[0] in running or len(running) == _SIDE_BY_SIDE:
            _compute(cache, list(running.values()))
            running.clear()
        running[keys[0]] = keys
    _compute(cache, list(running.values()))
    cache.drain_events()
    return cache


def _compute(cache: PrefixCache, chains: Sequence[Chain]) -> None:
    cache.advance(cache.wheel.now + 1)
    tables = [cache.start(keys, len(keys)) for keys in chains]
    tokens = [[int.from_bytes(key[:4], "little") >> 1 for key in keys] for keys in chains]
    for end in range(_TURN_BLOCKS, max(map(len, chains)) + _TURN_BLOCKS, _TURN_BLOCKS):
        for table, token_ids in zip(tables, tokens, strict=True):
            num_blocks = min(end, len(table.keys))
            assert cache.grow(table, num_blocks) is not None
            cache.publish(table, b"", num_blocks, token_ids)
    for table in tables:
        cache.release(table)


def measure_lookup(num_blocks: int, rounds: int) -> Figures:
    """`match` of chains of three lengths, and `start` and `release` of chains of 128."""
    rng = Random(_SEED)
    chains = long_chains(rng, num_blocks, min(max(LENGTHS), num_blocks))
    cache = filled_cache(chains, num_blocks)
    least = _Least()
    for _ in range(rounds):
        for length in LENGTHS:
            queries = mixed_queries(rng, chains, length, _QUERIED_BLOCKS // length)
            least.note(f"lookup_ns_per_block_{length}", lookup_ns(cache.match, queries))
        whole = [chain for chain in chains if len(chain) >= _LENGTH]
        queries = [copied(rng.choice(whole)[:_LENGTH]) for _ in range(_QUERIED_BLOCKS // _LENGTH)]
        _measure_admit(cache, queries, least)
    assert cache.num_holes == 0
    return least.figures


def lookup_ns(match: Callable[[Chain], int], queries: Sequence[Chain]) -> float:
    def timed() -> None:
        for keys in queries:
            match(keys)

    return least_ns(timed, sum(map(len, queries)))


def _measure_admit(cache: PrefixCache, queries: Sequence[Chain], least: "_Least") -> None:
    count = sum(map(len, queries))
    tables = []

    def admit() -> None:
        tables.extend([cache.start(keys, _LENGTH) for keys in queries])

    def release() -> None:
        for table in tables:
            cache.release(table)

    least.note("admit_ns_per_block", least_ns(admit, count))
    least.note("release_ns_per_block", least_ns(release, count))


def measure_pool(num_blocks: int, rounds: int) -> Figures:
    """Batches of 128, until all blocks are held and all are free again; `free` is with the drop of
    their references. Between rounds the free stack is in no order."""
    rng = Random(_SEED)
    pool = BlockPool(num_blocks)
    count = num_blocks // _BATCH
    batches: list[list[int]] = []

    def allocate() -> None:
        batches.extend([pool.allocate(_BATCH) for _ in range(count)])

    def free() -> None:
        for batch in batches:
            pool.free(pool.drop(batch))

    least = _Least()
    for _ in range(rounds):
        batches.clear()
        least.note("allocate_ns_per_block", least_ns(allocate, count * _BATCH))
        rng.shuffle(batches)
        least.note("free_ns_per_block", least_ns(free, count * _BATCH))
    return least.figures


def measure_evict(num_blocks: int, rounds: int) -> Figures:
    """`grow` of a request in a full cache of trace-like chains, 128 blocks at a time: eviction from
    wheel and index, the events, and the allocation."""
    chains = trace_like_chains(Random(_SEED), num_blocks)
    cache = filled_cache(chains, num_blocks)
    count = max(1, num_blocks // _EVICTED_SHARE // rounds // _BATCH)

    def grow() -> None:
        for _ in range(count):
            table = cache.start([], 0)
            cache.grow(table, _BATCH)

    least = _Least()
    for _ in range(min(rounds, num_blocks // _BATCH // count)):
        evicted = cache.num_evicted
        least.note("evict_full_ns_per_block", least_ns(grow, count * _BATCH))
        assert cache.num_evicted - evicted == count * _BATCH
        cache.drain_events()
    return least.figures


class _Least:
    """The least of what was noted, by key."""

    def __init__(self) -> None:
        self.figures: Figures = {}

    def note(self, key: str, value: float) -> None:
        self.figures[key] = min(value, self.figures.get(key, value))
