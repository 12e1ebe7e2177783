"""The index says of each replica what its own key set says, and remembers nothing else."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache.events import BlockKey, KeySet, Stored, Tier
from cache.keys import key_root
from cluster.routing.index import PrefixIndex
from cluster.routing.view import IndexView
from engine.stream import StreamFollower, StreamLog, to_delta
from engine.wire import BlocksRemoved, CacheDelta
from tests.cluster.routing.rig import chain, key

KEYS = [key(number) for number in range(10)]
REPLICAS = st.sampled_from([f"r{number}" for number in range(12)])
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])


def naive_match(held: dict[str, set[BlockKey]], keys: list[BlockKey]) -> dict[str, int]:
    found = {}
    for name, own in held.items():
        depth = next((at for at, item in enumerate(keys) if item not in own), len(keys))
        if depth:
            found[name] = depth
    return found


class IndexMachine(RuleBasedStateMachine):
    """An index, and for each replica a plain set of (key, tier)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[tuple[BlockKey, Tier]]] = {}
        self.left: list[IndexView] = []

    @rule(replica=REPLICAS, item=st.sampled_from(KEYS), tier=TIERS)
    def add(self, replica: str, item: BlockKey, tier: Tier) -> None:
        held = self.model.setdefault(replica, set())
        assert self.index.view(replica).add(item, tier) == ((item, tier) not in held)
        held.add((item, tier))

    @rule(replica=REPLICAS, item=st.sampled_from(KEYS), tier=TIERS)
    def drop(self, replica: str, item: BlockKey, tier: Tier) -> None:
        held = self.model.setdefault(replica, set())
        assert self.index.view(replica).remove(item, tier) == ((item, tier) in held)
        held.discard((item, tier))

    @rule(replica=REPLICAS)
    def clear(self, replica: str) -> None:
        self.index.view(replica).clear()
        self.model[replica] = set()

    @rule(replica=REPLICAS)
    def leave(self, replica: str) -> None:
        if replica in self.model:
            self.left.append(self.index.view(replica))
            del self.model[replica]
        self.index.remove(replica)

    @rule(item=st.sampled_from(KEYS))
    def a_late_event_of_one_that_left(self, item: BlockKey) -> None:
        for view in self.left:
            view.add(item, Tier.DEVICE)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=10, unique=True))
    def match(self, keys: list[BlockKey]) -> None:
        held = {name: {item for item, _ in pairs} for name, pairs in self.model.items()}
        assert self.index.match(keys) == naive_match(held, keys)

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len({item for held in self.model.values() for item, _ in held})
        for name, held in self.model.items():
            plain = KeySet()
            for item, tier in held:
                plain.add(item, tier)
            view = self.index.view(name)
            assert (view.digest, set(view), len(view)) == (plain.digest, held, len(held))


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_many_replicas_of_ragged_depths_match_as_their_sets_do() -> None:
    rng = random.Random(5)
    index, keys = PrefixIndex(), chain("a", 40)
    held: dict[str, set[BlockKey]] = {}
    for number in range(300):
        name = f"r{number}"
        held[name] = {item for item in keys if rng.random() < 0.97}
        for item in held[name]:
            index.view(name).add(item, Tier.DEVICE)
    assert index.match(keys) == naive_match(held, keys)
    for number in range(0, 300, 3):
        index.remove(f"r{number}")
        del held[f"r{number}"]
    assert index.match(keys) == naive_match(held, keys)


def test_slots_are_used_again_so_masks_stay_narrow() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.view(f"r{number}").add(key("k"), Tier.DEVICE)
        assert index.slot(f"r{number}") == 0
        index.remove(f"r{number}")
    assert len(index) == 0


def test_the_index_follows_an_engines_stream_through_loss_and_restart() -> None:
    root = key_root(bytes(32), "model", "", 16)
    keys = root.keys(list(range(500)))
    index = PrefixIndex()
    log = StreamLog(incarnation=1, replay_frames=100)
    follower = StreamFollower(1, keys=index.view("r0"))
    parents = [root.root, *keys]
    log.append(to_delta([Stored(item, parents[at]) for at, item in enumerate(keys[:20])]))
    for chunk in log.snapshot(chunk_keys=7):
        follower.on_snapshot(chunk)
    assert follower.in_sync
    assert index.match(keys) == {"r0": 20}

    lost = log.append(to_delta([Stored(keys[20], keys[19])]))
    follower.on_frame(log.append(to_delta([Stored(keys[21], keys[20])])))
    assert not follower.in_sync
    assert index.match(keys) == {"r0": 20}
    follower.on_replay(log.since(lost.sequence) or ())
    assert index.match(keys) == {"r0": 22}

    follower.on_frame(log.append(CacheDelta((BlocksRemoved((keys[10],)),))))
    assert follower.in_sync
    assert index.match(keys) == {"r0": 10}, "what lies beyond a hole does not count"

    index.remove("r0")
    assert (index.match(keys), len(index)) == ({}, 0)
    follower.on_frame(log.append(to_delta([Stored(keys[10], keys[9])])))
    assert len(index) == 0
    assert StreamFollower(2, keys=index.view("r0")).keys is index.view("r0")
