"""The counting Bloom filter that a replica keeps of its own keys, and publishes by difference.

Invariant: a key that is held is contained in the active generation, whatever else was added or
removed; so is it in the new generation once that is complete.

Source: L. Fan, P. Cao, J. Almeida, A. Z. Broder, "Summary Cache" (IEEE/ACM ToN 8(3), 2000).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from cache.bloom.flips import (
    MIN_BITS_PER_KEY,
    NUM_HASHES,
    FlipBatch,
    SnapshotChunk,
    bits_for,
    check_num_bits,
    positions_of,
)
from cache.events import BlockKey

Flip = tuple[int, bool]
"""A bit's position, and whether it is set from now on."""

_SATURATED = 255
"""A counter that has come here stays, because nobody knows how many there are: the bit may say yes
too often until the next resize, but never no. At 8 bits a key or more only one key added hundreds
of times can bring it about."""

_SHRINK_FACTOR = 8


class _Generation:
    """Counters of one size, and which of their bits the world has not been told of."""

    def __init__(self, number: int, num_bits: int, is_complete: bool) -> None:
        check_num_bits(num_bits)
        self.number = number
        self.num_bits = num_bits
        self.is_complete = is_complete
        self.sequence = 0
        self.counters = bytearray(num_bits)
        # Bits that differ from what is published. A bit that flips back is nothing to tell, so
        # this never has more than `num_bits` entries. In order, so that none waits for ever.
        self.unpublished: OrderedDict[int, None] = OrderedDict()

    def add(self, key: BlockKey) -> list[Flip]:
        flips = []
        counters = self.counters
        for position in positions_of(key, self.num_bits):
            count = counters[position]
            if count < _SATURATED:
                counters[position] = count + 1
            if not count:
                self._note(position)
                flips.append((position, True))
        return flips

    def remove(self, key: BlockKey) -> list[Flip]:
        flips = []
        counters = self.counters
        for position in positions_of(key, self.num_bits):
            count = counters[position]
            if not 0 < count < _SATURATED:
                continue
            counters[position] = count - 1
            if count == 1:
                self._note(position)
                flips.append((position, False))
        return flips

    def __contains__(self, key: BlockKey) -> bool:
        a, b, c, d = positions_of(key, self.num_bits)
        counters = self.counters
        return bool(counters[a] and counters[b] and counters[c] and counters[d])

    def drain(self, max_flips: int) -> FlipBatch:
        self.sequence += 1
        set_positions: list[int] = []
        cleared_positions: list[int] = []
        for _ in range(min(max_flips, len(self.unpublished))):
            position, _ = self.unpublished.popitem(last=False)
            (set_positions if self.counters[position] else cleared_positions).append(position)
        return FlipBatch(
            self.number,
            self.num_bits,
            self.sequence,
            tuple(set_positions),
            tuple(cleared_positions),
            self.is_complete,
        )

    def bits(self, start: int, end: int) -> bytes:
        counters = np.frombuffer(self.counters, np.uint8)[start:end]
        return np.packbits(counters != 0, bitorder="little").tobytes()

    def check_integrity(self, num_keys: int) -> None:
        assert len(self.counters) == self.num_bits
        assert all(0 <= position < self.num_bits for position in self.unpublished)
        counters = np.frombuffer(self.counters, np.uint8)
        if not (counters == _SATURATED).any():
            assert int(counters.sum(dtype=np.int64)) == NUM_HASHES * num_keys

    def _note(self, position: int) -> None:
        if position in self.unpublished:
            del self.unpublished[position]
        else:
            self.unpublished[position] = None


