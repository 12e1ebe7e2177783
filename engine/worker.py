"""`python -m engine.worker RANK FOLDER`: one of the other ranks of a tensor-parallel engine.

Invariant: it executes what rank 0 sends, in order, answers each plan once, and ends when its stdin
closes (rank 0 has ended), or with the first thing that goes wrong, which it tells rank 0. It holds
nothing that would be worth an end in order. The configuration comes as one line on stdin.
"""

import gc
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Self

import zmq

from configs.engine import EngineConfig
from engine.executors.messages import (
    Connect,
    Done,
    Execute,
    Failed,
    FromWorker,
    Loaded,
    Ready,
    ToWorker,
    decode_to_worker,
    drawn_digest,
    encode,
    socket_address,
)

logger = logging.getLogger(__name__)

_LINGER_MS = 1000


class _Link:
    """To rank 0."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.connect(socket_address(folder, rank))

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def receive(self) -> ToWorker:
        return decode_to_worker(self._socket.recv())

    def meet(self) -> None:
        """Until all ranks have their weights."""
        self.send(Loaded())
        message = self.receive()
        assert isinstance(message, Connect)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=_LINGER_MS)


def main() -> int:
    """Runs one rank."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s",
    )
    config = EngineConfig.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_watch_parent, args=(folder,), daemon=True).start()
    with _Link(rank, folder) as link:
        try:
            _serve(rank, config, folder, link)
        except Exception as error:
            logger.exception("this rank cannot go on")
            link.send(Failed(str(error) or type(error).__name__))
    return 1


def _serve(rank: int, config: EngineConfig, folder: Path, link: _Link) -> None:
    # Only now: torch takes seconds, in which rank 0 may end already.
    from engine.collectives import TorchCollectives
    from engine.executors.model import ModelExecutor
    from engine.models.sharding import Shard

    collectives = TorchCollectives(Shard(rank, config.tensor_parallel_size), folder, link.meet)
    executor = ModelExecutor.load(config, collectives=collectives)
    info = executor.info
    gc.collect()
    gc.freeze()
    link.send(Ready(info.num_blocks, info.num_slots))
    while True:
        message = link.receive()
        assert isinstance(message, Execute)
        result = executor.execute(message.plan)
        link.send(Done(result.step, drawn_digest(result)))


def _watch_parent(folder: Path) -> None:
    """Blocks until rank 0's end of stdin closes; then ends this process, whatever it does."""
    while sys.stdin.read(4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
