"""Engine processes, and one model of an ingress over them: no HTTP, no Ray.

Invariant: the directory is what `begin`, `say` and `update` make of it, so whoever uses a pool is
its supervisor: nobody else restarts an engine or says that it hangs.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import msgspec

from cluster.identity import IngressIdentity
from cluster.served_model import ServedModel
from cluster.tokenizer import Tokenizer
from configs.engine import EngineConfig
from engine.launcher import LocalEngine
from engine.models.resolve import resolve_model
from replicas.directory import EngineEntry, EngineState, ModelEntry

MODEL = "m"


class Letters:
    """A tokenizer of one letter a token, for engines without a model; prompts are token ids."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in ids)


class Pool:
    """Engines by replica id. Use `opened`."""

    def __init__(self, config: EngineConfig, identity: IngressIdentity | None = None) -> None:
        self.config = config
        self.identity = identity or IngressIdentity.random()
        self.engines: dict[str, LocalEngine] = {}
        self.entries: dict[str, EngineEntry] = {}
        self.killed: set[str] = set()
        self._former: list[LocalEngine] = []
        self.model = ServedModel(ModelEntry(MODEL, config.model), self.identity, self._tokenizer)

    def _tokenizer(self, source: str) -> Tokenizer:
        if self.config.executor == "simulated":
            return cast("Tokenizer", Letters())
        return Tokenizer.load(resolve_model(source))

    async def begin(self, *names: str) -> None:
        """Starts engines, or starts them again, and says so."""
        starts = [asyncio.to_thread(LocalEngine.start, self.config) for _ in names]
        for name, engine in zip(names, await asyncio.gather(*starts), strict=True):
            restarts = 0
            if name in self.engines:
                self._former.append(self.engines[name])
                restarts = self.entries[name].restarts + 1
            self.engines[name] = engine
            self.killed.discard(name)
            self.entries[name] = EngineEntry(
                name,
                MODEL,
                EngineState.READY,
                endpoint=engine.endpoint,
                restarts=restarts,
                pid=engine.pid,
            )
        self.update()

    def say(self, name: str, state: EngineState) -> None:
        self.entries[name] = msgspec.structs.replace(self.entries[name], state=state)
        self.update()

    def update(self) -> None:
        self.model.update(tuple(self.entries.values()), is_complete=True)

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.engines[name].pid, how)
        if how is signal.SIGKILL:
            self.killed.add(name)

    async def num_dead(self) -> int:
        """Engines that have died, those included that are about to."""
        await asyncio.sleep(0.3)
        return sum(not engine.alive() for engine in self.engines.values())

    async def ready(self, count: int) -> None:
        """Until this many engines can be sent to."""
        await self.until(lambda: self.model.is_ready and self.model.num_ready == count)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> float:
        """Seconds until `condition` held. Fails when it does not within `timeout_s`."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() > began_s + timeout_s:
                raise TimeoutError("it never came to that")
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    async def close(self) -> None:
        await self.model.close()
        for engine in (*self.engines.values(), *self._former):
            if engine.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGCONT)
            await asyncio.to_thread(engine.stop, 1.0)


@contextlib.asynccontextmanager
async def opened(pool: Pool, names: Sequence[str]) -> AsyncIterator[None]:
    """Runs the pool with these engines, ready."""
    try:
        pool.model.open()
        await pool.begin(*names)
        await pool.ready(len(names))
        yield
    finally:
        await pool.close()
