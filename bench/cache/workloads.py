"""Chains of block keys to measure the cache with: from traces, and made with a fixed seed.

Invariant: a key stands for its whole prefix, as in `cache.keys`, so what is made here is closed
under prefixes however it is cut.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random

from bench.cache.replay import Chain
from bench.serve.traces import read_trace
from cache.events import BlockKey
from cache.keys import KEY_BYTES

_TRUNK_SHARE = 4
"""One in so many parts of a long chain is shared with other chains."""
_MEAN_BLOCKS = 24
_MOST_BLOCKS = 247
"""Mean and longest chain of Mooncake's conversation trace."""


def trace_chains(path: Path, max_requests: int | None) -> list[Chain]:
    """Requests of a Mooncake trace in order. Raises `TraceError`."""
    numbers: dict[tuple[int, int], int] = {}
    chains = []
    for entry in read_trace(path)[:max_requests]:
        parent, keys = 0, []
        for hash_id in entry.hash_ids:
            parent = numbers.setdefault((parent, hash_id), len(numbers) + 1)
            keys.append(parent.to_bytes(KEY_BYTES, "little"))
        if keys:
            chains.append(keys)
    return chains


def num_distinct(chains: Sequence[Chain]) -> int:
    return len(set(itertools.chain.from_iterable(chains)))


def long_chains(rng: Random, num_blocks: int, length: int) -> list[Chain]:
    """Chains of `length` that have `num_blocks` distinct blocks together: every other one begins
    with a quarter of the one before it. The last one is shorter."""
    chains: list[Chain] = []
    left = num_blocks
    while left > 0:
        trunk = chains[-1][: length // _TRUNK_SHARE] if len(chains) % 2 else []
        own = min(left, length - len(trunk))
        chains.append(trunk + _new_keys(rng, own))
        left -= own
    return chains


def trace_like_chains(rng: Random, num_blocks: int) -> list[Chain]:
    """Like a conversation trace: lengths around 24 blocks, at most 247; half of the chains go on
    from some place in an earlier one."""
    chains: list[Chain] = []
    left = num_blocks
    while left > 0:
        trunk: Chain = []
        if chains and rng.random() < 0.5:
            earlier = rng.choice(chains)
            trunk = earlier[: rng.randint(1, len(earlier))]
        own = min(left, 1 + int(rng.expovariate(1 / _MEAN_BLOCKS)), _MOST_BLOCKS)
        trunk = trunk[: _MOST_BLOCKS - own]
        chains.append(trunk + _new_keys(rng, own))
        left -= own
    return chains


def mixed_queries(rng: Random, chains: Sequence[Chain], length: int, count: int) -> list[Chain]:
    """Half of them found whole, half up to any block; all keys new objects, as a request's are."""
    long_enough = [chain for chain in chains if len(chain) >= length]
    queries = []
    for number in range(count):
        chain = rng.choice(long_enough)
        cut = length if number % 2 else rng.randrange(length)
        queries.append([*copied(chain[:cut]), *_new_keys(rng, length - cut)])
    return queries


def copied(keys: Chain) -> Chain:
    """Equal keys that are other objects and whose hash is not known yet."""
    return [bytes(bytearray(key)) for key in keys]


def drifting_chains(rng: Random, num_requests: int, num_documents: int) -> list[Chain]:
    """Zipf-distributed documents, each asked about with a few blocks of its own; which documents
    are hot moves on all the time, by a tenth of them over the run."""
    documents = _documents(rng, num_documents)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, num_documents + 1)))
    ranks = rng.choices(range(num_documents), cum_weights=weights, k=num_requests)
    chains = []
    for number, rank in enumerate(ranks):
        moved = number * num_documents // (10 * num_requests)
        document = documents[(rank + moved) % num_documents]
        chains.append(document + _new_keys(rng, rng.randint(1, 8)))
    return chains


def scanned_chains(rng: Random, num_requests: int, num_documents: int) -> list[Chain]:
    """Zipf-distributed documents, with bursts between them of long chains seen once each."""
    documents = _documents(rng, num_documents)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, num_documents + 1)))
    chains = []
    for number in range(num_requests):
        if number % 400 >= 300:
            chains.append(_new_keys(rng, 2 * _MEAN_BLOCKS))
        else:
            chains.append(rng.choices(documents, cum_weights=weights)[0])
    return chains


def _documents(rng: Random, count: int) -> list[Chain]:
    lengths = (1 + int(rng.expovariate(1 / _MEAN_BLOCKS)) for _ in range(count))
    return [_new_keys(rng, min(length, _MOST_BLOCKS)) for length in lengths]


def _new_keys(rng: Random, count: int) -> list[BlockKey]:
    return [rng.randbytes(KEY_BYTES) for _ in range(count)]
