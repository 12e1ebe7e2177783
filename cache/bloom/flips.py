"""What a replica publishes of its filter, and what publisher and follower must agree on.

Invariant: all say what a bit is, never that it changes, so a message that comes twice does no harm.
Messages of one replica keep their order (`sequence` counts within a generation); a hole shows.
"""

import math
from dataclasses import dataclass
from struct import Struct

from cache.events import BlockKey

NUM_HASHES = 4
"""Bits a key: its four 32-bit words, so that a look-up costs a follower four ANDs. At 8 bits a key
the best count would be six, for 2.2 % instead of 2.4 %."""

MIN_BITS = 1 << 6
MAX_BITS = 1 << 26
"""128 MiB of counters; eight million keys."""
MIN_BITS_PER_KEY = 8

words_of = Struct("<4I").unpack


def positions_of(key: BlockKey, num_bits: int) -> tuple[int, int, int, int]:
    """Bits of `key` in a filter of `num_bits`, a power of two; two may coincide. Raises
    `struct.error` when `key` is not 16 bytes."""
    a, b, c, d = words_of(key)
    mask = num_bits - 1
    return a & mask, b & mask, c & mask, d & mask


def bits_for(num_keys: int) -> int:
    """Smallest filter that has `MIN_BITS_PER_KEY` for each key. Powers of two only, so that
    followers can lay the filters of most replicas side by side."""
    bits = 1 << max(num_keys * MIN_BITS_PER_KEY - 1, 0).bit_length()
    return min(max(bits, MIN_BITS), MAX_BITS)


def false_positive_rate(bits_per_key: float) -> float:
    """(1 - e^(-4 / c))^4 at c bits a key (Bloom 1970): 2.4 % at 8 bits, 0.24 % at 16."""
    if bits_per_key <= 0:
        return 1.0
    return float((1 - math.exp(-NUM_HASHES / bits_per_key)) ** NUM_HASHES)


def check_num_bits(num_bits: int) -> None:
    """Raises `ValueError` for what is no filter's size."""
    if not MIN_BITS <= num_bits <= MAX_BITS or num_bits & (num_bits - 1):
        raise ValueError(f"{num_bits} bits: a power of two from {MIN_BITS} to {MAX_BITS} is needed")


@dataclass(frozen=True, slots=True)
class FlipBatch:
    """Bits that differ from what was published before."""

    generation: int
    num_bits: int
    sequence: int
    """1 for the first batch of a generation, which starts empty."""
    set_positions: tuple[int, ...]
    cleared_positions: tuple[int, ...]
    is_complete: bool
    """From here on the generation covers every key, and older ones have ended."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Bits `start` to `start + 8 * len(bits)` of a generation, lowest bit first, as they are after
    the batch numbered `sequence`. What is about to be published may be in it already."""

    generation: int
    num_bits: int
    sequence: int
    start: int
    bits: bytes
    is_complete: bool

    @property
    def end(self) -> int:
        return self.start + 8 * len(self.bits)
