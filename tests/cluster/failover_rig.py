"""Engines that die, hang and drain, and one model of an ingress over them: no HTTP, no Ray.

The engines are real processes with the simulated executor, whose next token depends on the whole
history: an output that equals `reference_output` was continued exactly."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from cluster.failover import ResumableStream
from cluster.generation import Generation
from cluster.identity import IngressIdentity
from cluster.postprocess import OutputDelta
from cluster.preprocess import GenerationRequest, TokenPrompt
from cluster.served_model import ServedModel, Started
from cluster.tokenizer import Tokenizer
from configs.engine import CacheConfig, EngineConfig, SimulationConfig, TransportConfig
from configs.shoal import FailoverConfig, IngressConfig
from engine.client import EngineClient
from engine.launcher import LocalEngine
from engine.wire import SamplingParams
from replicas.directory import EngineEntry, EngineState, ModelEntry
from tests.engine.rig import reference_output

SIMULATION = SimulationConfig(vocab_size=1000, max_model_len=4096, step_s=0.005)
POISON = 0
"""The end token, which is never drawn here."""
LEASE_S = 0.8


class Letters:
    """A tokenizer of one letter a token."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in ids)


def config(**simulation: Any) -> EngineConfig:
    changed = SIMULATION.model_dump() | {"poison_token_id": POISON} | simulation
    return EngineConfig(
        executor="simulated",
        cache=CacheConfig(block_size=4, num_blocks=4096),
        simulation=SimulationConfig.model_validate(changed),
        transport=TransportConfig(lease_s=LEASE_S),
    )


@dataclass
class Output:
    """What a client has of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def add(self, index: int, delta: OutputDelta) -> None:
        self.tokens.setdefault(index, []).extend(token.token_id for token in delta.tokens)
        self.texts[index] = self.texts.get(index, "") + delta.text
        self.logprobs.setdefault(index, []).extend(
            token.logprobs.logprob for token in delta.tokens if token.logprobs is not None
        )


class Pool:
    """Engines by replica id, and the model that is served from them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.identity = IngressIdentity.random()
        self.engines: dict[str, LocalEngine] = {}
        self.entries: dict[str, EngineEntry] = {}
        self.killed: set[str] = set()
        self._died: list[LocalEngine] = []
        self.model = ServedModel(
            ModelEntry("m", "none"), self.identity, lambda _: cast("Tokenizer", Letters())
        )

    def set(self, hold_s: float = 20.0, **failover: Any) -> None:
        self.identity.settings.ingress = IngressConfig(hold_s=hold_s)
        self.identity.settings.failover = FailoverConfig(**failover)

    async def begin(self, *names: str) -> None:
        """Starts engines, or starts them again, and says so."""
        engines = [asyncio.to_thread(LocalEngine.start, self.config) for _ in names]
        for name, engine in zip(names, await asyncio.gather(*engines), strict=True):
            former = self.entries.get(name)
            if former is not None:
                self._died.append(self.engines[name])
            restarts = former.restarts + 1 if former is not None else 0
            self.engines[name] = engine
            self.killed.discard(name)
            self.entries[name] = EngineEntry(
                name,
                "m",
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
        """Engines that have died, and will of what runs now."""
        await asyncio.sleep(0.3)
        return sum(not engine.alive() for engine in self.engines.values())

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> float:
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() < began_s + timeout_s, "it never came to that"
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    async def ready(self, count: int) -> None:
        await self.until(lambda: self.model.is_ready and self.model.num_ready == count)

    async def start(
        self, prompt: Sequence[int], max_tokens: int = 100, *, name: str = "", **fields: Any
    ) -> Started:
        sampling = fields.pop("sampling", SamplingParams())
        request = GenerationRequest(
            TokenPrompt(tuple(prompt)), sampling, max_tokens=max_tokens, seed=7, **fields
        )
        return await self.model.start(name or f"r{prompt}", request)

    async def ask(self, prompt: Sequence[int], max_tokens: int = 100, **fields: Any) -> Output:
        started = await self.start(prompt, max_tokens, **fields)
        return await read(started.generation)

    def expected(self, prompt: Sequence[int], max_tokens: int = 100, choice: int = 0) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, seed=7, choice=choice)
        return reference_output(prompt, params, self.config.simulation)

    async def assert_idle(self) -> None:
        """Nothing runs, is held or is on trial, in any engine that lives or here."""
        for name, engine in self.engines.items():
            if name not in self.killed and engine.alive():
                async with await EngineClient.connect(engine.endpoint) as client:
                    await self.until(lambda c=client: is_idle(c))  # type: ignore[misc]
                    assert client.follower is not None, name
        assert self.model.num_held == 0
        assert len(self.model.placer.quarantine) == 0
        self.model.placer.quarantine.check_integrity()
        self.model.router.check_integrity()

    async def close(self) -> None:
        await self.model.close()
        for engine in (*self.engines.values(), *self._died):
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGCONT)
            await asyncio.to_thread(engine.stop, 1.0)


def is_idle(client: EngineClient) -> bool:
    load = client.follower.load if client.follower is not None else None
    return load is not None and load.running == load.waiting == load.used_blocks == 0


@contextlib.asynccontextmanager
async def serving(*names: str, **simulation: Any) -> AsyncIterator[Pool]:
    """A pool with these engines, ready."""
    pool = Pool(config(**simulation))
    pool.set()
    async with asyncio.timeout(60):
        try:
            pool.model.open()
            await pool.begin(*names)
            await pool.ready(len(names))
            yield pool
        finally:
            await pool.close()


async def read(generation: Generation, output: Output | None = None) -> Output:
    """All that is left of it."""
    output = output or Output()
    with generation:
        async for index, delta in generation:
            output.add(index, delta)
    return output


async def read_some(generation: Generation, num_deltas: int) -> Output:
    output = Output()
    for _ in range(num_deltas):
        entry = await generation.next_delta()
        assert entry is not None
        output.add(*entry)
    return output


def where(started: Started) -> set[str]:
    """The replicas that a request's choices are on."""
    streams = cast("Sequence[ResumableStream]", started.generation._streams)
    return {stream._session.entry.replica_id for stream in streams}
