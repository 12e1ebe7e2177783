"""The prefix cache against a naive model, over random lives of requests."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cache.events import BlockKey, KeySet, Removed, Stored
from cache.keys import key_root
from cache.prefix import PrefixCache, RequestBlocks
from cache.wheel import Retention

BLOCK = 2
# A tree of few prefixes, so that requests meet often.
_IDS = st.tuples(
    st.sampled_from(["000000000000", "000011111111", "000011110000", "110"]), st.integers(2, 12)
).map(lambda drawn: [int(digit) for digit in drawn[0][: drawn[1]]])
ROOT = key_root(b"k" * 32, "model", "", BLOCK)


def release_in_order(cache: PrefixCache, chains: list[list[int]]) -> None:
    for ids in chains:
        keys = ROOT.keys(ids)
        table = cache.start(keys, len(keys))
        assert cache.grow(table, len(keys)) is not None
        cache.publish(table, ROOT.root, len(keys))
        cache.release(table)


def test_the_least_recently_used_chain_is_evicted_tail_first() -> None:
    cache = PrefixCache(6)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    release_in_order(cache, [old, new])
    cache.drain_events()
    table = cache.start([], 0)
    assert cache.grow(table, 2) is not None
    assert [event.key for event in cache.drain_events()] == ROOT.keys(old)[:0:-1]
    assert cache.match(ROOT.keys(old)) == 1
    assert cache.match(ROOT.keys(new)) == 3


def test_a_used_chain_moves_to_the_end_of_the_queue() -> None:
    cache = PrefixCache(4)
    release_in_order(cache, [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]])
    table = cache.start([], 0)
    assert cache.grow(table, 1) is not None
    assert cache.match(ROOT.keys([1, 2, 3, 4])) == 2
    assert cache.match(ROOT.keys([5, 6, 7, 8])) == 1


def test_held_blocks_are_never_evicted() -> None:
    cache = PrefixCache(4)
    keys = ROOT.keys([1, 2, 3, 4])
    table = cache.start(keys, 2)
    assert cache.grow(table, 2) is not None
    cache.publish(table, ROOT.root, 2)
    other = cache.start([], 0)
    assert cache.grow(other, 3) is None
    assert cache.grow(other, 2) is not None
    assert cache.match(keys) == 2


def test_blocks_in_flight_stay_held_until_their_plan_is_committed() -> None:
    cache = PrefixCache(2)
    table = cache.start([], 0)
    assert cache.grow(table, 2) is not None
    cache.enter_plan(table)
    cache.release(table)
    assert cache.num_available == 0
    cache.leave_plan(table)
    assert cache.num_available == 2


def test_an_idle_twin_leaves_the_wheel_when_a_chain_goes_on_below_it() -> None:
    cache = PrefixCache(6)
    late = cache.start(ROOT.keys([1, 2, 3, 4]), 2)
    assert cache.grow(late, 2) is not None
    release_in_order(cache, [[1, 2]])
    cache.publish(late, ROOT.root, 2)
    cache.check_integrity()
    cache.release(late)
    cache.check_integrity()
    # Own block of the twin was freed; of the two keyed ones the end goes first.
    assert cache.pool.num_free == 4
    assert cache.grow(cache.start([], 0), 5) is not None
    assert cache.match(ROOT.keys([1, 2, 3, 4])) == 1


def test_classes_are_inherited_from_what_was_below() -> None:
    cache = PrefixCache(6)
    low, pinned = ROOT.keys([1, 2, 3, 4]), ROOT.keys([1, 2, 5, 6])
    for keys, kind, ttl in ((pinned, Retention.PINNED, 100), (low, Retention.LOW, 0)):
        table = cache.start(keys, 2)
        assert cache.grow(table, 2) is not None
        cache.publish(table, ROOT.root, 2)
        table.retention, table.ttl = kind, ttl
        cache.release(table)
    cache.advance(5)
    release_in_order(cache, [[7, 8, 9, 10]])
    # 3 keyed blocks of the first two chains, 2 of the third, 1 free: the low one goes first, then
    # the younger normal ones, the pinned ones last.
    gone: list[BlockKey] = []
    for _ in range(6):
        assert cache.grow(cache.start([], 0), 1) is not None
        gone += [event.key for event in cache.drain_events() if isinstance(event, Removed)]
    assert gone == [low[1], *reversed(ROOT.keys([7, 8, 9, 10])), pinned[1], pinned[0]]


def test_a_parent_used_beyond_its_child_outlives_younger_chains() -> None:
    cache = PrefixCache(5, wheel_slots=8, wheel_slot_width=1)
    release_in_order(cache, [[1, 2, 3, 4]])
    cache.advance(1)
    release_in_order(cache, [[5, 6]])
    cache.advance(2)
    # Uses the first block of the first chain only.
    release_in_order(cache, [[1, 2]])
    cache.drain_events()
    assert cache.grow(cache.start([], 0), 4) is not None
    gone = [event.key for event in cache.drain_events()]
    assert gone == [ROOT.keys([1, 2, 3, 4])[1], ROOT.keys([5, 6])[0]]


def test_a_block_with_new_content_has_nothing_of_the_old() -> None:
    cache = PrefixCache(2, wheel_slots=8, wheel_slot_width=1)
    for ids, kind in (([1, 2], Retention.PINNED), ([3, 4], Retention.PINNED)):
        table = cache.start(ROOT.keys(ids), 1)
        assert cache.grow(table, 1) is not None
        cache.publish(table, ROOT.root, 1)
        table.retention, table.ttl = kind, 100
        cache.release(table)
    whole = cache.start([], 0)
    assert cache.grow(whole, 2) is not None
    cache.release(whole)
    for ids, kind in (([5, 6], Retention.NORMAL), ([7, 8], Retention.LOW)):
        table = cache.start(ROOT.keys(ids), 1)
        assert cache.grow(table, 1) is not None
        cache.publish(table, ROOT.root, 1)
        table.retention = kind
        cache.release(table)
    assert cache.grow(cache.start([], 0), 1) is not None
    assert cache.match(ROOT.keys([5, 6])) == 1


def test_a_tail_that_another_request_holds_is_not_evictable() -> None:
    cache = PrefixCache(2)
    release_in_order(cache, [[1, 2, 3, 4]])
    keys = ROOT.keys([1, 2, 3, 4])
    one, two = cache.start(keys, 2), cache.start(keys, 2)
    cache.release(one)
    cache.check_integrity()
    assert cache.grow(cache.start([], 0), 1) is None
    cache.release(two)
    assert cache.grow(cache.start([], 0), 2) is not None


def test_a_request_that_waits_for_room_counts_as_no_reuse() -> None:
    cache = PrefixCache(4)
    release_in_order(cache, [[1, 2]])
    keys = ROOT.keys([1, 2, 3, 4])
    for _ in range(3):
        cache.release(cache.start(keys, 2))
    assert not any(cache.wheel._reuses)
    release_in_order(cache, [[1, 2, 3, 4]])
    assert sum(cache.wheel._reuses) == 1


@given(st.integers(0, 70), st.integers(0, 70), st.none() | st.integers(0, 70))
def test_halving_finds_what_a_walk_finds(present: int, length: int, limit: int | None) -> None:
    cache = PrefixCache(70)
    keys = ROOT.keys(list(range(140)))
    table = cache.start(keys, 0)
    cache.grow(table, present)
    cache.publish(table, ROOT.root, present)
    asked = keys[:length]
    assert cache.match(asked, limit) == min(present, length, 70 if limit is None else limit)
    assert cache.start(asked, limit or 0).block_ids == table.block_ids[: min(length, limit or 0)]


def test_a_hole_is_counted_and_walked_up_to() -> None:
    for hole in range(1, 7):
        cache = PrefixCache(8)
        ids = list(range(16))
        release_in_order(cache, [ids])
        keys = ROOT.keys(ids)
        # What no code here does: a key goes while its child stays.
        cache._key_of[cache._index.pop(keys[hole])] = None
        table = cache.start(keys, 8)
        assert (table.num_published, len(table.block_ids)) == (hole, hole)
        assert cache.num_holes == 1


class CacheMachine(RuleBasedStateMachine):
    """Requests with few different tokens, so that prefixes collide, twins arise and blocks run
    short. `contents` is what each block holds; a hit must find just that. `classes` is the
    strongest class of any request that has given a key back, `until` the last tick of its pin."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(8, wheel_slots=3, wheel_slot_width=1, block_size=BLOCK)
        self.now = 0
        self.parents: dict[BlockKey, BlockKey] = {}
        self.classes: dict[BlockKey, Retention] = {}
        self.until: dict[BlockKey, int] = {}
        self.contents: dict[int, list[int]] = {}
        self.live: dict[int, tuple[RequestBlocks, list[int]]] = {}
        self.published = KeySet()

    @rule(ticks=st.integers(1, 5) | st.just(10**6))
    def pass_time(self, ticks: int) -> None:
        self.now += ticks
        self.cache.advance(self.now)

    @rule(
        target=tables,
        ids=_IDS | st.lists(st.integers(0, 1), min_size=2, max_size=12),
        retention=st.sampled_from(Retention),
        ttl=st.integers(0, 12),
    )
    def start(self, ids: list[int], retention: Retention, ttl: int) -> RequestBlocks:
        keys = ROOT.keys(ids)
        table = self.cache.start(keys, (len(ids) - 1) // BLOCK)
        for position, block in enumerate(table.block_ids):
            assert self.contents[block] == ids[: (position + 1) * BLOCK]
        table.retention, table.ttl = retention, ttl
        self.live[id(table)] = (table, ids)
        return table

    @rule(table=tables, count=st.integers(1, 6))
    def grow(self, table: RequestBlocks, count: int) -> None:
        if table.released:
            return
        ids = self.live[id(table)][1]
        count = min(count, len(ids) // BLOCK)
        known = len(table.block_ids)
        available = self.cache.num_available
        self.follow_events()
        fresh = self.cache.grow(table, count)
        self.follow_evictions()
        assert (fresh is None) == (count - known > available)
        held = [b for other, _ in self.live.values() for b in other.block_ids if other is not table]
        for block in fresh or []:
            assert block not in held
        for position in range(known, len(table.block_ids)):
            self.contents[table.block_ids[position]] = ids[: (position + 1) * BLOCK]

    @rule(table=tables)
    def publish(self, table: RequestBlocks) -> None:
        if not table.released:
            num_full = min(len(table.keys), len(table.block_ids))
            self.cache.publish(table, ROOT.root, num_full, self.live[id(table)][1])

    @rule(table=tables)
    def borrow(self, table: RequestBlocks) -> None:
        """As a scheduler does before a table's first plan. The beginning that is lent is what the
        request needs, and no other block has more of it."""
        if table.released or table.in_flight or table.num_published < len(table.block_ids):
            return
        ids = self.live[id(table)][1]
        start = table.num_published * BLOCK
        wanted = ids[start : start + BLOCK]
        block, run = self.cache.borrow(table, ROOT.root, wanted)
        most = 0
        for other, key in enumerate(self.cache._key_of):
            content = self.contents.get(other, [])
            if key is not None and len(content) == start + BLOCK and content[:start] == ids[:start]:
                pairs = zip(content[start:], wanted, strict=False)
                same = [one == two for one, two in pairs]
                most = max(most, (*same, False).index(False))
        assert run == most
        assert run == 0 or self.contents[block][: start + run] == ids[: start + run]

    @rule(table=tables)
    def complete(self, table: RequestBlocks) -> None:
        self.grow(table, len(table.keys))
        self.publish(table)

    @rule(table=tables)
    def enter_plan(self, table: RequestBlocks) -> None:
        if not table.released:
            self.cache.enter_plan(table)

    @rule(table=tables)
    def leave_plan(self, table: RequestBlocks) -> None:
        if table.in_flight:
            self.cache.leave_plan(table)
            if table.released and not table.in_flight:
                self.live.pop(id(table), None)
                self.note_use(table)

    @rule(table=consumes(tables))
    def release(self, table: RequestBlocks) -> None:
        if table.released:
            return
        self.cache.release(table)
        while table.in_flight:
            self.cache.leave_plan(table)
        self.live.pop(id(table))
        self.note_use(table)

    def note_use(self, table: RequestBlocks) -> None:
        for key in table.keys[: table.num_published]:
            self.classes[key] = max(self.classes.get(key, Retention.LOW), table.retention)
            if table.retention == Retention.PINNED:
                self.until[key] = max(self.until.get(key, 0), self.now + table.ttl)

    def class_of(self, key: BlockKey) -> Retention:
        if self.until.get(key, self.now) < self.now:
            return Retention.NORMAL
        return self.classes[key]

    def evictable(self) -> set[BlockKey]:
        keys = set(self.parents) - set(self.parents.values())
        for table, _ in self.live.values():
            keys -= set(table.keys[: table.num_published])
            keys -= {self.cache._key_of[block] for block in table.loans}
        return keys

    def follow_evictions(self) -> None:
        """Each one must have been a leaf that nobody holds, of the weakest class there was."""
        for event in self.cache.drain_events():
            assert isinstance(event, Removed)
            choice = self.evictable()
            assert event.key in choice
            assert self.class_of(event.key) == min(map(self.class_of, choice))
            assert self.published.remove(event.key, event.tier)
            for model in (self.parents, self.classes, self.until):
                model.pop(event.key, None)

    def follow_events(self) -> None:
        for event in self.cache.drain_events():
            # A first copy, and no last copy: only `grow` evicts.
            assert isinstance(event, Stored)
            assert self.published.add(event.key, event.tier)
            self.parents[event.key] = event.parent

    @invariant()
    def holds(self) -> None:
        self.cache.check_integrity()
        self.follow_events()
        assert self.cache.num_holes == 0
        for table, _ in self.live.values():
            assert all(self.cache.pool.references(block) > 0 for block in table.block_ids)
            assert all(self.cache.pool.references(block) > 0 for block in table.loans)
        keys = {key for key, _ in self.published}
        assert all(key in self.cache for key in keys)
        assert len(keys) == sum(key is not None for key in self.cache._key_of)


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase
