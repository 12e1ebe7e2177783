"""Other ways to find the longest cached prefix, to compare the cost of look-ups with.

Each is filled with the same chains and asked for the same ones. All of them walk.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random

from bench.cache.costs import Figures, lookup_ns
from bench.cache.replay import Chain
from bench.cache.workloads import long_chains, mixed_queries
from cache.events import BlockKey

_LENGTH = 128
_QUERIES = 512
_SEED = 7


class _OrderedDictLru:
    """The usual LRU cache: what is found moves to the end."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()
        for keys in chains:
            self._blocks.update(dict.fromkeys(keys))

    def match(self, keys: Chain) -> int:
        blocks = self._blocks
        for count, key in enumerate(keys):
            if key not in blocks:
                return count
            blocks.move_to_end(key)
        return len(keys)


class _Node:
    """Of a radix tree: a run of keys, and the nodes after it by their first key."""

    __slots__ = ("children", "run")

    def __init__(self, run: Chain) -> None:
        self.run = run
        self.children: dict[BlockKey, _Node] = {}


class _RadixTree:
    """Runs of keys without a branch share a node."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._root = _Node([])
        for keys in chains:
            self._insert(keys)

    def match(self, keys: Chain) -> int:
        node, count = self._root, 0
        while count < len(keys):
            child = node.children.get(keys[count])
            if child is None:
                return count
            common = _common(child.run, keys, count)
            count += common
            if common < len(child.run):
                return count
            node = child
        return count

    def _insert(self, keys: Chain) -> None:
        node, count = self._root, 0
        while count < len(keys):
            child = node.children.get(keys[count])
            if child is None:
                node.children[keys[count]] = _Node(keys[count:])
                return
            common = _common(child.run, keys, count)
            if common < len(child.run):
                upper = _Node(child.run[:common])
                child.run = child.run[common:]
                upper.children[child.run[0]] = child
                node.children[keys[count]] = child = upper
            node, count = child, count + common


def _common(run: Chain, keys: Chain, start: int) -> int:
    """Length of the common beginning of `run` and `keys[start:]`."""
    part = keys[start : start + len(run)]
    if part == run:
        return len(run)
    return next((i for i, (a, b) in enumerate(zip(run, part, strict=False)) if a != b), len(part))


def _sorted_match(chains: Sequence[Chain]) -> Callable[[Chain], int] | None:
    """A `SortedList`, whose look-up is its own; `SortedDict` looks up in a plain dict."""
    try:
        sortedcontainers = importlib.import_module("sortedcontainers")
    except ImportError:
        return None
    blocks = sortedcontainers.SortedList({key for keys in chains for key in keys})

    def match(keys: Chain) -> int:
        return next((i for i, key in enumerate(keys) if key not in blocks), len(keys))

    return match


def measure_rivals(num_blocks: int, rounds: int) -> tuple[Figures, list[str]]:
    """Nanoseconds a block by rival, and what was skipped."""
    rng = Random(_SEED)
    chains = long_chains(rng, num_blocks, 512)
    matches: dict[str, Callable[[Chain], int]] = {
        "ordereddict": _OrderedDictLru(chains).match,
        "radix": _RadixTree(chains).match,
    }
    skipped = []
    if (sorted_match := _sorted_match(chains)) is not None:
        matches["sortedcontainers"] = sorted_match
    else:
        skipped.append("sortedcontainers is not installed")
    least: Figures = {}
    for _ in range(rounds):
        for name, match in matches.items():
            value = lookup_ns(match, mixed_queries(rng, chains, _LENGTH, _QUERIES))
            least[name] = min(value, least.get(name, value))
    return least, skipped
