"""Starts an EngineCore in a process of its own on this machine.

Invariant: the engine never outlives the process that started it. It holds the other end of a pipe
that the kernel closes when this process ends, however it ends, and then ends itself. (A
parent-death signal would not do: it fires when the starting thread ends.) Imports no torch.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Self

from configs.engine import EngineConfig
from engine.errors import ShoalError


class EngineStartError(ShoalError):
    """The engine process ended before it was ready; the text is its own reason."""


class LocalEngine:
    """One engine process. Use as a context manager, or call `stop`."""

    def __init__(self, process: "subprocess.Popen[str]", endpoint: str) -> None:
        self._process = process
        self.endpoint = endpoint

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        on_phase: Callable[[str], None] = lambda phase: None,
        stderr: IO[str] | int | None = None,
    ) -> Self:
        """Returns once the engine listens. `on_phase` is told of each phase as it begins.

        Raises `EngineStartError` with the engine's own reason."""
        process = subprocess.Popen(
            [sys.executable, "-m", "engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # Ctrl-C in the terminal is the parent's to handle: it stops the engine in order.
            process_group=0,
        )
        try:
            return cls(process, _await_ready(process, config, on_phase))
        except BaseException:
            _stop(process, timeout_s=0)
            raise

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Asks the engine to end, and kills it if it has not after `timeout_s`."""
        _stop(self._process, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _await_ready(
    process: "subprocess.Popen[str]", config: EngineConfig, on_phase: Callable[[str], None]
) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(config.model_dump_json() + "\n")
        process.stdin.flush()
    for line in process.stdout:
        event = json.loads(line)
        if "phase" in event:
            on_phase(event["phase"])
        elif "error" in event:
            raise EngineStartError(event["error"])
        elif "endpoint" in event:
            return str(event["endpoint"])
    code = process.wait()
    raise EngineStartError(f"the engine process ended with code {code} before it was ready")


def _stop(process: "subprocess.Popen[str]", timeout_s: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM if timeout_s else signal.SIGKILL)
        try:
            process.wait(timeout_s or None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
