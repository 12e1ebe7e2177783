"""Moves blocks between host memory and a folder on disk, off the engine's threads.

Invariant: every job taken comes back once, with what became of each of its blocks; a slot is
touched between those two moments only.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from cache.disk import DiskFolder
from cache.tiers import DiskJob

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
"""Reads and checksums of large blocks release the GIL."""
_READ_PATIENCE_S = 5.0
"""A disk that is slower than this is slower than computing."""


class DiskIO:
    """Used by the control thread; calls `on_done` from others."""

    def __init__(
        self,
        folder: DiskFolder,
        slot_memory: Callable[[int], memoryview],
        on_done: Callable[[], None],
    ) -> None:
        self.folder = folder
        self._slot_memory = slot_memory
        self._on_done = on_done
        self._ended: queue.SimpleQueue[tuple[DiskJob, list[bool]]] = queue.SimpleQueue()
        # Reads have somebody waiting for them; writes must not be in their way.
        self._readers = ThreadPoolExecutor(_NUM_THREADS, "shoal-disk-read")
        self._writers = ThreadPoolExecutor(1, "shoal-disk-write")
        self._reading: dict[DiskJob, float] = {}
        """Reads that have not ended, and since when."""
        self._is_closing = threading.Event()

    def submit(self, jobs: Iterable[DiskJob], now: float) -> None:
        for job in jobs:
            if job.is_read:
                self._reading[job] = now
            (self._readers if job.is_read else self._writers).submit(self._run, job)

    def ended(self) -> list[tuple[DiskJob, list[bool]]]:
        """Jobs that have ended since the last call, and of each block whether it was moved."""
        found: list[tuple[DiskJob, list[bool]]] = []
        while True:
            try:
                job, done = self._ended.get_nowait()
            except queue.Empty:
                return found
            self._reading.pop(job, None)
            found.append((job, done))

    def give_up(self, now: float) -> None:
        """Lets nobody wait any longer for reads that have taken too long. They still end some day,
        and hold their slots until then."""
        for job, began_s in self._reading.items():
            if now - began_s > _READ_PATIENCE_S and job.promotion is not None:
                job.promotion.is_over = True

    def close(self, timeout_s: float) -> None:
        """Lets writes end for `timeout_s`; gives up the rest, and the folder."""
        last = self._writers.submit(lambda: None)
        wait([last], timeout_s)
        self._is_closing.set()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.folder.close()

    def _run(self, job: DiskJob) -> None:
        move = self.folder.read if job.is_read else self.folder.write
        done = [False] * len(job.items)
        try:
            for number, (key, slot) in enumerate(job.items):
                if not self._is_closing.is_set():
                    done[number] = move(key, self._slot_memory(slot))
        except Exception:
            logger.exception("a block could not be moved")
        self._ended.put((job, done))
        if not self._is_closing.is_set():
            self._on_done()
