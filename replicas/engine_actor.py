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

import ray

from configs.engine import EngineConfig, SchedulerConfig, TransportConfig
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
    endpoint: str
    """Where it listens; empty until it does."""
    error: str | None
    """Set when it has failed."""


class EngineActor:
    """Placed by its supervisor. Its methods are asynchronous: none waits for a step.

    The process takes no restart: what runs on it is lost with it, and its supervisor decides what
    comes next."""

    def __init__(self, config_json: str, socket_folder: str | None) -> None:
        """The sockets are made in `socket_folder`, which only this user may enter; without one they
        are bound to this node's address, for which the engine needs a secret."""
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        config = EngineConfig.model_validate_json(config_json)
        # Ray has set this from `num_cpus`, which is a share for placement and no count of cores;
        # torch reads it when it is imported, which is later.
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        transport = TransportConfig.model_validate(
            config.transport.model_dump() | _addresses(socket_folder)
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
            endpoint=self._core.endpoint if self._core is not None else "",
            error=self._error,
        )

    async def stats(self) -> dict[str, Any]:
        """The core's own figures; empty before it is ready."""
        return dict(self._core.stats()) if self._core is not None else {}

    async def configure(self, scheduler_json: str) -> None:
        """Takes over the live settings of the scheduler."""
        scheduler = SchedulerConfig.model_validate_json(scheduler_json)
        self._config = self._config.model_copy(update={"scheduler": scheduler})
        if self._core is not None:
            self._core.configure(scheduler)

    async def drain(self) -> None:
        """Takes nothing new; what runs goes on."""
        if self._core is not None:
            self._core.drain()

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
            core = build_core(self._config, self._note_phase)
            self._core = core
            # What came while it loaded.
            core.configure(self._config.scheduler)
            core.run()
        except ShoalError as error:
            self._error = str(error)
        except Exception as error:
            logging.getLogger(__name__).exception("the engine failed")
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _note_phase(self, phase: str) -> None:
        self._phases.append((phase, time.monotonic()))


def _addresses(socket_folder: str | None) -> dict[str, str]:
    """Where both sockets bind, as fields of `TransportConfig`."""
    if socket_folder is not None:
        folder = Path(socket_folder)
        return {"listen": f"ipc://{folder}/requests", "listen_stream": f"ipc://{folder}/stream"}
    address = f"tcp://{ray.util.get_node_ip_address()}:*"
    return {"listen": address, "listen_stream": address}
