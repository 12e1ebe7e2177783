"""One EngineCore as a Ray actor: a process of its own that Ray places, watches and ends.

Invariant: Ray carries only questions about the engine (is it ready, how is it, stop); every token
goes over the engine's own sockets. The core runs in a thread of its own, so that this actor answers
while it loads and while it runs; when the core ends, for whatever reason, `wait` returns or raises.
"""

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.engine import EngineConfig, TransportConfig
from engine.errors import ShoalError

if TYPE_CHECKING:
    from engine.core import EngineCore


class EngineFailed(ShoalError):
    """The engine could not start, or ended by an error; the text is its own reason."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Where an engine stands."""

    pid: int
    phases: tuple[tuple[str, float], ...]
    """Name of each phase of its start, and when it began on the clock of `now_s`."""
    now_s: float
    is_ready: bool
    """Whether it listens."""
    error: str | None
    """Set when it has failed."""


class EngineActor:
    """Placed by its supervisor. Its methods are asynchronous: none waits for a step.

    The process takes no restart: what runs on it is lost with it, and its supervisor decides what
    comes next."""

    def __init__(self, config_json: str, socket_folder: str) -> None:
        """The sockets are made in `socket_folder`, which only this user may enter: on one node
        nothing listens on the network."""
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        config = EngineConfig.model_validate_json(config_json)
        folder = Path(socket_folder)
        # Ray has set this from `num_cpus`, which is a share for placement and no count of cores;
        # torch reads it when it is imported, which is later.
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        transport = TransportConfig.model_validate(
            config.transport.model_dump()
            | {"listen": endpoint_in(folder), "listen_stream": f"ipc://{folder}/stream"}
        )
        self._config = config.model_copy(update={"transport": transport})
        self._phases: list[tuple[str, float]] = []
        self._core: EngineCore | None = None
        self._error: str | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def progress(self) -> EngineProgress:
        return EngineProgress(
            pid=os.getpid(),
            phases=tuple(self._phases),
            now_s=time.monotonic(),
            is_ready=self._core is not None,
            error=self._error,
        )

    async def stats(self) -> dict[str, Any]:
        """The core's own figures; empty before it is ready."""
        return dict(self._core.stats()) if self._core is not None else {}

    async def stop(self) -> None:
        """Ends the core in order; `wait` returns when it has ended."""
        if self._core is not None:
            self._core.stop()

    async def wait(self) -> None:
        """Until the core has ended. Raises `EngineFailed` if an error ended it."""
        await asyncio.to_thread(self._ended.wait)
        if self._error is not None:
            raise EngineFailed(self._error)

    def _run(self) -> None:
        from engine.process import build_core

        try:
            self._core = build_core(self._config, self._note_phase)
            self._core.run()
        except ShoalError as error:
            self._error = str(error)
        except Exception as error:
            logging.getLogger(__name__).exception("the engine failed")
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _note_phase(self, phase: str) -> None:
        self._phases.append((phase, time.monotonic()))


def endpoint_in(socket_folder: Path) -> str:
    """Where the engine of this folder takes requests, known before it listens."""
    return f"ipc://{socket_folder}/requests"
