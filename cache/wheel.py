"""The time wheel: which evictable block goes first.

Invariants:
- A block is in one list or in none: that of its retention class and of the slot of its time.
- A bit of a class's mask is set exactly where that slot's list is not empty, so the oldest slot is
  found by find-first-set, whatever the number of blocks.
- Order: `LOW` before `NORMAL` before `PINNED`. The first two go by last use, set back for a block
  that has seldom been found again (`_time_of`), oldest slot first; a pin goes by when it runs out,
  soonest first, and when it has, the block is `NORMAL` again.

Time is a tick that the caller hands in and that never goes back (the engine gives its step number).
A slot is `slot_width` ticks wide. What is older than the `num_slots` slots lies in one more list
that is always the oldest: a slot that the wheel turns away from is spliced to its end, which keeps
the order. A pin runs out at the end of the slot that its last tick falls in; one further off than
the wheel reaches waits in its last slot for another round. After the hashed wheel of Varghese and
Lauck (SOSP 1987).

Lists are doubly linked through two flat tables, whose upper part are the lists' own heads. So
insert, remove and evict touch a constant number of entries, leave no garbage, and allocate nothing.
A turn costs O(1) for each slot with blocks in it that it passes, and for each pin that runs out.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum

_MOST_REUSES = 3
"""Reuses counted of a block: more are no better evidence."""
_SET_BACK = 0.4
"""Share of a block's usual stay by which one that was never found again goes earlier. Both figures
were chosen on real traces: docs/cache.md."""


class Retention(IntEnum):
    """How much a request's prefix is worth keeping, weakest first."""

    LOW = 0
    """Gone before anything else: one-off work."""
    NORMAL = 1
    PINNED = 2
    """Kept for a time, unless there is nothing else left to evict."""


