"""The other ranks of a tensor-parallel engine, as rank 0 sees them.

Invariant: all workers live, or the group is lost. Whoever waits for one of them is told as soon as
any has failed or ended; `watch` tells who does not wait. After `stop` no worker is left.
"""

import logging
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import zmq

from configs.engine import EngineConfig
from engine.errors import RankLost
from engine.executors.messages import (
    Failed,
    FromWorker,
    ToWorker,
    decode_from_worker,
    encode,
    socket_address,
)
from engine.worker_launcher import Worker, WorkerLauncher

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5
"""How long one that has ended may have told why."""
_GRACE_S = 3.0
"""How long an engine that has lost a worker may take to end in order."""

_M = TypeVar("_M", bound=FromWorker)


@dataclass(frozen=True, slots=True)
class _Member:
    worker: Worker
    socket: "zmq.Socket[bytes]"

    @property
    def name(self) -> str:
        return f"rank {self.worker.rank}"


class WorkerGroup:
    """Ranks 1 to n - 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """For sockets and for whatever else ranks share; only this user may enter it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._members: list[_Member] = []
        self._poller = zmq.Poller()
        self._in_use = threading.RLock()
        self._stopped = threading.Event()
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watcher: threading.Thread | None = None

    @classmethod
    def start(cls, config: EngineConfig, launcher: WorkerLauncher) -> Self:
        """Starts all workers of `config`; waits for none."""
        group = cls(Path(tempfile.mkdtemp(prefix="shoal-ranks-")))
        try:
            for rank in range(1, config.tensor_parallel_size):
                group._add(rank, config, launcher)
        except BaseException:
            group.stop()
            raise
        return group

    def _add(self, rank: int, config: EngineConfig, launcher: WorkerLauncher) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.bind(socket_address(self.folder, rank))
        worker = launcher.start(rank, config, self.folder)
        self._members.append(_Member(worker, socket))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(worker.fileno(), zmq.POLLIN)

    def send(self, message: ToWorker) -> None:
        """To all of them. Raises `RankLost`."""
        frame = encode(message)
        with self._in_use:
            for member in self._members:
                try:
                    member.socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    # A step at a time is sent, so this is no full queue: nobody is connected.
                    raise self.reason() or RankLost(f"{member.name} is gone") from None

    def receive(self, kind: type[_M]) -> list[_M]:
        """The next message of each, in the order of ranks. Raises `RankLost`."""
        found: dict[int, _M] = {}
        with self._in_use:
            while len(found) < len(self._members):
                ready = {source for source, _ in self._poller.poll()}
                for member in self._members:
                    if member.socket in ready:
                        found[member.worker.rank] = _expect(member, kind)
                    elif member.worker.fileno() in ready:
                        raise _ended(member)
        return [found[member.worker.rank] for member in self._members]

    def reason(self) -> RankLost | None:
        """Why the group is lost, if it is; waits a moment, so that it may be called on the first
        sign."""
        end_s = time.monotonic() + _LAST_WORDS_S
        with self._in_use:
            while time.monotonic() < end_s:
                for member in self._members:
                    if (member.worker.exit_code() or 0) < 0:
                        return RankLost(_how_ended(member))
                for member in self._members:
                    if member.socket.poll(0):
                        message = decode_from_worker(member.socket.recv())
                        if isinstance(message, Failed):
                            return _lost(member, message)
                time.sleep(0.01)
        return None

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        """Calls `on_lost`, from a thread of its own, once a worker has ended. If nobody has called
        `stop` a few seconds later, it ends this process: a step may wait for ever for a rank."""
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Ends all workers. May be called from any thread, and more than once."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        os.eventfd_write(self._stop_fd, 1)
        if self._watcher is not None:
            self._watcher.join()
        for member in self._members:
            member.worker.stop()
        # Who waits for a worker has just been told that it ended.
        with self._in_use:
            self._context.destroy(linger=0)
        os.close(self._stop_fd)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self, on_lost: Callable[[RankLost], None]) -> None:
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        members = {member.worker.fileno(): member for member in self._members}
        for fd in members:
            poll.register(fd, select.POLLIN)
        ended = [members[fd] for fd, _ in poll.poll() if fd in members]
        if self._stopped.is_set():
            return
        lost = RankLost(_how_ended(ended[0]))
        logger.error("%s: the engine ends", lost)
        on_lost(lost)
        if not self._stopped.wait(_GRACE_S):
            logger.critical("the engine has not ended in %g s: ending its process", _GRACE_S)
            os._exit(1)


def _expect(member: _Member, kind: type[_M]) -> _M:
    message = decode_from_worker(member.socket.recv())
    if not isinstance(message, kind):
        raise _lost(member, message)
    return message


def _ended(member: _Member) -> RankLost:
    """Its last words, or how it ended."""
    was_killed = (member.worker.exit_code() or 0) < 0
    if not was_killed and member.socket.poll(round(_LAST_WORDS_S * 1000)):
        return _lost(member, decode_from_worker(member.socket.recv()))
    return RankLost(_how_ended(member))


def _lost(member: _Member, message: FromWorker) -> RankLost:
    if isinstance(message, Failed):
        return RankLost(f"{member.name}: {message.reason}")
    return RankLost(f"{member.name} sent {type(message).__name__}, which was not its turn")


def _how_ended(member: _Member) -> str:
    return f"{member.name}: its process ended with code {member.worker.exit_code()}"
