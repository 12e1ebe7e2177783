"""Which replicas hold which blocks, exactly.

Invariant: a replica's bit is set in a key's mask if and only if the key is in that replica's view,
in whatever tier. A key that nobody holds has no entry, so memory is bounded by what replicas hold.

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

from cache.events import BlockKey, KeySet, Tier

_Masks = dict[BlockKey, int]

_KEYS_AT_ONCE = 64
"""A walk looks so many blocks up before it asks whether anybody is left."""
_POWERS = [1 << bit for bit in range(48)]
_WEIGHTS = np.array(_POWERS, np.float64)


class IndexView(KeySet):
    """One replica's key set, with its digest, that keeps the shared masks in step with it."""

    def __init__(self, replica_id: str, masks: _Masks, bit: int) -> None:
        super().__init__()
        self.replica_id = replica_id
        self._masks = masks
        self._bit = bit

    def add(self, key: BlockKey, tier: Tier) -> bool:
        if not super().add(key, tier):
            return False
        self._masks[key] = self._masks.get(key, 0) | self._bit
        return True

    def remove(self, key: BlockKey, tier: Tier) -> bool:
        if not super().remove(key, tier):
            return False
        if key not in self:
            self._forget(key)
        return True

    def clear(self) -> None:
        for key, _ in self:
            self._forget(key)
        super().clear()

    def detach(self) -> None:
        """Leaves the index for good: what still arrives for this view changes nothing there."""
        self.clear()
        self._masks = {}

    def _forget(self, key: BlockKey) -> None:
        mask = self._masks.get(key, 0) & ~self._bit
        if mask:
            self._masks[key] = mask
        else:
            self._masks.pop(key, None)


class PrefixIndex:
    """Block key to a bitmask of the replicas that hold it, in the slots that they occupy."""

    def __init__(self) -> None:
        self._masks: _Masks = {}
        self._slots: list[IndexView | None] = []
        self._slot_of: dict[str, int] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        """Distinct keys held by at least one replica."""
        return len(self._masks)

    def view(self, replica_id: str) -> IndexView:
        """The replica's key set, empty at the first call. Feed it the replica's events."""
        slot = self._slot_of.get(replica_id)
        if slot is None:
            slot = self._free_slots.pop() if self._free_slots else len(self._slots)
            if slot == len(self._slots):
                self._slots.append(None)
            self._slots[slot] = IndexView(replica_id, self._masks, 1 << slot)
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
        leaves none."""
        get = self._masks.get
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
        """Recomputes all masks from the views. For tests and idle time: O(keys held)."""
        masks: _Masks = {}
        for slot, view in enumerate(self._slots):
            for key, _ in view or ():
                masks[key] = masks.get(key, 0) | 1 << slot
        assert masks == self._masks
        occupied = {
            view.replica_id: slot for slot, view in enumerate(self._slots) if view is not None
        }
        assert occupied == self._slot_of
        assert sorted(self._free_slots) == [
            slot for slot, view in enumerate(self._slots) if view is None
        ]
