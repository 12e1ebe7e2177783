"""Streams that are read to their end, whatever happens under them, with what their client saw."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from bench.pool import Pool
from cluster.preprocess import GenerationRequest
from cluster.served_model import Started
from engine.errors import ShoalError
from engine.wire import TokenLogprobs


@dataclass(eq=False)
class Record:
    """One stream."""

    name: str
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: Exception | None = None
    core_id: str = ""
    """The engine that it is on."""
    is_over: bool = False


@dataclass(eq=False)
class Fault:
    """A core that was killed or stopped, and the streams that ran on it."""

    name: str
    core_id: str
    how: signal.Signals
    at_s: float
    hit: set[Record]
    recovery_s: list[float] = field(default_factory=list)
    """Of each stream, until its first token from elsewhere."""


class Load:
    """Streams on a pool, and the faults that are done to them."""

    def __init__(self, pool: Pool, requests: Sequence[GenerationRequest], name: str) -> None:
        self.faults: list[Fault] = []
        self.records = [
            Record(f"{name}-{number}", request) for number, request in enumerate(requests)
        ]
        self._pool = pool

    async def run(self, beside: Awaitable[None] | None = None) -> None:
        """Starts them all, and reads them to their end; `beside` runs meanwhile, to its end."""
        reading = [asyncio.create_task(self._read(record)) for record in self.records]
        if beside is not None:
            await beside
        await asyncio.gather(*reading)

    async def _read(self, record: Record) -> None:
        try:
            started = await self._pool.model.start(record.name, record.request)
            with started.generation:
                async for _, delta in started.generation:
                    record.tokens += [token.token_id for token in delta.tokens]
                    record.logprobs += [token.logprobs for token in delta.tokens]
                    self._note_core(record, started)
        except ShoalError as error:
            record.error = error
        record.is_over = True

    def _note_core(self, record: Record, started: Started) -> None:
        core_id = started.streams[0].core_id
        if record.core_id not in ("", core_id):
            for fault in self.faults:
                if fault.core_id == record.core_id and record in fault.hit:
                    fault.hit.discard(record)
                    fault.recovery_s.append(time.monotonic() - fault.at_s)
        record.core_id = core_id

    def fault(self, name: str, how: signal.Signals) -> Fault:
        """Kills or stops the core of this replica."""
        core_id = self._pool.entries[name].core_id
        hit = {each for each in self.records if each.core_id == core_id and not each.is_over}
        fault = Fault(name, core_id, how, time.monotonic(), hit)
        self.faults.append(fault)
        self._pool.kill(name, how)
        return fault

    def any_busy(self, random_: random.Random) -> str | None:
        """A replica that streams run on, at random; none when all have ended."""
        cores = {each.core_id for each in self.records if each.core_id and not each.is_over}
        names = [name for name, entry in self._pool.entries.items() if entry.core_id in cores]
        return random_.choice(sorted(names)) if names else None

    async def recovered(self, fault: Fault) -> None:
        """Until every stream that it hit goes on, or has ended."""
        await self._pool.until(lambda: all(record.is_over for record in fault.hit), 120)
