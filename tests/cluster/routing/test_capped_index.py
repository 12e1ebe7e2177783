"""An index within its memory: never a held block denied, seldom an absent one found, and exact
again as soon as there is room."""

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.events import BlockKey, KeySet, Removed, Stored, Tier
from cluster.routing.index import PrefixIndex
from cluster.routing.router import Router
from configs.shoal import RouterConfig
from engine.stream import Need, StreamFollower, StreamLog, to_delta
from engine.wire import BlocksRemoved, BlocksStored, CacheDelta
from tests.cluster.routing.rig import BLOCK, chain, key

PARENT = bytes(16)
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])
KEYS = [key(number) for number in range(40)]


class Engine:
    """One replica: its log, and the follower that fills its view of an index."""

    def __init__(self, index: PrefixIndex, name: str, incarnation: int = 1) -> None:
        index.remove(name)
        self.index, self.name = index, name
        self.log = StreamLog(incarnation, replay_frames=4)
        self.follower = StreamFollower(incarnation, keys=index.view(name))

    def publish(self, delta: CacheDelta, is_lost: bool = False) -> None:
        frame = self.log.append(delta)
        if not is_lost:
            self.follower.on_frame(frame)

    def store(self, keys: list[BlockKey]) -> None:
        for start in range(0, len(keys), 64):
            self.publish(CacheDelta((BlocksStored(PARENT, tuple(keys[start : start + 64])),)))
            self.repair()

    def repair(self, chunk_keys: int = 512) -> None:
        """Answers what the follower asks for."""
        if self.follower.need is Need.REPLAY:
            frames = self.log.since(self.follower.sequence + 1)
            if frames is not None:
                self.follower.on_replay(frames)
        if self.follower.need is not Need.NOTHING:
            for chunk in self.log.snapshot(chunk_keys):
                self.follower.on_snapshot(chunk)

    def settle(self) -> None:
        """Until nothing is wanted."""
        for _ in range(20):
            self.publish(CacheDelta(()))
            if self.follower.in_sync:
                return
            self.repair()
        raise AssertionError("it is loaded again and again")

    @property
    def is_in_step(self) -> bool:
        """It has lost nothing, not even the last frame."""
        return self.follower.in_sync and self.follower.sequence == self.log.sequence

    @property
    def held(self) -> set[BlockKey]:
        return {item for item, _ in self.log.keys}


