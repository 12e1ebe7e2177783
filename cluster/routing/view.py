"""What one replica holds, as its stream of cache events tells: exactly, or by a Bloom filter.

Invariant: for a view that is in step with its stream, a key that the replica holds is never denied.
One that is exact has its bit in the masks of exactly the keys that it holds. One that is rough has
none, but a column that says what its filter does; and its digest is still that of the set, so a
hole in the events shows.

While a snapshot is loaded, what was known before is still looked up, beside what has come.
"""

import sys
from collections.abc import Iterator
from itertools import chain

from cache.bloom.columns import Columns
from cache.bloom.counting import CountingFilter
from cache.events import BlockKey, KeySet, Tier, digest_with, digest_without

KEY_BYTES = 64
"""Of a key, as each replica's events bring one of their own."""
PLACE_BYTES = 16
"""Of a place in a set."""
_NO_KEYS_BYTES = sys.getsizeof(set())
_VIEW_BYTES = 1024
"""Of a view without any key."""


class Store:
    """Where the views of an index write what is looked up."""

    def __init__(self) -> None:
        self.masks: dict[BlockKey, int] = {}
        """Of each key, the bits of the exact views that hold it; no key without any."""
        self.columns: Columns | None = None
        """Of the rough views, if there are any."""
        self.num_stray = 0
        """At most so many keys of `masks` are no longer in the view that brought them."""
        self.num_dropped = 0
        """Keys that have left `masks`, since somebody asked."""

    def note_change(self) -> None:
        """A view has a key more or less."""

    def note_loaded(self) -> None:
        """A view has been loaded anew."""

    def num_bits_for_load(self, view: "IndexView") -> int | None:
        """Size of the filter to load a snapshot into; None for an exact view."""
        return None

    def write_column(self, column: int | None, source: CountingFilter) -> int:
        """Writes into the column, or into a new one; returns which."""
        if self.columns is None:
            self.columns = Columns(source.num_bits)
        elif self.columns.num_rows < source.num_bits:
            self.columns.grow(source.num_bits)
        if column is None:
            column = self.columns.take()
        self.columns.write(column, source)
        return column

    def release_column(self, column: int) -> None:
        assert self.columns is not None
        self.columns.release(column)
        if not self.columns.num_taken:
            self.columns = None


