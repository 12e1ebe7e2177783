"""A Bloom filter that keys leave again.

Invariant: a key that is held is contained, whatever else was added, removed or folded, as long as
only what is held is removed.

Source: L. Fan, P. Cao, J. Almeida, A. Z. Broder, "Summary Cache" (IEEE/ACM ToN 8(3), 2000), with
its counters of four bits: at eight bits a key, one in 10^17 would count to 16.
"""

import numpy as np
from numpy.typing import NDArray

from cache.bloom.positions import NUM_HASHES, check_num_bits, words_of
from cache.events import BlockKey

_FULL = 15
"""A counter that has come here stays, because nobody knows how many there are: the bit may say yes
too often, but never no."""
_BYTES_AT_ONCE = 1 << 12
"""Of counters that are folded, so that nothing large is made on the way."""


class CountingFilter:
    """Counts a multiset of keys: one that is held in two tiers is added twice and removed twice.
    Half a byte a bit."""

    def __init__(self, num_bits: int) -> None:
        """`num_bits` is a power of two. Raises `ValueError`."""
        check_num_bits(num_bits)
        self.num_bits = num_bits
        self._counters = bytearray(num_bits // 2)

    @property
    def num_bytes(self) -> int:
        return len(self._counters)

    def add(self, key: BlockKey) -> list[int]:
        """Returns the bits that are set now and were not before. Raises `struct.error` when `key`
        is not 16 bytes."""
        counters, mask = self._counters, self.num_bits - 1
        fresh = []
        for word in words_of(key):
            position = word & mask
            at, shift = position >> 1, (position & 1) << 2
            count = counters[at] >> shift & _FULL
            if count != _FULL:
                counters[at] += 1 << shift
            if not count:
                fresh.append(position)
        return fresh

    def remove(self, key: BlockKey) -> list[int]:
        """Undoes one `add` of the key; returns the bits that are set no longer. What is not
        contained must not be removed."""
        counters, mask = self._counters, self.num_bits - 1
        cleared = []
        for word in words_of(key):
            position = word & mask
            at, shift = position >> 1, (position & 1) << 2
            count = counters[at] >> shift & _FULL
            if not 0 < count < _FULL:
                continue
            counters[at] -= 1 << shift
            if count == 1:
                cleared.append(position)
        return cleared

    def __contains__(self, key: BlockKey) -> bool:
        counters, mask = self._counters, self.num_bits - 1
        for word in words_of(key):
            position = word & mask
            if not counters[position >> 1] >> ((position & 1) << 2) & _FULL:
                return False
        return True

    def fold(self) -> None:
        """Halves the memory, and says yes more often from now on."""
        half = len(self._counters) // 2
        folded = bytearray(half)
        counters, target = np.frombuffer(self._counters, np.uint8), np.frombuffer(folded, np.uint8)
        for start in range(0, half, _BYTES_AT_ONCE):
            end = min(start + _BYTES_AT_ONCE, half)
            one, two = counters[start:end], counters[half + start : half + end]
            low = np.minimum((one & _FULL) + (two & _FULL), _FULL)
            high = np.minimum((one >> 4) + (two >> 4), _FULL)
            target[start:end] = high << 4 | low
        self._counters = folded
        self.num_bits //= 2

    def bits(self, start: int, end: int) -> NDArray[np.bool_]:
        """`[end - start]`: the bits from `start` to `end`, both even."""
        counters = np.frombuffer(self._counters, np.uint8)[start // 2 : end // 2]
        return np.stack([counters & _FULL, counters >> 4], axis=1).reshape(-1) > 0

    def check_integrity(self, num_keys: int) -> None:
        """Of a filter that holds so many keys. O(bits)."""
        counters = np.frombuffer(self._counters, np.uint8)
        nibbles = np.stack([counters & _FULL, counters >> 4])
        assert len(counters) * 2 == self.num_bits
        if not (nibbles == _FULL).any():
            assert int(nibbles.sum(dtype=np.int64)) == NUM_HASHES * num_keys
