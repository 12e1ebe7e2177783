"""The prefix cache against a naive model, over random lives of requests."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cache.events import KeySet, Stored
from cache.keys import key_root
from cache.prefix import PrefixCache, RequestBlocks

BLOCK = 2
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


class CacheMachine(RuleBasedStateMachine):
    """Requests with few different tokens, so that prefixes collide, twins arise and blocks run
    short. `contents` is what each block holds; a hit must find just that."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(8)
        self.contents: dict[int, list[int]] = {}
        self.live: dict[int, tuple[RequestBlocks, list[int]]] = {}
        self.published = KeySet()

    @rule(target=tables, ids=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def start(self, ids: list[int]) -> RequestBlocks:
        keys = ROOT.keys(ids)
        table = self.cache.start(keys, (len(ids) - 1) // BLOCK)
        for position, block in enumerate(table.block_ids):
            assert self.contents[block] == ids[: (position + 1) * BLOCK]
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
        fresh = self.cache.grow(table, count)
        assert (fresh is None) == (count - known > available)
        held = [b for other, _ in self.live.values() for b in other.block_ids if other is not table]
        for block in fresh or []:
            assert block not in held
        for position in range(known, len(table.block_ids)):
            self.contents[table.block_ids[position]] = ids[: (position + 1) * BLOCK]

    @rule(table=tables)
    def publish(self, table: RequestBlocks) -> None:
        if not table.released:
            self.cache.publish(table, ROOT.root, min(len(table.keys), len(table.block_ids)))

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

    @rule(table=consumes(tables))
    def release(self, table: RequestBlocks) -> None:
        if table.released:
            return
        self.cache.release(table)
        while table.in_flight:
            self.cache.leave_plan(table)
        self.live.pop(id(table))

    @invariant()
    def holds(self) -> None:
        self.cache.check_integrity()
        for event in self.cache.drain_events():
            # Each event changes the set: first copies and last copies only.
            change = self.published.add if isinstance(event, Stored) else self.published.remove
            assert change(event.key, event.tier)
        for table, _ in self.live.values():
            assert all(self.cache.pool.references(block) > 0 for block in table.block_ids)
        keys = {key for key, _ in self.published}
        assert all(key in self.cache for key in keys)
        assert len(keys) == sum(key is not None for key in self.cache._key_of)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
