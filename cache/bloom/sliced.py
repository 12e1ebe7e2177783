"""Which of many replicas may hold a block, by the filters that they publish.

Invariant: what is looked up for a replica is its newest generation that was whole, as of the last
batch in order; a generation that is not whole yet is kept beside it and looked up by nobody.

Filters of one size lie side by side (`columns`), so a walk costs four ANDs a block and size, not
one a replica. A chain is walked from its start and never bisected: filters know no closure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.bloom.columns import Columns
from cache.bloom.flips import MAX_BITS, FlipBatch, SnapshotChunk, check_num_bits
from cache.events import BlockKey


@dataclass(slots=True)
class _Filter:
    """One generation of one replica, as far as it has come."""

    generation: int
    columns: Columns
    column: int
    sequence: int
    loaded_bits: int
    """All of them, unless a snapshot is on its way."""
    is_complete: bool

    @property
    def is_whole(self) -> bool:
        return self.is_complete and self.loaded_bits == self.columns.num_bits


@dataclass(slots=True)
class _Replica:
    slot: int
    active: _Filter | None = None
    next: _Filter | None = None

    @property
    def newest(self) -> _Filter | None:
        return self.next or self.active


@dataclass(slots=True)
class _Table:
    columns: Columns
    slots: dict[int, int] = field(default_factory=dict)
    """Active column to its replica's slot."""
    _order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def assign(self, column: int, slot: int) -> None:
        self.slots[column] = slot
        self._order = None

    def forget(self, column: int) -> None:
        self.slots.pop(column, None)
        self._order = None

    def scatter(self, by_column: NDArray[np.int64], by_slot: NDArray[np.float64]) -> None:
        if self._order is None:
            self._order = (np.array([*self.slots]), np.array([*self.slots.values()]))
        columns, slots = self._order
        by_slot[slots] = by_column.take(columns)


