"""A Bloom filter whose every key lives in one block of 512 bits.

Invariant: a key that was added since the last rebuild is contained.

Source: F. Putze, P. Sanders, J. Singler, "Cache-, Hash- and Space-Efficient Bloom Filters" (WEA
2007), blocked filters, with each block split into eight sectors of 64 bits and one bit a sector and
key. In Python the gain is not the cache line but one list access and one AND a look-up.
"""

import math
from collections.abc import Iterable
from struct import Struct

from cache.events import BlockKey

BLOCK_BITS = 512
_SECTOR_BITS = 64
_SECTORS = BLOCK_BITS // _SECTOR_BITS

# The first half of a key gives four times 12 bits, each a bit in two sectors; the second half gives
# the block alone. One choice never says anything about another.
_FIELDS = Struct("<4HQ")
_FIELD_MASK = 0xFFF


def _pair_patterns(pair: int) -> tuple[int, ...]:
    """Both bits of two neighbouring sectors, by 12 bits of the key."""
    shift = pair * 2 * _SECTOR_BITS
    return tuple(
        (1 << (field & 63) | 1 << (_SECTOR_BITS + (field >> 6))) << shift
        for field in range(_FIELD_MASK + 1)
    )


_PATTERNS = tuple(_pair_patterns(pair) for pair in range(_SECTORS // 2))


def false_positive_rate(bits_per_key: float) -> float:
    """Odds that a key that was never added is contained, at `bits_per_key` bits a key.

    A block has Poisson(512 / c) keys at c bits a key. With j keys, each of the eight sectors has
    the bit that is asked for with odds 1 - (63/64)^j, independently of the others, so the rate is
    the sum over j of Poisson(j; 512 / c) (1 - (63/64)^j)^8. About 2.9 % at 8 bits, 0.4 % at 12,
    0.09 % at 16.
    """
    if bits_per_key <= 0:
        return 1.0
    mean = BLOCK_BITS / bits_per_key
    last = int(mean + 12 * math.sqrt(mean) + 12)
    rate = 0.0
    for keys in range(1, last + 1):
        weight = math.exp(keys * math.log(mean) - mean - math.lgamma(keys + 1))
        rate += weight * (1 - (1 - 1 / _SECTOR_BITS) ** keys) ** _SECTORS
    return min(rate, 1.0)


def bits_per_key(target_rate: float) -> float:
    """Inverse of `false_positive_rate`. Raises `ValueError` outside of [1e-6, 0.5]."""
    if not 1e-6 <= target_rate <= 0.5:
        raise ValueError(f"a false-positive rate of {target_rate} is outside of [1e-6, 0.5]")
    low, high = 1.0, 256.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if false_positive_rate(middle) > target_rate:
            low = middle
        else:
            high = middle
    return high


class BlockedBloom:
    """Holds `capacity` keys at no more than `target_rate`; more keys raise the rate, nothing else.

    Nothing can be taken out: who owns the set compares `num_added` with its own count and rebuilds.
    Memory: about 108 bytes a block of 64 (a Python int each); an empty block takes 8.
    """

    def __init__(self, capacity: int, target_rate: float = 0.01) -> None:
        if capacity < 1:
            raise ValueError("a filter is for one key at least")
        self.target_rate = target_rate
        self._bits_per_key = bits_per_key(target_rate)
        self._set_capacity(capacity)
        self._blocks = [0] * self._num_blocks
        self.num_added = 0
        """Keys added since the last rebuild, repeated ones counted again."""

    @property
    def num_bits(self) -> int:
        return self._num_blocks * BLOCK_BITS

    def add(self, key: BlockKey) -> None:
        """O(1). Raises `struct.error` when `key` is not 16 bytes."""
        a, b, c, d, choice = _FIELDS.unpack(key)
        first, second, third, fourth = _PATTERNS
        self._blocks[choice % self._num_blocks] |= (
            first[a & 0xFFF] | second[b & 0xFFF] | third[c & 0xFFF] | fourth[d & 0xFFF]
        )
        self.num_added += 1

    def __contains__(self, key: BlockKey) -> bool:
        """O(1). False only if `key` was not added since the last rebuild."""
        a, b, c, d, choice = _FIELDS.unpack(key)
        first, second, third, fourth = _PATTERNS
        pattern = first[a & 0xFFF] | second[b & 0xFFF] | third[c & 0xFFF] | fourth[d & 0xFFF]
        return bool(self._blocks[choice % self._num_blocks] & pattern == pattern)

    def fill(self) -> float:
        """Share of bits that are set, 0 to 1. O(blocks)."""
        return sum(block.bit_count() for block in self._blocks) / self.num_bits

    def rebuild(self, keys: Iterable[BlockKey], capacity: int | None = None) -> None:
        """Holds `keys` and nothing else, sized for `capacity` if given. If `keys` raises, the
        filter is as it was."""
        fresh = BlockedBloom(self.capacity if capacity is None else capacity, self.target_rate)
        for key in keys:
            fresh.add(key)
        self._set_capacity(fresh.capacity)
        self._blocks = fresh._blocks
        self.num_added = fresh.num_added

    def check_integrity(self) -> None:
        assert len(self._blocks) == self._num_blocks
        sector = (1 << _SECTOR_BITS) - 1
        for block in self._blocks:
            assert 0 <= block < 1 << BLOCK_BITS
            # Every key sets a bit in every sector.
            sectors = [block >> shift & sector for shift in range(0, BLOCK_BITS, _SECTOR_BITS)]
            assert all(sectors) or not block

    def _set_capacity(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_blocks = math.ceil(capacity * self._bits_per_key / BLOCK_BITS)
