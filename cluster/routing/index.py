"""Which replicas hold which blocks, within a given memory.

Invariant: of a replica that is followed exactly, what it holds is found and nothing else. One that
is rough (`cluster.routing.view`), because memory is short (`cluster.routing.memory`), may seem to
hold a block that it does not, now and then. A key that nobody holds has no entry.

The index is a set of facts from streams that may be ahead of or behind one another: a chain may
have holes, so it is walked from its start and never bisected.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import and_, not_, xor

import numpy as np
from numpy.typing import NDArray

from cache.events import BlockKey
from cluster.routing.memory import DEFAULT_BYTES, CappedStore
from cluster.routing.view import IndexView

_KEYS_AT_ONCE = 64
"""A walk looks so many blocks up before it asks whether anybody is left."""
_POWERS = [1 << bit for bit in range(48)]
_WEIGHTS = np.array(_POWERS, np.float64)


class PrefixIndex:
    """Block key to the replicas that hold it, in the slots that they occupy."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._slots: list[IndexView | None] = []
        self._slot_of: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._store = CappedStore(self._slots, max_bytes)

    def __len__(self) -> int:
        """Distinct keys held by at least one replica that is followed exactly."""
        return len(self._store.masks)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes. O(replicas)."""
        return self._store.num_bytes

    @property
    def num_rough(self) -> int:
        """Replicas that are known by a Bloom filter only."""
        return self._store.num_rough

    def limit(self, max_bytes: int) -> None:
        """From now on it takes no more than that. A lower one is reached over the next changes."""
        self._store.limit(max_bytes)

    def view(self, replica_id: str) -> IndexView:
        """The replica's key set, empty at the first call. Feed it the replica's events."""
        slot = self._slot_of.get(replica_id)
        if slot is None:
            slot = self._free_slots.pop() if self._free_slots else len(self._slots)
            if slot == len(self._slots):
                self._slots.append(None)
            self._slots[slot] = IndexView(replica_id, self._store, slot)
            self._slot_of[replica_id] = slot
        view = self._slots[slot]
        assert view is not None
        return view

    def remove(self, replica_id: str) -> None:
        """Drops all that the replica holds. Unknown ones are no error."""
        slot = self._slot_of.pop(replica_id, None)
        if slot is None:
            return
        view = self._slots[slot]
        assert view is not None
        view.detach()
        self._slots[slot] = None
        self._free_slots.append(slot)
        self._store.balance()

    def slot(self, replica_id: str) -> int:
        """The replica's place in `depths`, until it is removed. Raises `KeyError`."""
        return self._slot_of[replica_id]

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """How many blocks of the chain each replica holds from its start on. Replicas without the
        first block are left out; what a replica holds beyond a hole does not count."""
        depths = self.depths(keys, len(self._slots))
        return {name: int(depths[slot]) for name, slot in self._slot_of.items() if depths[slot]}

    def depths(self, keys: Sequence[BlockKey], size: int) -> NDArray[np.float64]:
        """`match` by slot: `[size]`, whole numbers, 0 for none. `size` covers all slots."""
        depths = self._exact_depths(keys, size)
        columns = self._store.columns
        if columns is not None:
            rough = columns.depths(keys).take(self._store.column_of(size))
            # While a rough replica is loaded to be exact, both know something of it.
            np.maximum(depths, rough, out=depths)
        return depths

    def _exact_depths(self, keys: Sequence[BlockKey], size: int) -> NDArray[np.float64]:
        alive = self._walk(keys)
        if not alive:
            return np.zeros(size)
        # As the masks lie within one another, a slot of depth d is in the first d of them. Of
        # their numbers, from 1 on, floor(d / 2^n) are multiples of 2^n, and whether that is odd is
        # bit n of d: so one XOR over every 2^n-th mask has that bit of all depths at once.
        planes = [
            reduce(xor, alive[step - 1 :: step]) for step in _POWERS[: len(alive).bit_length()]
        ]
        num_bytes = -(-size // 8)
        packed = b"".join([plane.to_bytes(num_bytes, "little") for plane in planes])
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        depths: NDArray[np.float64] = _WEIGHTS[: len(planes)] @ bits.reshape(len(planes), -1)
        return depths[:size]

    def _walk(self, keys: Sequence[BlockKey]) -> list[int]:
        """For each block, the replicas that hold it and all before it, up to the first block that
        leaves none. Of exact ones alone."""
        get = self._store.masks.get
        alive: list[int] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            masks = [get(key, 0) for key in keys[start : start + _KEYS_AT_ONCE]]
            if alive:
                masks[0] &= alive[-1]
            alive += accumulate(masks, and_)
            if not alive[-1]:
                return alive[: bisect_left(alive, True, key=not_)]
        return alive

    def check_integrity(self) -> None:
        """Recomputes masks and columns from the views. For tests and idle time: O(keys held)."""
        self._store.check_integrity()
        occupied = {view.replica_id: view.slot for view in self._slots if view is not None}
        assert occupied == self._slot_of
        assert sorted(self._free_slots) == [
            slot for slot, view in enumerate(self._slots) if view is None
        ]