class BitSlicedIndex:
    """Feed each replica's batches to `apply`, in order, and the chunks of a snapshot to `load` when
    `apply` says that something is missing. Call `sweep` when idle, some thousand rows at a time."""

    def __init__(self, max_bits: int = MAX_BITS) -> None:
        """Replicas whose filter is larger than `max_bits` are refused with `ValueError`."""
        self._max_bits = max_bits
        self._tables: dict[int, _Table] = {}
        self._replicas: dict[str, _Replica] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def add_replica(self, replica_id: str) -> int:
        """Returns its slot, which it keeps until it is removed. Known ones are no error."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            slot = self._free_slots.pop() if self._free_slots else len(self._replicas)
            replica = self._replicas[replica_id] = _Replica(slot)
        return replica.slot

    def remove_replica(self, replica_id: str) -> None:
        """Its slot goes to the next that comes. Unknown ones are no error."""
        if replica_id in self._replicas:
            self.clear_replica(replica_id)
            self._free_slots.append(self._replicas.pop(replica_id).slot)

    def clear_replica(self, replica_id: str) -> None:
        """Forgets what the replica holds and its generations, as when it has a new incarnation.
        Raises `KeyError`, as all below do for replicas that were not added."""
        replica = self._replicas[replica_id]
        self._drop(replica.active)
        self._drop(replica.next)
        replica.active = replica.next = None

    def slot(self, replica_id: str) -> int:
        """The replica's place in `depths`."""
        return self._replicas[replica_id].slot

    def generation(self, replica_id: str) -> int | None:
        """The one that is looked up; None while there is none that is whole."""
        active = self._replicas[replica_id].active
        return active.generation if active else None

    def apply(self, replica_id: str, batch: FlipBatch) -> bool:
        """False: a batch before this one, or the whole generation, is missing. Nothing has changed
        then; ask for the batches again or for a snapshot of the batch's generation. Batches that
        have been applied, or are of a generation left behind, are no error. Raises `ValueError`
        for positions or sizes that cannot be."""
        replica = self._replicas[replica_id]
        self._check(batch.num_bits)
        for positions in (batch.set_positions, batch.cleared_positions):
            if positions and not 0 <= min(positions) <= max(positions) < batch.num_bits:
                raise ValueError(f"positions beyond a filter of {batch.num_bits} bits")
        newest = replica.newest
        if newest is None or batch.generation > newest.generation:
            if batch.sequence != 1:
                return False
            self._start(replica, batch, sequence=0, loaded_bits=batch.num_bits)
        filters = [
            one
            for one in (replica.active, replica.next)
            if one and one.generation == batch.generation
        ]
        # Both are of this generation while a snapshot is to replace what had a hole.
        accepted = [_apply(one, batch) for one in filters]
        self._promote(replica)
        return any(accepted) or not filters

    def load(self, replica_id: str, chunk: SnapshotChunk) -> bool:
        """False: a chunk, or a batch since the last one, is missing; ask for a new snapshot. What
        was looked up before is looked up until the last chunk is there. O(bits in the chunk)."""
        replica = self._replicas[replica_id]
        self._check(chunk.num_bits)
        if chunk.start < 0 or chunk.end > chunk.num_bits:
            raise ValueError(f"bits beyond a filter of {chunk.num_bits} bits")
        if replica.active is not None and chunk.generation < replica.active.generation:
            return True
        if chunk.start == 0:
            self._start(replica, chunk, sequence=chunk.sequence, loaded_bits=0)
        target = replica.next
        expected = (chunk.generation, chunk.num_bits, chunk.sequence, chunk.start)
        if target is None or expected != (
            target.generation,
            target.columns.num_bits,
            target.sequence,
            target.loaded_bits,
        ):
            return False
        target.columns.load(target.column, chunk.start, chunk.bits)
        target.loaded_bits = chunk.end
        target.is_complete |= chunk.is_complete
        self._promote(replica)
        return True

    def depths(self, keys: Sequence[BlockKey], size: int) -> NDArray[np.float64]:
        """`[size]`, by slot: how many blocks of the chain, from its start on, the replica may hold;
        whole numbers. `size` covers all slots. Never less than what the replica's filter, as of
        the last batch applied, would say of each block by itself."""
        depths = np.zeros(size)
        for table in self._tables.values():
            if table.slots:
                table.scatter(table.columns.depths(keys), depths)
        return depths

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """`depths` by name, without those that do not hold the first block."""
        depths = self.depths(keys, len(self._replicas) + len(self._free_slots))
        return {
            name: int(depths[one.slot]) for name, one in self._replicas.items() if depths[one.slot]
        }

    def column(self, replica_id: str) -> bytes | None:
        """Bits of the filter that is looked up, lowest first. O(bits), for tests and doubts."""
        active = self._replicas[replica_id].active
        return active.columns.column(active.column) if active else None

    def sweep(self, max_rows: int) -> bool:
        """Clears columns that are no longer used, in up to `max_rows` rows of each size. Returns
        whether there is more to do. If it is never called, columns are swept when they pile up."""
        left = [table.columns.sweep(max_rows) for table in self._tables.values()]
        return any(left)

    def memory_bytes(self) -> int:
        """At most; of the rows, beside which the rest is small."""
        return sum(table.columns.memory_bytes() for table in self._tables.values())

    def check_integrity(self) -> None:
        """O(rows)."""
        live: dict[int, int] = dict.fromkeys(self._tables, 0)
        slots: dict[int, dict[int, int]] = {num_bits: {} for num_bits in self._tables}
        for replica in self._replicas.values():
            for one in (replica.active, replica.next):
                if one is not None:
                    assert self._tables[one.columns.num_bits].columns is one.columns
                    assert one.is_whole == (one is replica.active)
                    live[one.columns.num_bits] += 1
            if replica.active is not None:
                slots[replica.active.columns.num_bits][replica.active.column] = replica.slot
        for num_bits, table in self._tables.items():
            assert table.columns.num_live == live[num_bits] > 0
            assert table.slots == slots[num_bits]
            table.columns.check_integrity()
        taken = [replica.slot for replica in self._replicas.values()]
        assert sorted(taken + self._free_slots) == list(range(len(taken) + len(self._free_slots)))

    def _check(self, num_bits: int) -> None:
        check_num_bits(num_bits)
        if num_bits > self._max_bits:
            raise ValueError(f"a filter of {num_bits} bits is larger than {self._max_bits}")

    def _start(
        self,
        replica: _Replica,
        message: FlipBatch | SnapshotChunk,
        *,
        sequence: int,
        loaded_bits: int,
    ) -> None:
        """Opens an empty filter in place of what was being filled."""
        self._drop(replica.next)
        table = self._tables.get(message.num_bits)
        if table is None:
            table = self._tables[message.num_bits] = _Table(Columns(message.num_bits))
        columns = table.columns
        replica.next = _Filter(
            message.generation, columns, columns.take(), sequence, loaded_bits, is_complete=False
        )

    def _promote(self, replica: _Replica) -> None:
        fresh = replica.next
        if fresh is None or not fresh.is_whole:
            return
        self._drop(replica.active)
        replica.active, replica.next = fresh, None
        fresh.columns.activate(fresh.column)
        self._tables[fresh.columns.num_bits].assign(fresh.column, replica.slot)

    def _drop(self, one: _Filter | None) -> None:
        if one is None:
            return
        table = self._tables[one.columns.num_bits]
        table.forget(one.column)
        one.columns.release(one.column)
        if not one.columns.num_live:
            # The rows go with the last column: nothing is left to sweep.
            del self._tables[one.columns.num_bits]


def _apply(one: _Filter, batch: FlipBatch) -> bool:
    if batch.sequence <= one.sequence:
        return True
    if batch.sequence != one.sequence + 1 or batch.num_bits != one.columns.num_bits:
        return False
    one.columns.set(one.column, batch.set_positions)
    one.columns.clear(one.column, batch.cleared_positions)
    one.sequence = batch.sequence
    one.is_complete |= batch.is_complete
    return True
