"""Keeps an index within its memory: the largest replicas become rough, and exact again.

Invariant: what the index takes, and what it would take for a moment to grow or to shrink, is within
`max_bytes`, whatever the replicas hold; a lower cap is reached over the changes that follow it.

Exact, a key takes some 150 bytes a replica; rough, 0.6 bytes a bit of its filter, of which there
are 10 to 32 a key. What is short of memory takes these steps, one at a time:

1. A filter of 20 bits a key or more is folded.
2. The largest exact view is demoted.
3. A filter is folded below 10 bits a key: it says yes too often rather than take more.

What has memory to spare has one view at a time loaded anew from a snapshot of its replica: exact if
that fits, else into a larger filter if the present one is full. Only four fifths of the memory are
spent so, lest views go back and forth.
"""

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache.bloom.counting import CountingFilter
from cache.bloom.positions import MIN_BITS, bits_for
from cluster.routing.view import KEY_BYTES, IndexView, Store, set_growth

DEFAULT_BYTES = 256 << 20

_CHANGES = 256
_CHANGES_A_VIEW = 4
"""Keys that come or go between two looks at the memory, and for each view, since a look costs time
for each."""
_STEPS = 8
"""At most, at a look: one that demotes takes milliseconds."""
_KEY_MOST_BYTES = 256
"""A key that is followed exactly takes so much at most, and its mask: 64 itself, 107 in a set that
has just grown, 75 in the masks that have."""
_PLACE_BYTES = 20
"""Of a place in a large dict."""
_BITS = 16
_LEAST_BITS = 10
"""Bits a key that a new filter has at least, if it can; that one is folded down to before exact
views are demoted, and below which one is full. 0.24 and 1.2 % false positives."""
_SPENT = 0.8


