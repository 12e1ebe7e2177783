"""Engines that die, hang and drain, and one model of an ingress over them: no HTTP, no Ray.

The engines are real processes with the simulated executor, whose next token depends on the whole
history: an output that equals `reference_output` was continued exactly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.pool import Pool as EnginePool
from bench.pool import opened
from cluster.generation import Generation
from cluster.postprocess import OutputDelta
from cluster.preprocess import GenerationRequest, TokenPrompt
from cluster.served_model import Started
from configs.engine import CacheConfig, EngineConfig, SimulationConfig, TransportConfig
from configs.shoal import FailoverConfig, IngressConfig
from engine.client import EngineClient
from engine.wire import SamplingParams
from tests.engine.rig import reference_output

SIMULATION = SimulationConfig(vocab_size=1000, max_model_len=4096, step_s=0.005)
POISON = 0
"""The end token, which is never drawn here."""
LEASE_S = 0.8


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


class Pool(EnginePool):
    """As the benchmark's, with what tests ask of it."""

    def set(self, hold_s: float = 20.0, **failover: Any) -> None:
        self.identity.settings.ingress = IngressConfig(hold_s=hold_s)
        self.identity.settings.failover = FailoverConfig(**failover)

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


def is_idle(client: EngineClient) -> bool:
    load = client.follower.load if client.follower is not None else None
    return load is not None and load.running == load.waiting == load.used_blocks == 0


@contextlib.asynccontextmanager
async def serving(*names: str, **simulation: Any) -> AsyncIterator[Pool]:
    """A pool with these engines, ready."""
    pool = Pool(config(**simulation))
    pool.set()
    async with asyncio.timeout(60), opened(pool, names):
        yield pool


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
    return {stream.core_id.partition("#")[0] for stream in started.streams}
