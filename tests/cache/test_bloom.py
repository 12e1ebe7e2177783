import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.bloom import blocked, flips
from cache.bloom.blocked import BlockedBloom
from cache.bloom.counting import CountingBloom
from cache.bloom.flips import FlipBatch, SnapshotChunk, bits_for, positions_of
from cache.bloom.sliced import BitSlicedIndex

SIZES = [64, 128, 256, 1024]


def keys_of(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


POOL = keys_of(7, 60)


def chunks_of(bloom: CountingBloom, generation: int, max_bytes: int) -> Iterator[SnapshotChunk]:
    start = 0
    while True:
        chunk = bloom.snapshot(generation, start, max_bytes)
        yield chunk
        start = chunk.end
        if start == chunk.num_bits:
            return


def bits_of(bloom: CountingBloom) -> bytes:
    return bloom.snapshot(bloom.generation, 0, bloom.num_bits).bits


def publish_all(bloom: CountingBloom, index: BitSlicedIndex, name: str) -> None:
    while batches := bloom.drain_flips(50):
        for batch in batches:
            assert index.apply(name, batch)


def load_all(bloom: CountingBloom, index: BitSlicedIndex, name: str) -> None:
    for generation in (bloom.generation, bloom.next_generation):
        for chunk in chunks_of(bloom, generation, 16) if generation else ():
            assert index.load(name, chunk)


def may_hold(bits: bytes, key: bytes) -> bool:
    return all(bits[one // 8] >> one % 8 & 1 for one in positions_of(key, len(bits) * 8))


@given(st.lists(st.binary(min_size=16, max_size=16)), st.lists(st.sampled_from(POOL)))
def test_blocked_never_denies_what_it_holds(first: list[bytes], second: list[bytes]) -> None:
    bloom = BlockedBloom(8, 0.1)
    for key in first:
        bloom.add(key)
    assert all(key in bloom for key in first)
    bloom.rebuild(second, capacity=30)
    assert all(key in bloom for key in second)
    assert bloom.num_added == len(second)
    bloom.check_integrity()


@pytest.mark.parametrize("target", [0.03, 0.01, 0.002])
def test_blocked_rate_is_the_stated_one(target: float) -> None:
    bloom = BlockedBloom(20_000, target)
    for key in keys_of(1, 20_000):
        bloom.add(key)
    measured = sum(key in bloom for key in keys_of(2, 200_000)) / 200_000
    assert 0.8 * target < measured < 1.2 * target
    assert bloom.num_bits / 20_000 == pytest.approx(blocked.bits_per_key(target), rel=0.01)
    assert 0.3 < bloom.fill() < 0.7


def test_blocked_rate_falls_with_bits_and_has_the_figures_of_its_docstring() -> None:
    rates = [blocked.false_positive_rate(bits) for bits in (8, 12, 16)]
    assert [round(rate * 100, 2) for rate in rates] == [2.93, 0.42, 0.09]
    assert blocked.false_positive_rate(0) == 1.0
    for refused in (0.0, 0.9):
        with pytest.raises(ValueError, match="outside"):
            BlockedBloom(10, refused)


def test_a_rebuild_that_fails_changes_nothing() -> None:
    bloom = BlockedBloom(10)
    bloom.add(POOL[0])

    def broken() -> Iterator[bytes]:
        yield POOL[1]
        raise OSError("the tier cannot be listed")

    with pytest.raises(OSError, match="tier"):
        bloom.rebuild(broken(), capacity=1000)
    assert (POOL[0] in bloom, bloom.capacity, bloom.num_added) == (True, 10, 1)


def test_counting_rate_is_the_stated_one() -> None:
    num_keys = 10_000
    for num_bits in (bits_for(num_keys), bits_for(num_keys) // 2):
        bloom = CountingBloom(num_bits)
        for key in keys_of(3, num_keys):
            bloom.add(key)
        measured = sum(key in bloom for key in keys_of(4, 100_000)) / 100_000
        stated = flips.false_positive_rate(num_bits / num_keys)
        assert 0.85 * stated < measured < 1.15 * stated


def test_add_and_remove_return_the_flips_they_cause() -> None:
    bloom = CountingBloom(1024)
    positions = set(positions_of(POOL[0], 1024))
    assert set(bloom.add(POOL[0])) == {(one, True) for one in positions}
    assert bloom.add(POOL[0]) == []
    assert bloom.remove(POOL[0]) == []
    assert set(bloom.remove(POOL[0])) == {(one, False) for one in positions}
    # Set and cleared again before anybody was told: nothing to tell.
    assert bloom.drain_flips(10) == []
    bloom.add(POOL[1])
    bloom.add(POOL[0])
    assert set(bloom.drain_flips(2)[0].set_positions) < set(positions_of(POOL[1], 1024))
    bloom.remove(POOL[0])
    bloom.remove(POOL[1])
    with pytest.raises(KeyError):
        bloom.remove(POOL[0])
    bloom.check_integrity([])


def test_saturated_counters_never_deny_and_a_resize_heals_them() -> None:
    bloom = CountingBloom(64)
    others = POOL[1:6]
    for key in [POOL[0]] * 300 + others:
        bloom.add(key)
    for _ in range(300):
        bloom.remove(POOL[0])
    bloom.check_integrity(others)
    assert POOL[0] in bloom
    bloom.start_resize(1024, others)
    bloom.copy(100)
    bloom.drain_flips(1000)
    assert POOL[0] not in bloom
    bloom.check_integrity(others)


def test_batches_and_what_waits_for_them_are_bounded() -> None:
    bloom = CountingBloom(256)
    rng = random.Random(5)
    held: list[bytes] = []
    for key in keys_of(6, 5000):
        held.append(key)
        bloom.add(key)
        if len(held) > 20:
            bloom.remove(held.pop(rng.randrange(20)))
        assert bloom.num_unpublished <= 256
    bloom.start_resize(1024, held)
    bloom.copy(10)
    sizes = []
    while batches := bloom.drain_flips(7):
        sizes.append(sum(len(one.set_positions) + len(one.cleared_positions) for one in batches))
        bloom.copy(1)
    assert max(sizes) == 7
    assert bloom.generation == 2


def test_wanted_size_follows_the_keys_without_going_back_and_forth() -> None:
    bloom = CountingBloom(64)
    for key in POOL[:8]:
        bloom.add(key)
    assert bloom.wanted_bits is None
    bloom.add(POOL[8])
    assert bloom.wanted_bits == 128
    bloom.start_resize(1024, POOL[:9])
    assert bloom.wanted_bits == 128
    bloom.start_resize(512, POOL[:9])
    assert bloom.wanted_bits is None
    with pytest.raises(ValueError, match="power of two"):
        bloom.start_resize(100, POOL[:9])
    with pytest.raises(ValueError, match="9 are held"):
        bloom.start_resize(128, POOL[:8])


def test_the_old_generation_is_looked_up_until_the_new_one_is_complete() -> None:
    bloom, index = CountingBloom(64), BitSlicedIndex()
    index.add_replica("a")
    for key in POOL[:8]:
        bloom.add(key)
    publish_all(bloom, index, "a")
    bloom.start_resize(1024, POOL[:8])
    old_chunk = bloom.snapshot(1, 0, 8)
    batches: list[FlipBatch] = []
    while bloom.copy(1) or bloom.next_generation:
        assert index.generation("a") == 1
        batches += bloom.drain_flips(3)
        assert index.apply("a", batches[-1])
        assert index.match(POOL[:8]) == {"a": 8}
        index.check_integrity()
    assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
    assert index.generation("a") == 2
    assert index.memory_bytes() == 1024 * 8
    # Late ones say nothing about the present, and the middle of a stream is no start.
    assert index.load("a", old_chunk)
    assert index.generation("a") == 2
    index.clear_replica("a")
    assert not index.apply("a", batches[1])
    assert index.memory_bytes() == 0


def test_a_lost_batch_is_noticed_and_a_snapshot_repairs_it() -> None:
    bloom, index = CountingBloom(256), BitSlicedIndex()
    index.add_replica("a")
    bloom.add(POOL[0])
    publish_all(bloom, index, "a")
    bloom.add(POOL[1])
    bloom.drain_flips(100)
    bloom.remove(POOL[0])
    (batch,) = bloom.drain_flips(100)
    assert not index.apply("a", batch)
    assert index.match([POOL[0]]) == {"a": 1}
    # More is published while the chunks are on their way, and another chunk is lost at first.
    first, _, *_ = chunks_of(bloom, 1, 8)
    assert index.load("a", first)
    assert not index.load("a", bloom.snapshot(1, 128, 8))
    for chunk in chunks_of(bloom, 1, 8):
        assert index.load("a", chunk)
        bloom.add(POOL[2 + chunk.start // 64])
        publish_all(bloom, index, "a")
    assert index.column("a") == bits_of(bloom)
    assert index.match([POOL[1], POOL[2]]) == {"a": 2}
    # What comes twice does no harm.
    assert index.apply("a", batch)
    assert index.column("a") == bits_of(bloom)
    index.check_integrity()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 150), st.integers(0, 400), st.booleans())
def test_depths_are_those_of_a_walk_replica_by_replica(
    seed: int, num_replicas: int, num_keys: int, swept: bool
) -> None:
    rng = random.Random(seed)
    chain = keys_of(seed + 1, num_keys)
    index = BitSlicedIndex()
    for number in range(num_replicas):
        index.add_replica(f"{number}")
        num_bits = rng.choice([1024, 4096])
        held = chain[: rng.choice([0, num_keys, rng.randrange(num_keys + 1)])]
        held += [key for key in chain if rng.random() < 0.2]
        positions = {one for key in held for one in positions_of(key, num_bits)}
        index.apply(f"{number}", FlipBatch(1, num_bits, 1, tuple(positions), (), True))
        if rng.random() < 0.2:
            index.remove_replica(f"{rng.randrange(number + 1)}")
            if swept:
                index.sweep(1500)
    index.check_integrity()
    naive = {}
    for number in range(num_replicas):
        bits = index.column(f"{number}") if f"{number}" in index else None
        depth = 0
        while bits and depth < num_keys and may_hold(bits, chain[depth]):
            depth += 1
        if depth:
            naive[f"{number}"] = depth
    assert index.match(chain) == naive


def test_slots_and_columns_are_used_again_and_memory_stays() -> None:
    index = BitSlicedIndex()
    for number in range(500):
        name = f"{number}"
        assert index.add_replica(name) < 6
        bloom = CountingBloom(128)
        bloom.add(POOL[number % 60])
        publish_all(bloom, index, name)
        assert index.match([POOL[number % 60]])[name] == 1
        if number >= 5:
            index.remove_replica(f"{number - 5}")
        if number % 7 == 0:
            index.sweep(40)
        index.check_integrity()
    assert len(index) == 5
    assert index.memory_bytes() == 128 * 8
    for number in range(495, 500):
        index.remove_replica(f"{number}")
    assert index.memory_bytes() == 0
    assert list(index.depths(POOL, 3)) == [0, 0, 0]


def test_what_no_filter_can_say_is_refused() -> None:
    index = BitSlicedIndex(max_bits=4096)
    index.add_replica("a")
    for num_bits, last, cleared in ((64, 64, ()), (64, 0, (-1,)), (96, 0, ()), (8192, 0, ())):
        with pytest.raises(ValueError, match="bits"):
            index.apply("a", FlipBatch(1, num_bits, 1, (last,), cleared, True))
    assert index.memory_bytes() == 0
    index.check_integrity()


class Publishing(RuleBasedStateMachine):
    """A replica that adds, removes and resizes, and a follower that loses some of what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[bytes] = []
        self.settled: set[bytes] = set()  # Held since the follower last had everything.
        self.is_behind = False
        self.index = BitSlicedIndex()
        self.bloom = CountingBloom(64)

    @initialize(num_bits=st.sampled_from(SIZES), others=st.integers(0, 70))
    def start(self, num_bits: int, others: int) -> None:
        self.bloom = CountingBloom(num_bits)
        for number in range(others):
            self.index.add_replica(f"other-{number}")
            size = SIZES[number % 3]
            positions = positions_of(POOL[number % 60], size)
            self.index.apply(f"other-{number}", FlipBatch(1, size, 1, positions, (), True))
        self.index.add_replica("a")

    @rule(keys=st.lists(st.sampled_from(POOL), min_size=1, max_size=20))
    def add(self, keys: list[bytes]) -> None:
        for key in keys:
            self.bloom.add(key)
            self.held.append(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.bloom.remove(key)
        if key not in self.held:
            self.settled.discard(key)

    @rule(num_bits=st.sampled_from(SIZES))
    def resize(self, num_bits: int) -> None:
        self.bloom.start_resize(num_bits, self.held)

    @rule(max_keys=st.integers(0, 10))
    def copy(self, max_keys: int) -> None:
        self.bloom.copy(max_keys)

    @rule(max_flips=st.integers(2, 40), is_lost=st.booleans(), is_doubled=st.booleans())
    def drain(self, max_flips: int, is_lost: bool, is_doubled: bool) -> None:
        batches = self.bloom.drain_flips(max_flips)
        self.is_behind |= is_lost and bool(batches)
        for batch in batches if not is_lost else ():
            accepted = self.index.apply("a", batch)
            assert accepted or self.is_behind
            assert not is_doubled or self.index.apply("a", batch) == accepted

    @rule(max_bytes=st.integers(1, 40), is_newest=st.booleans(), num_chunks=st.integers(1, 40))
    def load(self, max_bytes: int, is_newest: bool, num_chunks: int) -> None:
        """A snapshot that may be broken off, or be needless."""
        newest = self.bloom.next_generation if is_newest else None
        generation = newest or self.bloom.generation
        for number, chunk in enumerate(chunks_of(self.bloom, generation, max_bytes)):
            assert self.index.load("a", chunk)
            if number + 1 == num_chunks:
                break
        # A generation that was being filled may have made way for it.
        self.is_behind = True

    @rule()
    def forget(self) -> None:
        self.index.clear_replica("a")
        self.is_behind = True
        self.settled.clear()

    @rule(max_rows=st.integers(1, 2000))
    def sweep(self, max_rows: int) -> None:
        self.index.sweep(max_rows)

    @rule()
    def settle(self) -> None:
        while batches := self.bloom.drain_flips(30):
            for batch in batches:
                assert self.index.apply("a", batch) or self.is_behind
        if self.is_behind:
            load_all(self.bloom, self.index, "a")
            self.is_behind = False
        if self.bloom.generation == self.index.generation("a"):
            assert self.index.column("a") == bits_of(self.bloom)
        else:  # Nothing was ever said.
            assert (self.held, self.index.generation("a")) == ([], None)
        self.settled = set(self.held)

    @invariant()
    def nothing_is_denied(self) -> None:
        self.bloom.check_integrity(self.held)
        for key in self.settled if not self.is_behind else ():
            assert self.index.match([key])["a"] == 1
        self.index.check_integrity()
        for number in range(len(self.index) - 1):
            key = POOL[number % 60]
            assert self.index.match([key])[f"other-{number}"] == 1


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
