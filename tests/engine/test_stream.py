"""The event stream: whatever is lost, a follower that says it is in sync has the truth."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.events import KeySet, Removed, Stored, Tier
from engine.stream import Need, StreamCounts, StreamFollower, StreamLog, to_delta
from engine.wire import BlocksRemoved, BlocksStored, SnapshotChunk, StreamFrame


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def test_a_chain_stored_block_by_block_is_one_message() -> None:
    events = [
        Stored(key(1), key(0)),
        Stored(key(2), key(1)),
        Stored(key(9), key(8)),
        Removed(key(2)),
        Removed(key(1)),
    ]
    assert to_delta(events).events == (
        BlocksStored(key(0), (key(1), key(2))),
        BlocksStored(key(8), (key(9),)),
        BlocksRemoved((key(2), key(1))),
    )


def test_the_digest_is_that_of_the_set_not_of_its_history() -> None:
    one, two = KeySet(), KeySet()
    for number in (1, 2, 3):
        one.add(key(number), Tier.DEVICE)
    for number in (3, 7, 1, 2):
        two.add(key(number), Tier.DEVICE)
    assert one.digest != two.digest
    two.remove(key(7), Tier.DEVICE)
    assert one.digest == two.digest
    two.remove(key(3), Tier.DEVICE)
    two.add(key(3), Tier.HOST)
    assert one.digest != two.digest


class StreamMachine(RuleBasedStateMachine):
    """A publisher, a follower and a bad line between them: frames and repairs are lost and late."""

    def __init__(self) -> None:
        super().__init__()
        self.log = StreamLog(incarnation=7, replay_frames=6)
        self.follower = StreamFollower(7)
        self.history: dict[int, set[bytes]] = {0: set()}
        self.keys: set[bytes] = set()
        self.chunks: list[SnapshotChunk] = []
        self.replay: tuple[StreamFrame, ...] = ()

    @rule(numbers=st.lists(st.integers(1, 12), max_size=5), lost=st.booleans())
    def publish(self, numbers: list[int], lost: bool) -> None:
        events: list[Stored | Removed] = []
        for number in numbers:
            known = key(number) in self.keys
            events.append(Removed(key(number)) if known else Stored(key(number), key(0)))
            self.keys ^= {key(number)}
        frame = self.log.append(to_delta(events))
        self.history[frame.sequence] = set(self.keys)
        if not lost:
            self.follower.on_frame(frame)

    @precondition(lambda self: self.follower.need is Need.SNAPSHOT)
    @rule(chunk_keys=st.integers(1, 5))
    def ask_for_a_snapshot(self, chunk_keys: int) -> None:
        self.chunks = list(self.log.snapshot(chunk_keys))

    @precondition(lambda self: self.chunks)
    @rule(lost=st.integers(0, 5))
    def deliver_a_chunk(self, lost: int) -> None:
        chunk = self.chunks.pop(0)
        if lost:
            self.follower.on_snapshot(chunk)

    @precondition(lambda self: self.follower.need is Need.REPLAY)
    @rule()
    def ask_for_a_replay(self) -> None:
        frames = self.log.since(self.follower.sequence + 1)
        if frames is None:
            self.chunks = list(self.log.snapshot(2))
        else:
            self.replay = frames

    @rule()
    def deliver_the_replay(self) -> None:
        self.follower.on_replay(self.replay)

    @invariant()
    def in_sync_means_the_truth(self) -> None:
        if self.follower.in_sync:
            found = {item for item, _ in self.follower.keys}
            assert found == self.history[self.follower.sequence]

    def teardown(self) -> None:
        """However bad the line was: once it is good, one repair of each kind is enough."""
        self.follower.on_frame(self.log.append(to_delta([])))
        for _ in range(2):
            if self.follower.need is Need.SNAPSHOT:
                for chunk in self.log.snapshot(3):
                    self.follower.on_snapshot(chunk)
            elif self.follower.need is Need.REPLAY:
                frames = self.log.since(self.follower.sequence + 1)
                if frames is not None:
                    self.follower.on_replay(frames)
                else:
                    for chunk in self.log.snapshot(3):
                        self.follower.on_snapshot(chunk)
        assert self.follower.in_sync
        assert self.follower.sequence == self.log.sequence
        assert {item for item, _ in self.follower.keys} == self.keys


StreamMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStreamMachine = StreamMachine.TestCase


def test_a_follower_counts_what_it_has_been_through() -> None:
    log, counts = StreamLog(incarnation=7, replay_frames=6), StreamCounts()
    follower = StreamFollower(7, counts=counts)

    def load() -> None:
        for chunk in log.snapshot(2):
            follower.on_snapshot(chunk)

    load()
    assert (counts.snapshots, counts.gaps) == (1, 0)
    log.append(to_delta([Stored(key(1), key(0))]))
    for number in (2, 3):
        follower.on_frame(log.append(to_delta([Stored(key(number), key(0))])))
    follower.on_replay(log.since(follower.sequence + 1) or ())
    assert (counts.gaps, counts.replays, follower.in_sync) == (1, 1, True)
    log.keys.add(key(9), Tier.DEVICE)
    follower.on_frame(log.append(to_delta([])))
    assert (counts.mismatches, follower.need) == (1, Need.SNAPSHOT)
    load()
    follower.keys.wants_snapshot = True
    follower.on_frame(log.append(to_delta([])))
    assert (counts.refreshes, follower.need) == (1, Need.SNAPSHOT)
    assert counts == StreamCounts(gaps=1, replays=1, snapshots=2, mismatches=1, refreshes=1)
    assert StreamFollower(8, counts=counts).counts is counts


def test_a_replay_that_comes_while_a_snapshot_is_loaded_changes_nothing() -> None:
    log, follower = StreamLog(incarnation=7, replay_frames=6), StreamFollower(7)
    for chunk in log.snapshot(2):
        follower.on_snapshot(chunk)
    log.append(to_delta([Stored(key(number), key(0)) for number in range(1, 7)]))
    follower.on_frame(log.append(to_delta([Removed(key(1))])))
    frames = log.since(follower.sequence + 1) or ()
    first, *rest = log.snapshot(2)
    follower.on_snapshot(first)
    follower.on_replay(frames)
    assert not follower.in_sync
    for chunk in rest:
        follower.on_snapshot(chunk)
    assert follower.in_sync
    assert {item for item, _ in follower.keys} == {key(number) for number in range(2, 7)}
