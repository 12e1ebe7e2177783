"""The ordered stream of cache events and load reports, from both its ends.

Invariant: a follower that reports itself in sync holds exactly the publisher's key set at its
sequence. Every frame carries the digest of that set; a hole is repaired by replay, a differing
digest or a new incarnation by a snapshot. Neither end does any I/O: the caller carries the frames.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from cache.events import BlockKey, CacheEvent, KeySet, Stored, Tier
from engine.wire import (
    BlocksRemoved,
    BlocksStored,
    CacheDelta,
    LoadReport,
    SnapshotChunk,
    StreamFrame,
)


def to_delta(events: Iterable[CacheEvent]) -> CacheDelta:
    """Packs events in order, joining runs: a chain stored block by block becomes one message."""
    packed: list[BlocksStored | BlocksRemoved] = []
    run: list[CacheEvent] = []

    def close() -> None:
        if not run:
            return
        keys = tuple(event.key for event in run)
        if isinstance(run[0], Stored):
            packed.append(BlocksStored(run[0].parent, keys, run[0].tier))
        else:
            packed.append(BlocksRemoved(keys, run[0].tier))
        run.clear()

    for event in events:
        if run and not _continues(run[-1], event):
            close()
        run.append(event)
    close()
    return CacheDelta(tuple(packed))


def _continues(previous: CacheEvent, event: CacheEvent) -> bool:
    if type(previous) is not type(event) or previous.tier != event.tier:
        return False
    return not isinstance(event, Stored) or event.parent == previous.key


class StreamLog:
    """The publisher's end: numbers frames, keeps the digest and a window for replay."""

    def __init__(self, incarnation: int, replay_frames: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.keys = KeySet()
        self._window: deque[StreamFrame] = deque(maxlen=replay_frames)

    def append(self, body: CacheDelta | LoadReport) -> StreamFrame:
        if isinstance(body, CacheDelta):
            _apply(self.keys, body)
        self.sequence += 1
        frame = StreamFrame(self.incarnation, self.sequence, self.keys.digest, body)
        self._window.append(frame)
        return frame

    def since(self, first: int) -> tuple[StreamFrame, ...] | None:
        """Frames from `first` on, or None when some have left the window."""
        if first > self.sequence:
            return ()
        skip = first - (self.sequence - len(self._window) + 1)
        if skip < 0:
            return None
        return tuple(self._window)[skip:]

    def snapshot(self, chunk_keys: int) -> Iterator[SnapshotChunk]:
        """The key set as it is now, in chunks that may be sent over several steps."""
        entries: list[tuple[BlockKey, Tier]] = list(self.keys)
        sequence, digest = self.sequence, self.keys.digest

        def chunks() -> Iterator[SnapshotChunk]:
            starts = range(0, len(entries), chunk_keys) if entries else range(1)
            for index, start in enumerate(starts):
                part = tuple(entries[start : start + chunk_keys])
                is_last = start + chunk_keys >= len(entries)
                yield SnapshotChunk(self.incarnation, sequence, digest, index, is_last, part)

        return chunks()


class Need(Enum):
    """What a follower asks of its caller."""

    NOTHING = 0
    REPLAY = 1
    SNAPSHOT = 2


@dataclass(slots=True)
class StreamCounts:
    """What a follower has been through. They may outlive it: a restart goes on counting."""

    gaps: int = 0
    """Holes in the numbers."""
    replays: int = 0
    """Holes that frames sent again have closed."""
    snapshots: int = 0
    """Loaded whole."""
    mismatches: int = 0
    """Sets that had another digest than the publisher's."""
    refreshes: int = 0
    """Snapshots asked for because the key set wanted one, with nothing wrong."""


class StreamFollower:
    """The follower's end. Feed it what arrives; send what it needs, again until it arrives.

    While it waits for a repair it keeps the latest `max_pending` frames, and goes on from there.
    `keys` is the set to fill: one that others look into as well, or none for a fresh one. `counts`
    are those to go on with.
    """

    def __init__(
        self,
        incarnation: int,
        max_pending: int = 4096,
        keys: KeySet | None = None,
        counts: StreamCounts | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.load: LoadReport | None = None
        self.keys = keys if keys is not None else KeySet()
        self.counts = counts if counts is not None else StreamCounts()
        self.need = Need.SNAPSHOT
        self._pending: deque[StreamFrame] = deque(maxlen=max_pending)
        self._last_chunk: tuple[int, int] | None = None
        """Sequence and index of the last chunk taken in of a snapshot that is not whole."""

    @property
    def in_sync(self) -> bool:
        return self.need is Need.NOTHING

    def on_frame(self, frame: StreamFrame) -> None:
        """Frames of other incarnations are dropped: a restart makes a new follower."""
        if frame.incarnation != self.incarnation:
            return
        if isinstance(frame.body, LoadReport):
            self.load = frame.body
        if frame.sequence <= self.sequence and self.in_sync:
            return
        self._pending.append(frame)
        if self.in_sync:
            self._advance()
            if self.in_sync and self.keys.wants_snapshot:
                self.counts.refreshes += 1
                self.need = Need.SNAPSHOT

    def on_replay(self, frames: Iterable[StreamFrame]) -> None:
        if self.need is not Need.REPLAY:
            return
        merged = {frame.sequence: frame for frame in (*frames, *self._pending)}
        self._pending.clear()
        self._pending.extend(merged[sequence] for sequence in sorted(merged))
        before = self.sequence
        self._advance()
        self.counts.replays += self.sequence > before

    def on_snapshot(self, chunk: SnapshotChunk) -> None:
        """Taken in whenever a repair is due: it also answers for frames too old to replay. Its keys
        go into the set as they come, so that no more than a chunk of them is kept beside it."""
        if self.in_sync or chunk.incarnation != self.incarnation:
            return
        if chunk.index == 0:
            self.need = Need.SNAPSHOT  # What is replayed now has no set to go to.
            self.keys.begin_load()
        elif self._last_chunk != (chunk.sequence, chunk.index - 1):
            return
        for key, tier in chunk.keys:
            self.keys.add(key, tier)
        self._last_chunk = (chunk.sequence, chunk.index)
        if not chunk.is_last:
            return
        self._last_chunk = None
        self.keys.end_load()
        self.counts.snapshots += 1
        self.sequence = chunk.sequence
        if self.keys.digest == chunk.digest:
            self._advance()
        else:
            self.counts.mismatches += 1

    def _advance(self) -> None:
        """Applies pending frames as far as they are contiguous and leave the right digest."""
        while self._pending:
            frame = self._pending[0]
            if frame.sequence > self.sequence + 1:
                self.counts.gaps += self.need is not Need.REPLAY
                self.need = Need.REPLAY
                return
            self._pending.popleft()
            if frame.sequence <= self.sequence:
                continue
            if isinstance(frame.body, CacheDelta):
                _apply(self.keys, frame.body)
            self.sequence = frame.sequence
            if self.keys.digest != frame.digest:
                self.counts.mismatches += 1
                self.need = Need.SNAPSHOT
                return
        self.need = Need.NOTHING


def _apply(keys: KeySet, delta: CacheDelta) -> None:
    for event in delta.events:
        change = keys.add if isinstance(event, BlocksStored) else keys.remove
        for key in event.keys:
            change(key, event.tier)
