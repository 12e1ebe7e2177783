"""Ranks for tests: as threads of one process, with real collectives and real models, or as the
processes that they are."""

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from configs.engine import CacheConfig, EngineConfig
from engine.collectives import TorchCollectives
from engine.models.sharding import Shard
from engine.worker_launcher import LocalWorker, LocalWorkerLauncher

_T = TypeVar("_T")
_TIMEOUT_S = 60.0


def on_ranks(count: int, folder: Path, run: Callable[[TorchCollectives], _T]) -> list[_T]:
    """What `run` gives on each rank. Raises the first error, and leaves the other ranks to wait for
    that one."""
    barrier = threading.Barrier(count)
    ended: queue.SimpleQueue[tuple[int, _T | BaseException]] = queue.SimpleQueue()

    def meet() -> None:
        barrier.wait(_TIMEOUT_S)

    def run_rank(rank: int) -> None:
        try:
            ended.put((rank, run(TorchCollectives(Shard(rank, count), folder, meet))))
        except BaseException as error:
            ended.put((rank, error))

    for rank in range(count):
        threading.Thread(target=run_rank, args=(rank,), daemon=True).start()
    found: dict[int, _T] = {}
    while len(found) < count:
        rank, result = ended.get(timeout=_TIMEOUT_S)
        if isinstance(result, BaseException):
            raise result
        found[rank] = result
    return [found[rank] for rank in range(count)]


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        # Matrices this small gain nothing from a second thread.
        "threads": 1,
        "tensor_parallel_size": 2,
        "cache": CacheConfig(num_blocks=256, host_memory_bytes=16 << 20),
    }
    return EngineConfig.model_validate(given | fields)


def children(pid: int) -> list[int]:
    text = "".join((task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for child in text.split()]


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def folder_of(worker: int) -> Path:
    """The folder that its ranks share."""
    return Path(Path(f"/proc/{worker}/cmdline").read_text().split("\0")[-2])


class Launcher(LocalWorkerLauncher):
    """Starts a worker with another configuration, or kills it at once."""

    def __init__(self, kill: bool = False, **changes: Any) -> None:
        self.kill = kill
        self.changes = changes
        self.worker: LocalWorker

    def start(self, rank: int, config: EngineConfig, folder: Path) -> LocalWorker:
        self.worker = super().start(rank, config.model_copy(update=self.changes), folder)
        if self.kill:
            os.kill(self.worker.pid, signal.SIGKILL)
        return self.worker