class EvictionWheel:
    """Lists of evictable blocks by (class, time), and what is known of every block's use."""

    def __init__(self, num_blocks: int, num_slots: int, slot_width: int) -> None:
        if num_slots < 1 or slot_width < 1:
            raise ValueError(f"a wheel of {num_slots} slots of {slot_width} ticks")
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.slot_width = slot_width
        self.now = 0
        self._turn = 0
        """Number of the slot of `now`, counted from the beginning of time."""
        # Of each class `num_slots` heads and one more, for what is older than the wheel.
        self._stride = num_slots + 1
        num_nodes = num_blocks + len(Retention) * self._stride
        heads = range(num_blocks, num_nodes)
        self._next = [-1] * num_blocks + list(heads)
        self._previous = [-1] * num_blocks + list(heads)
        self._masks = [0] * len(Retention)
        self._used = [0] * num_blocks
        self._retention = [0] * num_blocks
        self._reuses = [0] * num_blocks
        self._pinned_until: dict[int, int] = {}
        self._time = [0] * num_blocks
        """Of blocks in the wheel: the tick that they are sorted by."""
        self._stay = 0
        """Ticks from last use to eviction, of the last block to go by time."""

    def __contains__(self, block_id: int) -> bool:
        return self._previous[block_id] >= 0

    # ------------------------------------------------------------ what is known of a block

    def touch(self, block_id: int, retention: Retention, ttl: int) -> None:
        """Notes a use now. A class is only ever raised; a pin lasts `ttl` ticks from now."""
        assert self._previous[block_id] < 0, "in the wheel: remove it first"
        self._used[block_id] = self.now
        if retention > self._retention[block_id]:
            self._retention[block_id] = retention
        if retention == Retention.PINNED:
            self._pin(block_id, self.now + ttl)

    def credit(self, block_id: int) -> None:
        """Notes that a block was found again by another request."""
        self._reuses[block_id] = min(self._reuses[block_id] + 1, _MOST_REUSES)

    def outlives(self, parent_id: int, block_id: int) -> bool:
        """Whether a parent has been used beyond what it inherits from `block_id`."""
        return (
            self._used[parent_id] > self._used[block_id]
            or self._reuses[parent_id] > 0
            or self._retention[parent_id] > self._retention[block_id]
        )

    def inherit(self, parent_id: int, block_id: int) -> None:
        """What used `block_id`, which is out of the wheel, used its parent."""
        used, retention, reuses = self._used, self._retention, self._reuses
        if used[parent_id] < used[block_id]:
            used[parent_id] = used[block_id]
        if retention[parent_id] < retention[block_id]:
            retention[parent_id] = retention[block_id]
        reuses[parent_id] = min(reuses[parent_id] + reuses[block_id], _MOST_REUSES)
        if retention[block_id] == Retention.PINNED:
            self._pin(parent_id, self._pinned_until[block_id])

    def forget(self, block_ids: Iterable[int]) -> None:
        """Nothing is known any more of blocks that will have other content."""
        retention, reuses, pinned_until = self._retention, self._reuses, self._pinned_until
        for block_id in block_ids:
            retention[block_id] = reuses[block_id] = 0
            if pinned_until:
                pinned_until.pop(block_id, None)

    # ------------------------------------------------------------ lists

    def insert(self, block_id: int, *, first: bool = False) -> None:
        """Makes a block evictable: the last of its slot, or the first."""
        head = self._head(block_id)
        following, previous = self._next, self._previous
        if following[head] == head:
            self._flip(head)
        if first:
            before, after = head, following[head]
        else:
            before, after = previous[head], head
        following[before] = previous[after] = block_id
        previous[block_id] = before
        following[block_id] = after

    def remove(self, block_id: int) -> None:
        """Takes a block out that is in the wheel."""
        following, previous = self._next, self._previous
        before, after = previous[block_id], following[block_id]
        following[before] = after
        previous[after] = before
        previous[block_id] = -1
        if before == after:
            self._flip(before)

    def evict(self) -> int:
        """Takes out the block to give up first. Raises `IndexError` when the wheel is empty."""
        head = self._first_head()
        block_id = self._next[head]
        self.remove(block_id)
        if self._retention[block_id] != Retention.PINNED:
            self._stay = self.now - self._used[block_id]
        return block_id

    def advance(self, now: int) -> None:
        """Turns the wheel to `now`. Raises `ValueError` if that is in the past."""
        if now < self.now:
            raise ValueError(f"tick {now} comes after tick {self.now}")
        before, self.now = self._turn, now
        turn = now // self.slot_width
        if turn == before:
            return
        self._turn = turn
        count = min(turn - before, self.num_slots)
        for retention in (Retention.LOW, Retention.NORMAL):
            for slot in self._occupied(retention, before + 1, count):
                self._age(retention, slot)
        heads = [
            self._head_of(Retention.PINNED, slot)
            for slot in self._occupied(Retention.PINNED, before, count)
        ]
        # Sorted in anew: as `NORMAL`, or for another round.
        block_ids = [block_id for head in heads for block_id in self._walk(head)]
        for block_id in block_ids:
            self.remove(block_id)
        for block_id in block_ids:
            self.insert(block_id)

    # ------------------------------------------------------------ inside

    def _head(self, block_id: int) -> int:
        """Of the list where a block belongs now."""
        retention = self._retention[block_id]
        if retention == Retention.PINNED:
            until = self._time[block_id] = self._pinned_until[block_id]
            turn = until // self.slot_width
            if turn >= self._turn:
                turn = min(turn, self._turn + self.num_slots - 1)
                return self._head_of(retention, turn % self.num_slots)
            del self._pinned_until[block_id]
            self._retention[block_id] = retention = Retention.NORMAL
        time = self._time[block_id] = self._time_of(block_id)
        turn = time // self.slot_width
        aged = turn <= self._turn - self.num_slots
        return self._head_of(retention, self.num_slots if aged else turn % self.num_slots)

    def _time_of(self, block_id: int) -> int:
        """Last use, less up to `_SET_BACK` of the usual stay for what was seldom found again."""
        missing = _MOST_REUSES - self._reuses[block_id]
        return self._used[block_id] - int(self._stay * _SET_BACK * missing / _MOST_REUSES)

    def _pin(self, block_id: int, until: int) -> None:
        self._pinned_until[block_id] = max(self._pinned_until.get(block_id, 0), until)

    def _head_of(self, retention: int, slot: int) -> int:
        return self.num_blocks + retention * self._stride + slot

    def _flip(self, head: int) -> None:
        """A list is no longer empty, or is again."""
        retention, slot = divmod(head - self.num_blocks, self._stride)
        if slot < self.num_slots:
            self._masks[retention] ^= 1 << slot

    def _first_head(self) -> int:
        for retention in (Retention.LOW, Retention.NORMAL):
            head = self._head_of(retention, self.num_slots)
            if self._next[head] != head:
                return head
            if mask := self._masks[retention]:
                return self._head_of(retention, self._first_slot(mask, self._turn + 1))
        if mask := self._masks[Retention.PINNED]:
            return self._head_of(Retention.PINNED, self._first_slot(mask, self._turn))
        raise IndexError("no block is evictable")

    def _first_slot(self, mask: int, turn: int) -> int:
        """Find-first-set, beginning at the slot of `turn` and around."""
        start = turn % self.num_slots
        if upper := mask >> start:
            return start + (upper & -upper).bit_length() - 1
        return (mask & -mask).bit_length() - 1

    def _occupied(self, retention: Retention, turn: int, count: int) -> Iterator[int]:
        """Slots with blocks in them among the `count` from that of `turn` on, in order."""
        start = turn % self.num_slots
        mask = self._masks[retention]
        rotated = (mask >> start | mask << (self.num_slots - start)) & ((1 << count) - 1)
        while rotated:
            bit = rotated & -rotated
            rotated ^= bit
            yield (start + bit.bit_length() - 1) % self.num_slots

    def _age(self, retention: Retention, slot: int) -> None:
        """Splices a slot to the end of what is older than the wheel."""
        following, previous = self._next, self._previous
        head = self._head_of(retention, slot)
        aged = self._head_of(retention, self.num_slots)
        first, last, end = following[head], previous[head], previous[aged]
        following[end], previous[first] = first, end
        following[last], previous[aged] = aged, last
        following[head] = previous[head] = head
        self._flip(head)

    def _walk(self, head: int) -> Iterator[int]:
        node = self._next[head]
        while node != head:
            yield node
            node = self._next[node]

    def __iter__(self) -> Iterator[int]:
        """Blocks in the order of eviction, should no time pass."""
        for retention in Retention:
            first = self._turn + (retention != Retention.PINNED)
            for slot in (self.num_slots, *self._occupied(retention, first, self.num_slots)):
                yield from self._walk(self._head_of(retention, slot))

    def check_integrity(self) -> None:
        """Raises `AssertionError` if lists, masks and the blocks' own times do not agree."""
        found: set[int] = set()
        for retention in Retention:
            first, end = self._head_of(retention, 0), self._head_of(retention, self._stride)
            # What heads say: as if all lists were empty, and then of those that are not.
            following, previous = [*range(first, end)], [*range(first, end)]
            for slot in (*self._occupied(retention, 0, self.num_slots), self.num_slots):
                head = node = first + slot
                for block_id in self._walk(head):
                    assert block_id not in found, "a block is in two lists"
                    assert self._previous[block_id] == node, "a link goes one way only"
                    assert self._retention[block_id] == retention, "in another class's list"
                    assert self._belongs(block_id, retention, slot), "in another time's slot"
                    found.add(block_id)
                    node = block_id
                assert self._previous[head] == node, "a list has no end"
                assert node != head or slot == self.num_slots, "a mask is wrong"
                following[slot], previous[slot] = self._next[head], node
            assert self._next[first:end] == following, "a mask is wrong"
            assert self._previous[first:end] == previous, "a list has no end"
            assert self._masks[retention] >> self.num_slots == 0, "a mask is wrong"
        present = {block_id for block_id in range(self.num_blocks) if block_id in self}
        assert found == present, "a block is in no list, yet marked as evictable"

    def _belongs(self, block_id: int, retention: Retention, slot: int) -> bool:
        if retention == Retention.PINNED:
            # A far pin is clamped when it is inserted, so only the lower bound is certain.
            turn = self._time[block_id] // self.slot_width
            return turn >= self._turn and slot < self.num_slots
        turn = self._time[block_id] // self.slot_width
        if turn <= self._turn - self.num_slots:
            return slot == self.num_slots
        return turn % self.num_slots == slot
