"""A server in a process group of its own, on a port of this machine.

Invariant: it answers once `running` is entered, and its whole group is gone when that is left,
however that is.
"""

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.session import until
from bench.peers.setup import PeerMissing


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one."""

    command: Sequence[str]
    port: int
    log: Path
    """What it prints; written anew."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""
    health: str = "/health"
    """A path that answers 200 once it is ready."""
    ready_s: float = 120.0
    stop_s: float = 10.0
    """It has as long to end by itself."""
    poll_s: float = 0.01

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Raises `PeerMissing` with its last words where it does not become ready."""
    with server.log.open("w") as log:
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        _await_ready(process, server)
        yield
    finally:
        _stop(process, server.stop_s)


def _await_ready(process: "subprocess.Popen[bytes]", server: Server) -> None:
    deadline_s = time.monotonic() + server.ready_s
    while True:
        if process.poll() is not None:
            words = server.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise PeerMissing("its server ended: " + "".join(words))
        left_s = until(deadline_s)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=left_s)
        try:
            connection.request("GET", server.health)
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(server.poll_s)


def _stop(process: "subprocess.Popen[bytes]", stop_s: float) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
