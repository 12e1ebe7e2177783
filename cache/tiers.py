"""The tiers below the device: host memory, and a folder on disk.

Invariants:
- The host tier is a `PrefixCache` whose blocks are *slots* of host memory: closed under prefixes,
  and evicted by the same rules. A request has a table in each tier.
- Blocks are saved when they are published, not when they are given up: so eviction costs what it
  did, and whatever ends the engine, most of the cache has left it already.
- A copy between device and host is part of a plan. What is saved is copied before all else in the
  first plan after its publication, so until then nothing can have taken its block; slots are held
  until the plan is committed, or their read from disk or write to it has ended. They get their keys
  then.
- A disk is asked only for what its filter does not deny, and nothing waits for it but the request
  that wants its blocks.

This decides only: what moves the bytes is an executor, and whoever takes the `DiskJob`s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.events import BlockKey
from cache.prefix import PrefixCache, RequestBlocks

_BLOCKS_PER_READ = 8
"""Reads go to several threads, each with a run of blocks."""


@dataclass(slots=True, eq=False)
class Promotion:
    """Blocks of a chain on their way from disk into host memory."""

    table: RequestBlocks
    root: BlockKey
    first: int
    """Blocks before them that the host tier has."""
    found: list[bool]
    num_open: int = 0
    """Jobs that have not ended."""
    is_over: bool = False
    """Nobody waits for it any more: it has ended, or took too long."""


@dataclass(slots=True, eq=False)
class DiskJob:
    """Blocks to read into, or to write from, slots of host memory."""

    items: list[tuple[BlockKey, int]]
    """Key and slot."""
    promotion: Promotion | None = None
    """Of a read."""
    position: int = 0
    """Of a read: place of its first block among those of the promotion."""
    table: RequestBlocks | None = None
    """Of a write: holds the slots."""

    @property
    def is_read(self) -> bool:
        return self.promotion is not None


@dataclass(slots=True, eq=False)
class _Save:
    """A request's new blocks, from their publication until their copies are committed."""

    slots: RequestBlocks
    root: BlockKey
    first: int
    """Place of the first of them in the chain."""
    block_ids: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass(slots=True)
class TierCounts:
    """Blocks, since the engine started."""

    saved: int = 0
    unsaved: int = 0
    """Not copied to the host, because requests held all of it."""
    loaded: int = 0
    promoted: int = 0
    """From disk to the host."""
    missed: int = 0
    """Promised by the disk's filter, and not there."""
    unwritten: int = 0
    """Not written to disk, because it did not keep up."""


class DiskKeys(Protocol):
    """Which keys may be on disk."""

    def __contains__(self, key: BlockKey, /) -> bool:
        """Yes too often, never no; at once, without I/O."""
        ...


