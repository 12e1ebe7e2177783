"""Ranks as threads of one process: real collectives and real models, without the processes."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.collectives import TorchCollectives
from engine.models.sharding import Shard

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
