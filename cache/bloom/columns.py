"""Filters of many replicas side by side: a row is a bit position, a column is one replica's filter.

Invariant: a column that can be handed out is clear in every row. A filter with fewer bits than
there are rows is repeated down its column, which is what a larger one with the same keys says.

Rows are words of one array, not Python ints, because what bounds a walk is fetching four rows a
block from memory: asked for together they come together. And a column is written in one operation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.bloom.counting import CountingFilter
from cache.bloom.positions import NUM_HASHES, check_num_bits
from cache.events import BlockKey

_Words = NDArray[np.unsignedinteger[Any]]

_KEYS_AT_ONCE = 128
"""A look-up that finds nobody left stops after these. A byte must be able to count them."""
_BITS_AT_ONCE = 1 << 13
"""Of a column that is written, so that nothing large is made on the way."""
_WORD_BYTES = 8


class Columns:
    """`num_rows` rows of one bit a column. Rows are as wide as the most columns that were taken at
    once: a byte up to 8 of them, two up to 16, four up to 32, then words of eight."""

    def __init__(self, num_rows: int) -> None:
        """Raises `ValueError` for what is no power of two."""
        check_num_bits(num_rows)
        self._num_columns = 0
        self._free: list[int] = []
        self._lay(np.zeros((num_rows, 1), np.uint8))

    @property
    def num_rows(self) -> int:
        return int(self._rows.shape[0])

    @property
    def num_taken(self) -> int:
        return self._num_columns - len(self._free)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def bytes_with(self, num_rows: int, is_more: bool) -> int:
        """That so many rows, and one more column if `is_more`, would take; 0 if there is room."""
        width = self._width
        if is_more and not self._free and self._num_columns == 8 * width:
            width = _wider(width)
        if width == self._width and num_rows <= self.num_rows:
            return 0
        return width * max(num_rows, self.num_rows)

    def take(self) -> int:
        """A clear column."""
        if self._free:
            return self._free.pop()
        column = self._num_columns
        self._num_columns += 1
        if self._num_columns > 8 * self._width:
            wider = np.zeros((self.num_rows, _wider(self._width)), np.uint8)
            wider[:, : self._width] = self._bytes
            self._lay(wider)
        return column

    def release(self, column: int) -> None:
        """O(rows)."""
        self._bytes[:, column >> 3] &= np.uint8(0xFF ^ 1 << (column & 7))
        self._free.append(column)

    def set(self, column: int, positions: Sequence[int], num_bits: int) -> None:
        """Sets bits of a filter of `num_bits`."""
        flat, width, bit = self._flat, self._width, 1 << (column & 7)
        for position in positions:
            for row in range(position, self.num_rows, num_bits):
                flat[row * width + (column >> 3)] |= bit

    def clear(self, column: int, positions: Sequence[int], num_bits: int) -> None:
        flat, width, others = self._flat, self._width, 0xFF ^ 1 << (column & 7)
        for position in positions:
            for row in range(position, self.num_rows, num_bits):
                flat[row * width + (column >> 3)] &= others

    def write(self, column: int, source: CountingFilter) -> None:
        """Makes the column say what the filter does, whatever it said before. O(rows)."""
        bit = np.uint8(1 << (column & 7))
        repeated = self._bytes[:, column >> 3].reshape(-1, source.num_bits)
        for start in range(0, source.num_bits, _BITS_AT_ONCE):
            end = min(start + _BITS_AT_ONCE, source.num_bits)
            part = repeated[:, start:end]
            part &= ~bit
            part |= source.bits(start, end) * bit

    def grow(self, num_rows: int) -> None:
        """To more rows: filters are repeated."""
        check_num_bits(num_rows)
        self._lay(np.tile(self._bytes, (num_rows // self.num_rows, 1)))

    def fold(self) -> None:
        """To half the rows, once no filter has more bits."""
        half = self.num_rows // 2
        self._lay(self._bytes[:half] | self._bytes[half:])

    def depths(self, keys: Sequence[BlockKey]) -> NDArray[np.float64]:
        """Of each column, and a 0 at the end: how many blocks of the chain, from its start on, it
        may hold. A block costs the same however many columns it loses: they are told apart by one
        sum over all of them."""
        words = self._rows.shape[1]
        depths = np.zeros(8 * self._width + 1)
        found = depths[:-1]
        alive = None
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            positions = np.frombuffer(b"".join(keys[start : start + _KEYS_AT_ONCE]), "<u4")
            rows = self._rows.take(positions & np.uint32(self.num_rows - 1), axis=0)
            rows = rows.reshape(-1, NUM_HASHES, words)
            held = rows[:, 0] & rows[:, 1]
            for number in range(2, NUM_HASHES):
                held &= rows[:, number]
            if alive is not None:
                held[0] &= alive
            np.bitwise_and.accumulate(held, axis=0, out=held)
            alive = held[-1]
            # From block to block columns only leave, so the first and the last row tell.
            if held[0].tobytes() == alive.tobytes():
                found += _bits_of(alive) * np.uint8(len(held))
            else:
                found += _bits_of(held).reshape(len(held), -1).sum(axis=0, dtype=np.uint8)
            if not alive.any():
                break
        return depths

    def check_integrity(self, filters: dict[int, CountingFilter]) -> None:
        """Given what is in the taken columns, by column, as far as it is to be checked. O(rows)."""
        assert 8 * self._width >= self._num_columns
        assert len(set(self._free)) == len(self._free)
        bits = np.unpackbits(self._bytes, axis=1, bitorder="little")
        assert not bits[:, [*self._free, *range(self._num_columns, bits.shape[1])]].any()
        for column, source in filters.items():
            repeated = bits[:, column].reshape(-1, source.num_bits)
            assert (repeated == source.bits(0, source.num_bits)).all()

    def _lay(self, rows: NDArray[np.uint8]) -> None:
        self._bytes = rows
        self._width = width = int(rows.shape[1])
        self._rows: _Words = rows.view(f"<u{min(width, _WORD_BYTES)}")
        # A number in a memoryview is several times as fast to change as one in an array.
        self._flat = rows.reshape(-1).data


def _wider(width: int) -> int:
    """Bytes of a row that has become too narrow: half as many words again, so that one copy pays
    for many columns to come."""
    if width < _WORD_BYTES:
        return 2 * width
    words = width // _WORD_BYTES
    return _WORD_BYTES * (words + (words + 1) // 2)


def _bits_of(words: _Words) -> NDArray[np.uint8]:
    """One byte a column, in order; `words` is contiguous."""
    return np.unpackbits(words.view(np.uint8).reshape(-1), bitorder="little")