class CountingBloom:
    """Counts a multiset of keys: a key held in two tiers is added twice and removed twice.

    A resize starts a new generation beside the old one. `copy` brings the keys over, a few at a
    time; both are published, and look-ups go to the old one until all of the new is published.
    Memory: one byte a bit, twice during a resize, and four bytes or more for each unpublished bit.
    """

    def __init__(self, num_bits: int) -> None:
        """`num_bits` is a power of two (`flips.bits_for`). Raises `ValueError`."""
        self.num_keys = 0
        self._active = _Generation(1, num_bits, is_complete=True)
        self._next: _Generation | None = None
        self._uncopied: Counter[BlockKey] = Counter()
        self._num_uncopied = 0
        self._last_generation = 1

    @property
    def generation(self) -> int:
        return self._active.number

    @property
    def next_generation(self) -> int | None:
        """The one that a resize under way is filling."""
        return self._next.number if self._next else None

    @property
    def num_bits(self) -> int:
        return self._active.num_bits

    @property
    def num_unpublished(self) -> int:
        """Flips waiting for `drain_flips`, of all generations."""
        return len(self._active.unpublished) + (len(self._next.unpublished) if self._next else 0)

    @property
    def wanted_bits(self) -> int | None:
        """A better size to resize to; None while this one, or the next, will do. Shrinks only when
        an eighth would be enough, so that it does not go back and forth."""
        num_bits = (self._next or self._active).num_bits
        wanted = bits_for(self.num_keys)
        too_small = self.num_keys * MIN_BITS_PER_KEY > num_bits and wanted > num_bits
        return wanted if too_small or wanted * _SHRINK_FACTOR <= num_bits else None

    def add(self, key: BlockKey) -> list[Flip]:
        """O(1). Returns the flips of the active generation; the next one's are only published."""
        flips = self._active.add(key)
        if self._next is not None:
            self._next.add(key)
        self.num_keys += 1
        return flips

    def remove(self, key: BlockKey) -> list[Flip]:
        """Undoes one `add` of the key; `add`'s costs and results. Raises `KeyError`, and changes
        nothing, where it can tell that there was none; otherwise that is the caller's to know."""
        if key not in self._active:
            raise KeyError(key.hex())
        flips = self._active.remove(key)
        # What was never copied must not be taken out of counters that others share.
        if self._next is not None and not self._take_uncopied(key):
            self._next.remove(key)
        self.num_keys -= 1
        return flips

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._active

    def start_resize(self, num_bits: int, keys: Iterable[BlockKey]) -> int:
        """Starts a generation for `keys`, which are all that are held, each as often as it is.
        Returns its number. A resize under way is given up for it. O(keys), for one copy of their
        references; raises `ValueError` for a bad size or another number of keys."""
        uncopied = Counter(keys)
        num_uncopied = uncopied.total()
        if num_uncopied != self.num_keys:
            raise ValueError(f"{num_uncopied} keys to copy, {self.num_keys} are held")
        fresh = _Generation(self._last_generation + 1, num_bits, is_complete=False)
        self._last_generation = fresh.number
        self._next, self._uncopied, self._num_uncopied = fresh, uncopied, num_uncopied
        return fresh.number

    def copy(self, max_keys: int) -> int:
        """Brings up to `max_keys` keys into the next generation. Returns how many are left."""
        if self._next is not None:
            for _ in range(min(max_keys, self._num_uncopied)):
                key, count = self._uncopied.popitem()
                if count > 1:
                    self._uncopied[key] = count - 1
                self._num_uncopied -= 1
                self._next.add(key)
        return self._num_uncopied

    def drain_flips(self, max_flips: int) -> list[FlipBatch]:
        """At most one batch a generation, of `max_flips` (2 or more) flips together; empty when
        there is nothing to tell. A follower denies no key that has been held since a drain that
        left nothing, whatever part of the flips it has. With the batch that makes a new generation
        complete the old one is dropped."""
        if max_flips < 2:
            raise ValueError("flips are drained two at a time or more")
        fresh = self._next
        if fresh is None:
            return [self._active.drain(max_flips)] if self._active.unpublished else []
        # A busy active generation must not keep the next one from ever being complete.
        share = max(max_flips // 2, max_flips - len(self._active.unpublished))
        fresh.is_complete = not self._uncopied and len(fresh.unpublished) <= share
        batches = []
        if fresh.is_complete:
            self._active, self._next = fresh, None
        elif self._active.unpublished:
            reserved = min(share, len(fresh.unpublished))
            batches.append(self._active.drain(max_flips - reserved))
        if fresh.unpublished or fresh.is_complete:
            batches.append(fresh.drain(share))
        return batches

    def snapshot(self, generation: int, start: int, max_bytes: int) -> SnapshotChunk:
        """Bits of a generation from `start` (a multiple of 8) on, for who has lost batches. Ask for
        the next chunk from `end`, in the same stream as the batches. O(max_bytes). Raises
        `KeyError` when the generation has ended."""
        chosen = next(
            (one for one in (self._active, self._next) if one and one.number == generation), None
        )
        if chosen is None:
            raise KeyError(generation)
        if start % 8 or not 0 <= start < chosen.num_bits or max_bytes < 1:
            raise ValueError(f"no chunk of {max_bytes} bytes starts at bit {start}")
        end = min(start + 8 * max_bytes, chosen.num_bits)
        return SnapshotChunk(
            generation,
            chosen.num_bits,
            chosen.sequence,
            start,
            chosen.bits(start, end),
            chosen.is_complete,
        )

    def check_integrity(self, keys: Iterable[BlockKey] | None = None) -> None:
        """O(bits). Given the keys that are held, also that none of them is denied."""
        self._active.check_integrity(self.num_keys)
        assert self._active.is_complete
        if self._next is None:
            assert not self._uncopied
        else:
            assert not self._next.is_complete
            assert self._next.number == self._last_generation
            assert all(count > 0 for count in self._uncopied.values())
            self._next.check_integrity(self.num_keys - self._num_uncopied)
        assert self._uncopied.total() == self._num_uncopied
        for key in keys or ():
            assert key in self._active
            assert self._next is None or key in self._next or key in self._uncopied

    def _take_uncopied(self, key: BlockKey) -> bool:
        count = self._uncopied.get(key, 0)
        if not count:
            return False
        if count > 1:
            self._uncopied[key] = count - 1
        else:
            del self._uncopied[key]
        self._num_uncopied -= 1
        return True