class CappedStore(Store):
    def __init__(self, views: Sequence[IndexView | None], max_bytes: int) -> None:
        """`views` is the index's own list, by slot."""
        super().__init__()
        self._views = views
        self._max_bytes = max_bytes
        self._num_changes = 0
        self._masks_bytes = 0
        self._column_of: NDArray[np.int64] | None = None

    @property
    def num_rough(self) -> int:
        return sum(view is not None and view.filter is not None for view in self._views)

    @property
    def num_bytes(self) -> int:
        """O(replicas). What keys, sets, masks, filters and columns take, rounded up."""
        stray_bytes = KEY_BYTES * min(self.num_stray, len(self.masks))
        shared = sys.getsizeof(self.masks) + self._mask_bytes * len(self.masks) + stray_bytes
        columns = self.columns.num_bytes if self.columns is not None else 0
        return shared + columns + sum(view.num_bytes for view in self._present())

    def write_column(self, column: int | None, source: CountingFilter) -> int:
        self._column_of = None
        return super().write_column(column, source)

    def release_column(self, column: int) -> None:
        self._column_of = None
        super().release_column(column)

    def column_of(self, size: int) -> NDArray[np.int64]:
        """`[size]`, by slot: the column of its view, the last of all (-1) if it has none."""
        if self._column_of is None or len(self._column_of) != size:
            self._column_of = np.full(size, -1)
            for view in self._present():
                if view.column is not None:
                    self._column_of[view.slot] = view.column
        return self._column_of

    def limit(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.balance()

    def note_change(self) -> None:
        self._num_changes += 1
        if self._num_changes >= self._interval:
            self._num_changes = 0
            self.balance()

    def note_loaded(self) -> None:
        self.balance()

    def balance(self) -> None:
        """Takes the steps that are due, or has a view loaded anew."""
        for _ in range(_STEPS):
            if self.num_bytes + self._reserve() <= self._max_bytes or not self._shrink():
                break
        self._improve()

    def num_bits_for_load(self, view: IndexView) -> int | None:
        if view.filter is None and view.column is None:
            return None
        own_bytes = view.filter.num_bytes if view.filter is not None else 0
        if self._fits_exactly(view.num_expected, own_bytes):
            return None
        least = view.filter.num_bits if view.filter is not None else MIN_BITS
        wanted = bits_for(view.num_expected, _BITS)
        free_bytes = self._max_bytes - self.num_bytes - self._reserve() + own_bytes
        return max(self._affordable(wanted, free_bytes, view), least)

    # ------------------------------------------------------------ too little

    def _shrink(self) -> bool:
        """One step; False when none is left."""
        exact = [view for view in self._present() if any(view.exact_keys())]
        rough = [view for view in self._present() if view.filter is not None]
        foldable = [view for view in rough if _num_bits(view) > MIN_BITS]
        spare = [view for view in foldable if _bits_per_key(view) >= 2 * _LEAST_BITS]
        if spare:
            self._fold(max(spare, key=_num_bits))
        elif exact:
            self._demote(max(exact, key=lambda view: view.exact_bytes))
        elif foldable:
            self._fold(max(foldable, key=_bits_per_key))
        else:
            return False
        return True

    def _demote(self, view: IndexView) -> None:
        num_keys = max(len(view), view.num_expected if view.is_loading else 0)
        free_bytes = self._max_bytes - self.num_bytes
        view.demote(self._affordable(bits_for(num_keys, _BITS), free_bytes, view))
        if sys.getsizeof(self.masks) > 2 * KEY_BYTES * len(self.masks):
            # A dict keeps its room when keys leave it.
            kept = dict(self.masks)
            self.masks.clear()
            self.masks.update(kept)

    def _fold(self, view: IndexView) -> None:
        view.fold()
        most = max(_num_bits(each) for each in self._present())
        while self.columns is not None and self.columns.num_rows >= 2 * max(most, MIN_BITS):
            self.columns.fold()

    def _affordable(self, num_bits: int, free_bytes: int, view: IndexView) -> int:
        """Halves the size of a new filter of the view's until it fits."""
        is_more = view.column is None
        while num_bits > MIN_BITS and self._filter_bytes(num_bits, is_more) > free_bytes:
            num_bits //= 2
        return num_bits

    def _filter_bytes(self, num_bits: int, is_more: bool) -> int:
        """Of a new one, and of the columns. If these grow they are copied, so both count."""
        columns = self.columns
        return num_bits // 2 + (columns.bytes_with(num_bits, is_more) if columns else num_bits)

    def _reserve(self) -> int:
        """That the next changes, or a step, may take on top: the masks and sets that grow, a
        demotion, a fold."""
        present, soon = self._present(), self._interval
        exact = [view for view in present if view.filter is None]
        filter_bytes = max((v.filter.num_bytes for v in present if v.filter is not None), default=0)
        column_bytes = self.columns.num_bytes if self.columns is not None else 0
        reserve = max(filter_bytes, column_bytes) // 2
        if exact:
            growth = self._masks_growth(soon) + set_growth(soon)
            growth += sum([view.growth_bytes(soon) for view in exact])
            demotion = self._filter_bytes(bits_for(max(map(len, exact)), _LEAST_BITS), is_more=True)
            reserve = max(reserve, growth, demotion) + soon * (KEY_BYTES + self._mask_bytes)
        return reserve

    def _masks_growth(self, soon: int) -> int:
        """That `masks` takes anew if `soon` more keys make it grow; 0 if they do not."""
        num_bytes = sys.getsizeof(self.masks)
        if num_bytes != self._masks_bytes:
            self._masks_bytes, self.num_dropped = num_bytes, 0
        # CPython lets two thirds of the places be used, keys that have left included.
        if 3 * (len(self.masks) + self.num_dropped + soon) < 2 * num_bytes // _PLACE_BYTES:
            return 0
        return _masks_bytes(len(self.masks) + soon)

    # ------------------------------------------------------------ to spare

    def _improve(self) -> None:
        rough = [view for view in self._present() if view.filter is not None]
        if not rough or any(view.wants_snapshot or view.is_loading for view in self._present()):
            return
        smallest = min(rough, key=len)
        fullest = min(rough, key=_bits_per_key)
        if self._fits_exactly(len(smallest), smallest.num_bytes):
            smallest.wants_snapshot = True
        elif _bits_per_key(fullest) < _LEAST_BITS:
            wanted = self._affordable(bits_for(len(fullest), _BITS), self._room(), fullest)
            fullest.wants_snapshot = wanted > _num_bits(fullest)

    def _room(self) -> int:
        """To spend, beside the reserve."""
        return int(_SPENT * self._max_bytes) - self.num_bytes - self._reserve()

    def _fits_exactly(self, num_keys: int, own_bytes: int) -> bool:
        """Whether a view that takes `own_bytes` now can be exact, with room to grow further."""
        growth = set_growth(num_keys) + _masks_bytes(len(self.masks) + num_keys)
        needed = num_keys * (_KEY_MOST_BYTES + self._mask_bytes) + growth
        return needed <= self._room() + own_bytes

    @property
    def _mask_bytes(self) -> int:
        """Of one mask, as CPython hands memory out."""
        return -(-sys.getsizeof(1 << len(self._views)) // 16) * 16

    @property
    def _interval(self) -> int:
        return _CHANGES + _CHANGES_A_VIEW * len(self._views)

    def _present(self) -> list[IndexView]:
        return [view for view in self._views if view is not None]

    def check_integrity(self) -> None:
        """O(keys held and rows)."""
        masks: dict[bytes, int] = {}
        written = {}
        for view in self._present():
            view.check_integrity()
            for key in view.exact_keys():
                masks[key] = masks.get(key, 0) | 1 << view.slot
            if view.column is not None and view.filter is not None and not view.is_loading:
                written[view.column] = view.filter
        assert masks == self.masks
        columns = [view.column for view in self._present() if view.column is not None]
        assert len(set(columns)) == len(columns)
        assert (self.columns.num_taken if self.columns is not None else 0) == len(columns)
        if self.columns is not None:
            self.columns.check_integrity(written)


def _num_bits(view: IndexView) -> int:
    return view.filter.num_bits if view.filter is not None else 0


def _bits_per_key(view: IndexView) -> float:
    return _num_bits(view) / max(1, len(view))


def _masks_bytes(num_keys: int) -> int:
    """Bytes of the table to which CPython moves a dict of so many keys when it is full: three times
    as large as the keys, up to the next power of two."""
    return _PLACE_BYTES << (3 * num_keys).bit_length()