class LowerTiers:
    """Host memory, and perhaps a disk."""

    def __init__(self, host: PrefixCache, disk: DiskKeys | None = None) -> None:
        self.host = host
        self.counts = TierCounts()
        self._disk = disk
        self._unsaved: dict[int, _Save] = {}
        """By the identity of their slots' table."""
        self._drafted: list[_Save] = []
        self._in_flight: dict[int, list[_Save]] = {}
        self._promotions: dict[BlockKey, Promotion] = {}
        """By the first key of each."""
        self._jobs: list[DiskJob] = []
        self._writes: set[DiskJob] = set()
        """All that have not ended; those in `_jobs` too."""
        self._num_writing = 0
        self._max_writing = max(1, host.pool.num_blocks // 2)

    # ------------------------------------------------------------ device and host

    def published(self, table: RequestBlocks, slots: RequestBlocks, root: BlockKey) -> None:
        """`table`, of the device, has published blocks: what of them `slots`, the same request's,
        lacks is saved by the next plan. Both may be released at any time."""
        first, end = len(slots.block_ids), table.num_published
        if first >= end:
            return
        if id(slots) not in self._unsaved:
            self.host.enter_plan(slots)
        self._unsaved[id(slots)] = _Save(slots, root, first, table.block_ids[first:end])

    def plan_saves(self) -> list[tuple[int, int]]:
        """Copies to make before anything else of the next plan: (block, slot). To be called for
        each plan, when all else of it is decided; `seal` it."""
        pairs: list[tuple[int, int]] = []
        for save in self._unsaved.values():
            room = self.host.num_available
            self.counts.unsaved += max(0, len(save.block_ids) - room)
            del save.block_ids[room:]
            if not save.block_ids:
                self.host.leave_plan(save.slots)
                continue
            fresh = self.host.grow(save.slots, save.end)
            assert fresh is not None
            pairs += zip(save.block_ids, fresh, strict=True)
            self._drafted.append(save)
        self._unsaved.clear()
        return pairs

    def seal(self, step: int) -> None:
        """The saves planned since the last call belong to this step."""
        if self._drafted:
            self._in_flight[step], self._drafted = self._drafted, []

    def commit(self, step: int) -> None:
        """The copies of `step` are made: the host has the blocks, and the disk gets them."""
        for save in self._in_flight.pop(step, ()):
            self.host.publish(save.slots, save.root, save.end)
            self.counts.saved += len(save.block_ids)
            if self._disk is not None:
                self._write(save)
            self.host.leave_plan(save.slots)

    # ------------------------------------------------------------ host and disk

    def promote(
        self, keys: list[BlockKey], root: BlockKey, known: int, limit: int
    ) -> Promotion | None:
        """Starts to bring what the disk has of the first `limit` keys into host memory; None where
        that has no more of them than the `known` ones on the device. Another request's promotion
        of the same blocks serves both."""
        if self._disk is None:
            return None
        first = end = self.host.match(keys, limit)
        if first < limit and (underway := self._promotions.get(keys[first])) is not None:
            return underway
        while end < limit and keys[end] in self._disk:
            end += 1
        if end <= max(first, known):
            return None
        slots = self.host.start(keys, first)
        end = min(end, first + self.host.num_available)
        fresh = self.host.grow(slots, end)
        if not fresh:
            self.host.release(slots)
            return None
        promotion = Promotion(slots, root, first, [False] * len(fresh))
        self._promotions[keys[first]] = promotion
        for position in range(0, len(fresh), _BLOCKS_PER_READ):
            part = slice(position, position + _BLOCKS_PER_READ)
            items = list(zip(keys[first:end][part], fresh[part], strict=True))
            self._jobs.append(DiskJob(items, promotion=promotion, position=position))
            promotion.num_open += 1
        return promotion

    def take_jobs(self) -> list[DiskJob]:
        """What to read and write now. Each must come back by `finish`, in any order."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def finish(self, job: DiskJob, done: Sequence[bool]) -> None:
        """A job has ended; `done` says of each of its items whether it was."""
        if job.promotion is not None:
            promotion = job.promotion
            promotion.found[job.position : job.position + len(done)] = done
            promotion.num_open -= 1
            if not promotion.num_open:
                self._end_promotion(promotion)
            return
        assert job.table is not None
        self._writes.remove(job)
        self._num_writing -= len(job.items)
        self.host.leave_plan(job.table)

    def _end_promotion(self, promotion: Promotion) -> None:
        promotion.is_over = True
        num_found = [*promotion.found, False].index(False)
        self.counts.promoted += num_found
        self.counts.missed += len(promotion.found) - num_found
        slots = promotion.table
        del self._promotions[slots.keys[promotion.first]]
        self.host.publish(slots, promotion.root, promotion.first + num_found)
        self.host.release(slots)

    def _write(self, save: _Save) -> None:
        room = self._max_writing - self._num_writing
        end = min(save.end, save.first + room)
        self.counts.unwritten += save.end - end
        if end == save.first:
            return
        slots = save.slots
        part = slice(save.first, end)
        job = DiskJob(list(zip(slots.keys[part], slots.block_ids[part], strict=True)), table=slots)
        self.host.enter_plan(slots)
        self._num_writing += len(job.items)
        self._jobs.append(job)
        self._writes.add(job)

    # ------------------------------------------------------------ checking

    def tables(self) -> Iterator[RequestBlocks]:
        """Tables of the host tier that are held here; one may come repeatedly."""
        for saves in (self._unsaved.values(), *self._in_flight.values()):
            for save in saves:
                yield save.slots
        for promotion in self._promotions.values():
            yield promotion.table
        for job in self._writes:
            assert job.table is not None
            yield job.table

    def check_integrity(self) -> None:
        """Raises `AssertionError` if an invariant of this file is broken."""
        self.host.check_integrity()
        assert not self._drafted, "a plan was not sealed"
        assert self._num_writing == sum(len(job.items) for job in self._writes)
        for key, promotion in self._promotions.items():
            assert promotion.num_open > 0, "a promotion never ends"
            assert promotion.table.keys[promotion.first] == key