class IndexView(KeySet):
    """One replica's key set. A rough one cannot be iterated, and takes the events' word for it that
    a key was not there before."""

    def __init__(self, replica_id: str, store: Store, slot: int) -> None:
        super().__init__()
        self.replica_id = replica_id
        self.slot = slot
        self.filter: CountingFilter | None = None
        """Of a rough view."""
        self.column: int | None = None
        """What it is looked up by, if it is rough or was before the load under way."""
        self.is_loading = False
        self.num_expected = 0
        """Keys before the load under way: about as many will come."""
        self._num_counted = 0
        self._set_bytes = 0
        self._num_left = 0
        """Keys that have left since the largest set had another size than `_set_bytes`."""
        self._former: dict[Tier, set[BlockKey]] = {}
        """Exact keys from before the load under way."""
        self._store = store
        self._bit = 1 << slot

    # ------------------------------------------------------------ events

    def add(self, key: BlockKey, tier: Tier) -> bool:
        if self.filter is not None:
            fresh = self.filter.add(key)
            if fresh and not self.is_loading:
                columns, column = self._looked_up()
                columns.set(column, fresh, self.filter.num_bits)
            self.digest = digest_with(self.digest, key, tier)
            self._num_counted += 1
        elif super().add(key, tier):
            masks = self._store.masks
            masks[key] = masks.get(key, 0) | self._bit
        else:
            return False
        self._store.note_change()
        return True

    def remove(self, key: BlockKey, tier: Tier) -> bool:
        if self.filter is not None:
            if key not in self.filter:
                return False
            cleared = self.filter.remove(key)
            if cleared and not self.is_loading:
                columns, column = self._looked_up()
                columns.clear(column, cleared, self.filter.num_bits)
            self.digest = digest_without(self.digest, key, tier)
            self._num_counted -= 1
        elif super().remove(key, tier):
            self._num_left += 1
            if not super().__contains__(key):
                self._forget(key)
        else:
            return False
        self._store.note_change()
        return True

    def __contains__(self, key: BlockKey) -> bool:
        return super().__contains__(key) if self.filter is None else key in self.filter

    def __len__(self) -> int:
        return super().__len__() if self.filter is None else self._num_counted

    # ------------------------------------------------------------ snapshots

    def begin_load(self) -> None:
        if self.is_loading:
            self._drop_loaded()
        else:
            self.num_expected = len(self)
            if self.filter is None:
                self._former, self._tiers = self._tiers, _no_keys()
        num_bits = self._store.num_bits_for_load(self)
        self.filter = None  # Before there is another.
        if num_bits is not None:
            self.filter = CountingFilter(num_bits)
        self.is_loading = True
        self._num_counted = self.digest = 0

    def end_load(self) -> None:
        for keys in self._former.values():
            for key in keys:
                if not super().__contains__(key):
                    self._forget(key)
        self._former = {}
        self.is_loading = self.wants_snapshot = False
        if self.filter is not None:
            self.column = self._store.write_column(self.column, self.filter)
        elif self.column is not None:
            self._store.release_column(self.column)
            self.column = None
        self._store.note_loaded()

    def _drop_loaded(self) -> None:
        """What a snapshot has brought that broke off."""
        for key in set[BlockKey]().union(*self._tiers.values()).difference(*self._former.values()):
            self._forget(key)
        self._tiers = _no_keys()

    # ------------------------------------------------------------ memory

    def demote(self, num_bits: int) -> None:
        """From here on it is rough."""
        assert self.filter is None
        fresh, count = CountingFilter(num_bits), len(self)
        for key, _ in self:
            fresh.add(key)
        for key in self.exact_keys():
            self._forget(key)
        self._tiers, self._former = _no_keys(), {}
        self.filter, self._num_counted = fresh, count
        if not self.is_loading:
            self.column = self._store.write_column(self.column, fresh)

    def fold(self) -> None:
        """Halves its filter."""
        assert self.filter is not None
        self.filter.fold()
        if not self.is_loading:
            self._store.write_column(self.column, self.filter)

    def clear(self) -> None:
        """Holds nothing, exactly."""
        for key in self.exact_keys():
            self._forget(key)
        if self.column is not None:
            self._store.release_column(self.column)
        self._tiers, self._former = _no_keys(), {}
        self.filter = self.column = None
        self.is_loading = self.wants_snapshot = False
        self._num_counted = self.digest = 0

    def detach(self) -> None:
        """Leaves the index for good: what still arrives for this view changes nothing there."""
        self.clear()
        self._store = Store()

    @property
    def exact_bytes(self) -> int:
        """Of its sets and the keys in them."""
        sets = [*self._tiers.values(), *self._former.values()]
        return sum(map(sys.getsizeof, sets)) + KEY_BYTES * sum(map(len, sets))

    def growth_bytes(self, soon: int) -> int:
        """That the largest of its sets takes anew, beside what it has, if `soon` more keys make it
        grow; 0 if they do not."""
        keys = max(self._tiers.values(), key=len)
        num_bytes = sys.getsizeof(keys)
        if num_bytes != self._set_bytes:
            self._set_bytes, self._num_left = num_bytes, 0
        # CPython lets three fifths of the places be used, keys that have left included.
        if (
            5 * (len(keys) + self._num_left + soon)
            < 3 * (num_bytes - _NO_KEYS_BYTES) // PLACE_BYTES
        ):
            return 0
        return set_growth(len(keys))

    @property
    def num_bytes(self) -> int:
        return (
            _VIEW_BYTES
            + self.exact_bytes
            + (self.filter.num_bytes if self.filter is not None else 0)
        )

    def exact_keys(self) -> Iterator[BlockKey]:
        """Those whose masks have its bit; some twice."""
        return chain(*self._tiers.values(), *self._former.values())

    def check_integrity(self) -> None:
        if self.filter is not None:
            assert not any(self._tiers.values())
            assert self.is_loading or self.column is not None
            self.filter.check_integrity(self._num_counted)
        else:
            assert self.is_loading or self.column is None
        assert self.is_loading or not self._former

    def _looked_up(self) -> tuple[Columns, int]:
        assert self._store.columns is not None
        assert self.column is not None
        return self._store.columns, self.column

    def _forget(self, key: BlockKey) -> None:
        masks = self._store.masks
        mask = masks.get(key, 0) & ~self._bit
        if mask:
            masks[key] = mask
            self._store.num_stray += 1
        else:
            masks.pop(key, None)
            self._store.num_dropped += 1


def set_growth(num_keys: int) -> int:
    """Bytes of the table to which CPython moves a set of so many keys when it is full: four times
    as large as the keys, twice for many, up to the next power of two."""
    factor = 4 if num_keys <= 50_000 else 2
    return PLACE_BYTES << (factor * num_keys).bit_length()


def _no_keys() -> dict[Tier, set[BlockKey]]:
    return {tier: set() for tier in Tier}
