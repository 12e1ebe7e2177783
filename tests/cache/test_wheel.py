"""The time wheel against sorted lists."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.wheel import EvictionWheel, Retention

BLOCKS = 5
_block = st.integers(0, BLOCKS - 1)


def evict_all(wheel: EvictionWheel) -> list[int]:
    order = []
    while True:
        try:
            order.append(wheel.evict())
        except IndexError:
            return order


def used_at(wheel: EvictionWheel, tick: int, block_id: int, kind: Retention, ttl: int = 0) -> None:
    wheel.advance(tick)
    wheel.touch(block_id, kind, ttl)
    wheel.insert(block_id)


def test_the_oldest_slot_goes_first_wherever_the_wheel_stands() -> None:
    wheel = EvictionWheel(8, num_slots=4, slot_width=10)
    for block_id, tick in ((3, 0), (1, 95), (4, 103), (0, 104), (5, 117)):
        used_at(wheel, tick, block_id, Retention.NORMAL)
    assert list(wheel) == [3, 1, 4, 0, 5]
    wheel.remove(4)
    wheel.advance(10_000)
    assert evict_all(wheel) == [3, 1, 0, 5]


def test_classes_go_in_order_and_pins_by_when_they_run_out() -> None:
    wheel = EvictionWheel(8, num_slots=4, slot_width=10)
    used_at(wheel, 0, 0, Retention.PINNED, 1000)
    used_at(wheel, 0, 1, Retention.PINNED, 15)
    used_at(wheel, 0, 2, Retention.NORMAL)
    used_at(wheel, 5, 3, Retention.LOW)
    assert list(wheel) == [3, 2, 1, 0]
    wheel.advance(19)
    assert list(wheel) == [3, 2, 1, 0]
    wheel.advance(20)
    assert 1 in wheel
    # Block 1's pin has run out: it was last used as long ago as block 2.
    used_at(wheel, 21, 4, Retention.NORMAL)
    assert list(wheel) == [3, 2, 1, 4, 0]
    used_at(wheel, 1009, 5, Retention.NORMAL)
    assert list(wheel) == [3, 2, 1, 4, 5, 0]
    wheel.advance(1010)
    assert list(wheel) == [3, 2, 1, 4, 0, 5]


def test_a_class_is_raised_and_never_lowered() -> None:
    wheel = EvictionWheel(2, num_slots=4, slot_width=1)
    wheel.touch(0, Retention.NORMAL, 0)
    used_at(wheel, 0, 0, Retention.LOW)
    used_at(wheel, 3, 1, Retention.LOW)
    assert evict_all(wheel) == [1, 0]


def test_what_was_found_again_stays_longer() -> None:
    wheel = EvictionWheel(4, num_slots=1000, slot_width=1)
    used_at(wheel, 0, 0, Retention.NORMAL)
    wheel.advance(100)
    assert wheel.evict() == 0
    # A block now stays for about 100 ticks.
    wheel.credit(1)
    wheel.credit(1)
    wheel.credit(1)
    used_at(wheel, 100, 1, Retention.NORMAL)
    used_at(wheel, 130, 2, Retention.NORMAL)
    used_at(wheel, 150, 3, Retention.NORMAL)
    assert evict_all(wheel) == [2, 1, 3]


def test_a_block_as_old_as_the_wheel_is_older_than_its_slots() -> None:
    wheel = EvictionWheel(2, num_slots=4, slot_width=1)
    wheel.touch(0, Retention.NORMAL, 0)
    used_at(wheel, 4, 1, Retention.NORMAL)
    wheel.insert(0)
    assert evict_all(wheel) == [0, 1]


def test_what_is_given_up_passes_its_use_on() -> None:
    wheel = EvictionWheel(4, num_slots=100, slot_width=1)
    used_at(wheel, 1, 0, Retention.NORMAL)
    wheel.advance(2)
    wheel.touch(1, Retention.NORMAL, 0)
    assert wheel.outlives(1, 0)
    assert not wheel.outlives(2, 0)
    wheel.inherit(2, 1)
    wheel.insert(2)
    assert list(wheel) == [0, 2]


def test_time_never_goes_back() -> None:
    wheel = EvictionWheel(1, num_slots=4, slot_width=1)
    wheel.advance(5)
    with pytest.raises(ValueError, match="tick 4 comes after tick 5"):
        wheel.advance(4)
    with pytest.raises(ValueError, match="0 slots"):
        EvictionWheel(1, num_slots=0, slot_width=1)


def flip_empty(wheel: EvictionWheel) -> None:
    wheel._masks[Retention.LOW] ^= 1


def flip_full(wheel: EvictionWheel) -> None:
    wheel._masks[Retention.NORMAL] = 0


def flip_beyond(wheel: EvictionWheel) -> None:
    wheel._masks[Retention.PINNED] |= 1 << wheel.num_slots


def link_empty(wheel: EvictionWheel) -> None:
    wheel._previous[-1] = 1


def link_full(wheel: EvictionWheel) -> None:
    wheel._previous[wheel._next[wheel._next[0]]] = 0


def lose(wheel: EvictionWheel) -> None:
    wheel._previous[2] = 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (flip_empty, "a mask is wrong"),
        (flip_full, "a mask is wrong"),
        (flip_beyond, "a mask is wrong"),
        (link_empty, "a list has no end"),
        (link_full, "a list has no end"),
        (lose, "a block is in no list"),
    ],
)
def test_what_is_broken_is_noticed(spoil: Callable[[EvictionWheel], None], message: str) -> None:
    wheel = EvictionWheel(3, num_slots=4, slot_width=10)
    used_at(wheel, 10, 0, Retention.NORMAL)
    used_at(wheel, 11, 1, Retention.NORMAL)
    wheel.check_integrity()
    spoil(wheel)
    with pytest.raises(AssertionError, match=message):
        wheel.check_integrity()


class WheelMachine(RuleBasedStateMachine):
    """The model keeps a list for each (class, turn), one a class for what is older than the wheel,
    and sorts them anew for every question."""

    @initialize(num_slots=st.integers(1, 5), slot_width=st.integers(1, 4))
    def make(self, num_slots: int, slot_width: int) -> None:
        self.wheel = EvictionWheel(BLOCKS, num_slots, slot_width)
        self.lists: dict[tuple[Retention, int], list[int]] = {}
        self.aged: dict[Retention, list[int]] = {kind: [] for kind in Retention}
        self.now = self.stay = 0
        self.used = [0] * BLOCKS
        self.reuses = [0] * BLOCKS
        self.kind = [Retention.LOW] * BLOCKS
        self.until = [-1] * BLOCKS

    @property
    def turn(self) -> int:
        return self.now // self.wheel.slot_width

    def order(self) -> list[int]:
        order = []
        for kind in Retention:
            order += self.aged[kind]
            for key in sorted(key for key in self.lists if key[0] == kind):
                order += self.lists[key]
        return order

    def place(self, block_id: int, first: bool = False) -> None:
        width, slots = self.wheel.slot_width, self.wheel.num_slots
        if self.kind[block_id] == Retention.PINNED and self.until[block_id] // width < self.turn:
            self.kind[block_id] = Retention.NORMAL
            self.until[block_id] = -1
        kind = self.kind[block_id]
        if kind == Retention.PINNED:
            turn = min(self.until[block_id] // width, self.turn + slots - 1)
        else:
            penalty = int(self.stay * 0.4 * (3 - self.reuses[block_id]) / 3)
            turn = (self.used[block_id] - penalty) // width
        if turn <= self.turn - slots:
            chosen = self.aged[kind]
        else:
            chosen = self.lists.setdefault((kind, turn), [])
        chosen.insert(0 if first else len(chosen), block_id)

    def displace(self, block_id: int) -> None:
        for blocks in (*self.lists.values(), *self.aged.values()):
            if block_id in blocks:
                blocks.remove(block_id)

    @rule(block_id=_block, kind=st.sampled_from(Retention), ttl=st.integers(0, 40))
    def touch(self, block_id: int, kind: Retention, ttl: int) -> None:
        if block_id in self.wheel:
            self.wheel.remove(block_id)
            self.displace(block_id)
        self.wheel.touch(block_id, kind, ttl)
        self.used[block_id] = self.now
        self.kind[block_id] = max(self.kind[block_id], kind)
        if kind == Retention.PINNED:
            self.until[block_id] = max(self.until[block_id], self.now + ttl)

    @rule(block_id=_block)
    def credit(self, block_id: int) -> None:
        self.wheel.credit(block_id)
        self.reuses[block_id] = min(self.reuses[block_id] + 1, 3)

    @rule(block_id=_block, first=st.booleans())
    def insert(self, block_id: int, first: bool) -> None:
        if block_id not in self.wheel:
            self.wheel.insert(block_id, first=first)
            self.place(block_id, first)

    @rule(block_id=_block)
    def remove(self, block_id: int) -> None:
        if block_id in self.wheel:
            self.wheel.remove(block_id)
            self.displace(block_id)

    @rule(child=_block, parent=_block)
    def inherit(self, child: int, parent: int) -> None:
        if child == parent or child in self.wheel or parent in self.wheel:
            return
        self.wheel.inherit(parent, child)
        self.wheel.forget([child])
        self.used[parent] = max(self.used[parent], self.used[child])
        self.kind[parent] = max(self.kind[parent], self.kind[child])
        self.until[parent] = max(self.until[parent], self.until[child])
        self.reuses[parent] = min(self.reuses[parent] + self.reuses[child], 3)
        self.kind[child], self.until[child], self.reuses[child] = Retention.LOW, -1, 0

    @precondition(lambda self: self.order())
    @rule(parent=_block)
    def evict_child(self, parent: int) -> None:
        """As the cache does it: what is given up passes its use on to its parent."""
        child = self.order()[0]
        self.evict()
        if parent not in self.wheel:
            self.inherit(child, parent)
            self.insert(parent, first=True)

    @precondition(lambda self: self.order())
    @rule()
    def evict(self) -> None:
        block_id = self.order()[0]
        assert self.wheel.evict() == block_id
        self.displace(block_id)
        if self.kind[block_id] != Retention.PINNED:
            self.stay = self.now - self.used[block_id]

    @rule(ticks=st.one_of(st.integers(0, 6), st.sampled_from([50, 10**9])))
    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        self.wheel.advance(self.now)
        expired = []
        for kind, turn in sorted(self.lists):
            if kind == Retention.PINNED and turn < self.turn:
                expired += self.lists.pop((kind, turn))
            elif kind != Retention.PINNED and turn <= self.turn - self.wheel.num_slots:
                self.aged[kind] += self.lists.pop((kind, turn))
        for block_id in expired:
            self.place(block_id)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "wheel"):
            self.wheel.check_integrity()
            assert list(self.wheel) == self.order()
            assert [b for b in range(BLOCKS) if b in self.wheel] == sorted(self.order())


WheelMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWheelMachine = WheelMachine.TestCase
