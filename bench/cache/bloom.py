"""Measures the walk of a chain through the sliced Bloom index of 1,000 replicas.

Invariant: filters are as large and as full as real ones, and each look-up is of another chain, so
that rows come from memory as they would between requests, not from the processor's cache.
"""

import random
import time
from collections.abc import Sequence

from cache.bloom.flips import FlipBatch, SnapshotChunk, bits_for, positions_of
from cache.bloom.sliced import BitSlicedIndex
from cache.events import BlockKey

_REPLICAS = 1000
_BLOCKS = 128
_KEYS_A_REPLICA = 16_384
_CHAINS = 32


def measure_bloom(rounds: int) -> dict[str, float]:
    """Processor time in microseconds a chain of 128 blocks, the least of `rounds` over 32 chains:
    when every replica holds it all, and when replicas hold any number of its blocks from 0 on."""
    rng = random.Random(20)
    full = [_chain(rng) for _ in range(_CHAINS)]
    ragged = [_chain(rng) for _ in range(_CHAINS)]
    index = BitSlicedIndex()
    num_bits = bits_for(_KEYS_A_REPLICA)
    shared = [key for chain in full for key in chain]
    for number in range(_REPLICAS):
        name = f"replica-{number}"
        index.add_replica(name)
        keys = shared + [key for chain in ragged for key in chain[: rng.randrange(_BLOCKS + 1)]]
        index.load(name, SnapshotChunk(1, num_bits, 1, 0, _other_keys(rng, num_bits), True))
        positions = [one for key in keys for one in positions_of(key, num_bits)]
        index.apply(name, FlipBatch(1, num_bits, 2, tuple(positions), (), True))
    return {
        "bloom_1000_replicas_us_per_128_blocks": _least_us(index, full, rounds),
        "bloom_1000_replicas_us_per_128_blocks_ragged": _least_us(index, ragged, rounds),
    }


def _chain(rng: random.Random) -> list[BlockKey]:
    return [rng.randbytes(16) for _ in range(_BLOCKS)]


def _other_keys(rng: random.Random, num_bits: int) -> bytes:
    """3/8 of the bits set at random: what a filter with 8 bits a key looks like."""
    one, two, three = (rng.getrandbits(num_bits) for _ in range(3))
    return (one & (two | three)).to_bytes(num_bits // 8, "little")


def _least_us(index: BitSlicedIndex, chains: Sequence[list[BlockKey]], rounds: int) -> float:
    least_s = float("inf")
    for _ in range(rounds):
        start_s = time.process_time()
        for chain in chains:
            index.depths(chain, _REPLICAS)
        least_s = min(least_s, (time.process_time() - start_s) / len(chains))
    return least_s * 1e6
