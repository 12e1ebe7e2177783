"""Starts the other ranks of a tensor-parallel engine.

Invariant: a worker never outlives the process that started it. It holds the other end of a pipe
that the kernel closes when this process ends, however it ends, and then ends itself. Imports no
torch.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from configs.engine import EngineConfig


class Worker(Protocol):
    """The process of one rank."""

    rank: int

    def fileno(self) -> int:
        """Readable once the process has ended."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs; of a signal its number, negative."""
        ...

    def stop(self) -> None:
        """Ends it at once: it holds nothing that is worth an end in order."""
        ...


class WorkerLauncher(Protocol):
    """How workers come about."""

    def start(self, rank: int, config: EngineConfig, folder: Path) -> Worker:
        """Starts a rank, which finds rank 0 by a socket in `folder`; returns at once."""
        ...


class LocalWorkerLauncher:
    """Processes on this machine, which see the devices that this one sees."""

    def start(self, rank: int, config: EngineConfig, folder: Path) -> "LocalWorker":
        return LocalWorker(rank, config, folder)


class LocalWorker:
    """`python -m engine.worker`."""

    def __init__(self, rank: int, config: EngineConfig, folder: Path) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.worker", str(rank), str(folder)],
            stdin=subprocess.PIPE,
            # An engine speaks to its own parent on it.
            stdout=subprocess.DEVNULL,
            text=True,
            # Ctrl-C in the terminal is not for it.
            process_group=0,
        )
        self._exit_fd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(config.model_dump_json() + "\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._exit_fd

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._exit_fd >= 0:
            os.close(self._exit_fd)
            self._exit_fd = -1