class CappedMachine(RuleBasedStateMachine):
    """Engines that store and evict, lines that lose frames and break off snapshots, and memory that
    comes and goes; beside them the plain sets of what they hold."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.incarnation = 1
        self.engines = [Engine(self.index, f"r{number}") for number in range(3)]

    which = st.integers(0, 2)

    @rule(
        which=which,
        numbers=st.lists(st.integers(0, 39), max_size=20),
        tier=TIERS,
        lost=st.booleans(),
    )
    def publish(self, which: int, numbers: list[int], tier: Tier, lost: bool) -> None:
        engine = self.engines[which]
        plain = set(engine.log.keys)
        events: list[Stored | Removed] = []
        for number in numbers:
            item = KEYS[number]
            known = (item, tier) in plain
            events.append(Removed(item, tier) if known else Stored(item, PARENT, tier))
            plain ^= {(item, tier)}
        engine.publish(to_delta(events), lost)

    @rule(which=which, chunk_keys=st.integers(1, 12))
    def repair(self, which: int, chunk_keys: int) -> None:
        self.engines[which].repair(chunk_keys)

    @rule(which=which, num_chunks=st.integers(1, 3))
    def a_snapshot_breaks_off(self, which: int, num_chunks: int) -> None:
        engine = self.engines[which]
        for chunk in list(engine.log.snapshot(5))[:num_chunks]:
            engine.follower.on_snapshot(chunk)

    @rule(which=which)
    def restart(self, which: int) -> None:
        self.incarnation += 1
        self.engines[which] = Engine(self.index, f"r{which}", self.incarnation)

    @rule(max_bytes=st.sampled_from([0, 3_000, 6_000, 9_000, 20_000, 1 << 20, 1 << 30]))
    def limit(self, max_bytes: int) -> None:
        self.index.limit(max_bytes)

    @rule(which=which)
    def want_a_snapshot(self, which: int) -> None:
        self.index.view(f"r{which}").wants_snapshot = True

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=10, unique=True))
    def match(self, keys: list[BlockKey]) -> None:
        found = self.index.match(keys)
        for engine in self.engines:
            held = engine.held
            depth = next((at for at, item in enumerate(keys) if item not in held), len(keys))
            if not engine.is_in_step:
                continue
            if self.index.view(engine.name).filter is None:
                assert found.get(engine.name, 0) == depth
            else:
                assert found.get(engine.name, 0) >= depth

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        for engine in self.engines:
            view = self.index.view(engine.name)
            if not engine.is_in_step:
                continue
            plain = KeySet()
            for item, tier in engine.log.keys:
                plain.add(item, tier)
            assert (view.digest, len(view)) == (plain.digest, len(plain))
            for item in engine.held:
                assert item in view
                assert self.index.match([item])[engine.name] == 1
            if view.filter is None:
                assert set(view) == set(plain)

    def teardown(self) -> None:
        """With memory enough all are exact in the end, whatever came before."""
        if not hasattr(self, "index"):
            return
        self.index.limit(1 << 30)
        for _ in range(4):
            for engine in self.engines:
                engine.settle()
        assert self.index.num_rough == 0
        for item in KEYS:
            holders = {engine.name for engine in self.engines if item in engine.held}
            assert set(self.index.match([item])) == holders


CappedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCappedMachine = CappedMachine.TestCase


def false_positive_pct(index: PrefixIndex, seed: int = 3) -> float:
    """Of random blocks, how many a rough replica seems to hold."""
    rng = random.Random(seed)
    wrong = sum(len(index.match([rng.randbytes(16)])) for _ in range(1500))
    return 100 * wrong / 1500 / index.num_rough


def test_ten_times_the_blocks_stay_within_the_cap_and_few_are_taken_for_there() -> None:
    num_engines, num_keys, num_chains = 4, 12_000, 48
    chains = [
        [chain((n, c), num_keys // num_chains) for c in range(num_chains)]
        for n in range(num_engines)
    ]
    cap = num_engines * num_keys * 143 // 10
    index = PrefixIndex(cap)
    engines = [Engine(index, f"r{number}") for number in range(num_engines)]
    # What the engines keep is no memory of the index: its copies are made while it is traced.
    most = 0
    for at in range(num_chains):
        for engine, own in zip(engines, chains, strict=True):
            engine.store(own[at])
            most = max(most, index.num_bytes)
    for engine in engines:
        engine.settle()
    assert most <= cap
    assert index.num_rough == num_engines
    assert false_positive_pct(index) < 2
    for engine, own in zip(engines, chains, strict=True):
        for each in own:
            found = index.match(each)
            assert found.pop(engine.name) == len(each), "what is held is never denied"
            assert sum(found.values()) <= 3, "and elsewhere a walk stops at once"
    index.check_integrity()


def test_traced_memory_is_within_what_the_index_says_and_its_cap() -> None:
    """Keys come, are shared, leave, and come again in new objects."""
    names = [key("chain", number) for number in range(30_000)]
    rng = random.Random(1)
    cap = 1_500_000
    tracemalloc.start()
    index = PrefixIndex(cap)
    shares = []
    for step in range(60_000):
        view = index.view(f"r{rng.randrange(6)}")
        item = bytes(bytearray(names[min(step // 2, rng.randrange(30_000))]))
        change = view.add if rng.random() < 0.7 else view.remove
        if (item in view) != (change == view.add) and len(view):
            change(item, Tier.DEVICE)
        if step % 2_000 == 1_999:
            now, most = tracemalloc.get_traced_memory()
            assert most <= cap
            shares.append(now / index.num_bytes)
            tracemalloc.reset_peak()
    tracemalloc.stop()
    assert max(shares) < 1.05, "it says no less than it takes"
    assert min(shares) > 0.4, "nor much more"


def test_a_small_replica_stays_exact_beside_a_large_one() -> None:
    index = PrefixIndex(1 << 20)
    small, large = Engine(index, "small"), Engine(index, "large")
    small.store([key("small", number) for number in range(300)])
    large.store([key("large", number) for number in range(20_000)])
    assert index.view("small").filter is None
    assert index.view("large").filter is not None
    assert set(index.match([key("large", number) for number in range(9)])) == {"large"}
    assert index.match([key("small", number) for number in range(300)])["small"] == 300


def test_a_replica_is_exact_again_at_once_when_there_is_room() -> None:
    """It asks for a snapshot itself; meanwhile its filter is looked up."""
    made = Router(RouterConfig(index_memory_bytes=1 << 20), "i")
    made.add_replica("r0", BLOCK)
    index, held = made.index, [key(number) for number in range(12_000)]
    engine = Engine(index, "r0")
    engine.store(held)
    assert index.num_rough == 1
    made.configure(RouterConfig(index_memory_bytes=64 << 20))
    engine.publish(CacheDelta(()))
    assert engine.follower.need is Need.SNAPSHOT
    assert engine.follower.counts.refreshes >= 1
    *chunks, last = engine.log.snapshot(1000)
    for chunk in chunks:
        engine.follower.on_snapshot(chunk)
        assert index.match(held) == {"r0": 12_000}
    assert index.num_rough == 0, "it is being filled"
    engine.publish(CacheDelta((BlocksRemoved(tuple(held[6000:])),)))
    engine.follower.on_snapshot(last)
    assert engine.follower.in_sync
    assert index.match(held) == {"r0": 6_000}
    assert set(index.view("r0")) == {(item, Tier.DEVICE) for item in held[:6000]}
    index.check_integrity()


def test_what_leaves_a_rough_replica_is_found_no_longer() -> None:
    index = PrefixIndex(400_000)
    engine = Engine(index, "r0")
    held = [key(number) for number in range(10_000)]
    engine.store(held)
    assert index.num_rough == 1
    engine.publish(CacheDelta((BlocksRemoved(tuple(held[5000:])),)))
    assert engine.follower.in_sync
    assert index.match(held)["r0"] in range(5000, 5005)
    assert sum(item in index.view("r0") for item in held[5000:]) < 100
    index.remove("r0")
    assert (index.match(held), index.num_rough) == ({}, 0)
    assert index.num_bytes < 5_000


def test_a_hole_in_the_events_of_a_rough_replica_is_noticed() -> None:
    index = PrefixIndex(400_000)
    engine = Engine(index, "r0")
    engine.store([key(number) for number in range(10_000)])
    engine.settle()
    engine.log.keys.remove(key(0), Tier.DEVICE)  # There is no event for it.
    engine.publish(CacheDelta(()))
    assert engine.follower.need is Need.SNAPSHOT
    assert engine.follower.counts.mismatches == 1
    engine.settle()
    assert index.num_rough == 1
    assert index.match([key(1)]) == {"r0": 1}


def test_a_lower_cap_is_reached_over_the_next_changes() -> None:
    index = PrefixIndex()
    engines = [Engine(index, f"r{number}") for number in range(20)]
    for number, engine in enumerate(engines):
        engine.store([key(number, at) for at in range(1000)])
    assert index.num_rough == 0
    index.limit(600_000)
    engines[0].store([key("more", at) for at in range(2000)])
    assert index.num_bytes <= 600_000
    for number, engine in enumerate(engines):
        assert index.match([key(number, at) for at in range(1000)])[engine.name] == 1000


@pytest.mark.parametrize("max_bytes", [0, 20_000])
def test_memory_that_is_hopeless_still_denies_nothing(max_bytes: int) -> None:
    index = PrefixIndex(max_bytes)
    engine = Engine(index, "r0")
    held = [key(number) for number in range(3_000)]
    engine.store(held)
    engine.settle()
    assert index.match(held) == {"r0": 3000}
    assert index.num_bytes < 25_000
    index.check_integrity()
