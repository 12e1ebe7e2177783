"""Filters of one size side by side: a row is a bit position, a column is one replica's filter.

Invariant: a column that can be handed out is clear in every row, and a look-up sees active columns
only; so one that is being filled, or has not been swept yet, says nothing.

Rows are words of one array, not Python ints, because what bounds a walk is fetching four rows a
block from memory: asked for together they come together. And a batch, a snapshot or a sweep is one
operation.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from cache.bloom.flips import NUM_HASHES, check_num_bits
from cache.events import BlockKey

_WORD = 64
_Words = NDArray[np.uint64]

_KEYS_AT_ONCE = 128
"""A look-up that finds nobody left stops after these. A byte must be able to count them."""

_DEAD_COLUMNS = 8
"""So many dead columns, beyond as many as are live, may wait to be swept."""


class Columns:
    """`num_bits` rows of 64 columns a word. Memory follows the widest that the table has been: at
    most half as much again as twice the columns that were live at once, and `_DEAD_COLUMNS`."""

    def __init__(self, num_bits: int) -> None:
        check_num_bits(num_bits)
        self.num_bits = num_bits
        self._rows: _Words = np.zeros((num_bits, 1), "<u8")
        self._width = 0
        self._live = 0
        self._active = 0
        self._dead = 0
        self._free: list[int] = []
        self._sweeping = 0
        """Dead columns that the sweep under way clears, in the rows below `_swept`."""
        self._swept = 0

    @property
    def num_live(self) -> int:
        return self._live.bit_count()

    def take(self) -> int:
        """A clear column, which look-ups do not see before `activate`."""
        if not self._free and self._dead.bit_count() > self.num_live + _DEAD_COLUMNS:
            while not self._free:
                self.sweep(self.num_bits)
        if self._free:
            column = self._free.pop()
        else:
            column = self._width
            self._width += 1
            self._widen()
        self._live |= 1 << column
        return column

    def activate(self, column: int) -> None:
        assert self._live >> column & 1
        self._active |= 1 << column

    def release(self, column: int) -> None:
        """O(1): the rows are cleared by `sweep`."""
        bit = 1 << column
        assert self._live & bit
        self._live ^= bit
        self._active &= ~bit
        self._dead |= bit

    def sweep(self, max_rows: int) -> bool:
        """Clears dead columns in up to `max_rows` rows, all columns in one pass. Returns whether
        any are left."""
        if not self._sweeping:
            self._sweeping, self._swept = self._dead, 0
        if self._sweeping:
            end = min(self._swept + max_rows, self.num_bits)
            self._rows[self._swept : end] &= ~self._words_of(self._sweeping)
            self._swept = end
            if end == self.num_bits:
                self._free += [one for one in range(self._width) if self._sweeping >> one & 1]
                self._dead ^= self._sweeping
                self._sweeping = 0
        return bool(self._dead)

    def set(self, column: int, positions: Sequence[int]) -> None:
        if positions:
            word, bit = divmod(column, _WORD)
            self._rows[np.array(positions), word] |= np.uint64(1 << bit)

    def clear(self, column: int, positions: Sequence[int]) -> None:
        if positions:
            word, bit = divmod(column, _WORD)
            self._rows[np.array(positions), word] &= ~np.uint64(1 << bit)

    def load(self, column: int, start: int, bits: bytes) -> None:
        """Sets what is set in `bits`, lowest bit first, from position `start` on."""
        word, bit = divmod(column, _WORD)
        found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(np.uint64)
        self._rows[start : start + len(found), word] |= found << np.uint64(bit)

    def column(self, column: int) -> bytes:
        """All bits of a column, lowest first. O(num_bits)."""
        word, bit = divmod(column, _WORD)
        bits = self._rows[:, word] >> np.uint64(bit) & np.uint64(1)
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def depths(self, keys: Sequence[BlockKey]) -> NDArray[np.int64]:
        """Of each column, `[width or more]`: how many blocks of the chain, from its start on, it
        may hold if it is active. A block costs the same however many columns it loses: they are
        told apart by one sum over all of them."""
        words = self._rows.shape[1]
        depths = np.zeros(words * _WORD, np.int64)
        alive = self._words_of(self._active)
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            if not alive.any():
                break
            positions = np.frombuffer(b"".join(keys[start : start + _KEYS_AT_ONCE]), "<u4")
            rows = self._rows.take(positions & np.uint32(self.num_bits - 1), axis=0)
            rows = rows.reshape(-1, NUM_HASHES, words)
            held = rows[:, 0] & rows[:, 1]
            for word in range(2, NUM_HASHES):
                held &= rows[:, word]
            held[0] &= alive
            np.bitwise_and.accumulate(held, axis=0, out=held)
            alive = held[-1]
            # From block to block columns only leave, so the first and the last row tell.
            if held[0].tobytes() == alive.tobytes():
                depths += _bits_of(alive) * np.uint8(len(held))
            else:
                depths += _bits_of(held).reshape(len(held), -1).sum(axis=0, dtype=np.uint8)
        return depths

    def memory_bytes(self) -> int:
        return self._rows.nbytes

    def check_integrity(self) -> None:
        """O(rows)."""
        everything = (1 << self._width) - 1
        free = reduce(or_, (1 << column for column in self._free), 0)
        assert self._rows.shape[0] == self.num_bits
        assert self._rows.shape[1] * _WORD >= self._width
        assert free.bit_count() == len(self._free)
        assert free ^ self._live ^ self._dead == free | self._live | self._dead == everything
        assert self._active & ~self._live == 0
        assert self._sweeping & ~self._dead == 0
        assert not (self._rows & self._words_of(free)).any()
        assert not (self._rows & ~self._words_of(everything)).any()
        assert not (self._rows[: self._swept] & self._words_of(self._sweeping)).any()

    def _widen(self) -> None:
        """Room for `_width` columns. Half as many words again, so that a copy of the rows pays for
        many replicas to come."""
        words = self._rows.shape[1]
        if self._width > words * _WORD:
            wider = np.zeros((self.num_bits, words + (words + 1) // 2), "<u8")
            wider[:, :words] = self._rows
            self._rows = wider

    def _words_of(self, mask: int) -> _Words:
        words = self._rows.shape[1]
        return np.frombuffer(mask.to_bytes(8 * words, "little"), "<u8")


def _bits_of(words: _Words) -> NDArray[np.uint8]:
    """One byte a column, in order; `words` is contiguous."""
    return np.unpackbits(words.view(np.uint8).reshape(-1), bitorder="little")
