"""Replays chains of block keys, one request after the other, and counts the blocks that are found.

Invariant: every policy sees the same requests, keeps the index closed under prefixes, and holds all
blocks of the request in hand; so figures of different policies are about what they evict alone.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cache.events import BlockKey
from cache.prefix import PrefixCache

Chain = list[BlockKey]
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Hits:
    """Blocks wanted and found, by request."""

    wanted: list[int]
    found: list[int]

    @property
    def rate_pct(self) -> float:
        return 100 * sum(self.found) / sum(self.wanted)

    def window_rates_pct(self, num_windows: int) -> list[float]:
        """Of consecutive windows of as many requests each."""
        size = len(self.wanted) // num_windows
        return [
            100 * sum(self.found[i : i + size]) / sum(self.wanted[i : i + size])
            for i in range(0, size * num_windows, size)
        ]


def replay_cache(
    chains: Sequence[Chain], num_blocks: int, cache: PrefixCache | None = None
) -> Hits:
    """Through Shoal's own cache; a request is one tick."""
    cache = cache or PrefixCache(num_blocks)
    found = []
    for tick, keys in enumerate(chains):
        cache.advance(tick)
        table = cache.start(keys, len(keys))
        found.append(table.num_published)
        if cache.grow(table, len(keys)) is None:
            raise ValueError(f"a chain of {len(keys)} blocks in a pool of {num_blocks}")
        cache.publish(table, b"", len(keys))
        cache.release(table)
        cache.drain_events()
    return Hits([len(keys) for keys in chains], found)


def replay_lru(chains: Sequence[Chain], num_blocks: int) -> Hits:
    """Exact least-recently-used. A chain is touched from its end, so a parent is always younger
    than its children and what goes first is always a leaf."""
    blocks: OrderedDict[BlockKey, None] = OrderedDict()
    found = []
    for keys in chains:
        found.append(next((i for i, key in enumerate(keys) if key not in blocks), len(keys)))
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > num_blocks:
            blocks.popitem(last=False)
    return Hits([len(keys) for keys in chains], found)


def replay_optimum(chains: Sequence[Chain], num_blocks: int) -> Hits:
    """An upper bound of any policy: Belady's rule with the whole future known, a chain in hand for
    free, and no block kept that must not be (IBM Systems Journal 5(2), 1966). A child is never used
    earlier than its parent, so with ties broken from the end the rule keeps closure by itself."""
    following: dict[BlockKey, int] = {}
    uses: list[list[int]] = [[]] * len(chains)
    for number in range(len(chains) - 1, -1, -1):
        uses[number] = [following.get(key, _NEVER) for key in chains[number]]
        following.update(dict.fromkeys(chains[number], number))
    due: dict[BlockKey, int] = {}
    furthest: list[tuple[int, int, BlockKey]] = []
    found = []
    for keys, times in zip(chains, uses, strict=True):
        found.append(next((i for i, key in enumerate(keys) if key not in due), len(keys)))
        for depth, (key, time) in enumerate(zip(keys, times, strict=True)):
            due[key] = time
            if time == _NEVER:
                del due[key]
            else:
                heapq.heappush(furthest, (-time, -depth, key))
        while len(due) > num_blocks:
            time, _, key = heapq.heappop(furthest)
            if due.get(key) == -time:
                del due[key]
    return Hits([len(keys) for keys in chains], found)
