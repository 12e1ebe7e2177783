"""Measures one engine by itself: process start, one stream, prefill, a batch on one prefix.

Invariant: the engine runs in its own process and is reached over its sockets, as an ingress reaches
it; times are taken at the client. Every figure is the median of the rounds.
"""

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.figures import Progress
from bench.workload import Workload, load_workload
from configs.engine import EngineConfig
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.launcher import LocalEngine
from engine.wire import SamplingParams


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one workload, in seconds from the moment the requests were sent."""

    first_s: float
    """Until the first token of any request."""
    last_s: float
    """Until the last token of all."""
    output_tokens: int
    cached_tokens: int


async def run_workload(client: EngineClient, workload: Workload, round_number: int) -> Timing:
    """Sends all requests of a round at once."""
    assert client.info is not None
    prompts = workload.prompts(client.info.vocab_size, round_number)
    return await send(client, prompts, workload.output_tokens)


async def send(client: EngineClient, prompts: Sequence[list[int]], output_tokens: int) -> Timing:
    """Sends all prompts at once, greedy and past any end token."""
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    start_s = time.perf_counter()

    async def one(prompt: list[int]) -> tuple[float, float, int, int]:
        stream = await client.add(EngineRequest(prompt, sampling), accept_timeout_s=60)
        first_s, count, cached = 0.0, 0, 0
        async for item in stream:
            first_s = first_s or time.perf_counter()
            count += len(item.token_ids)
            cached = item.cached_tokens
        if count != output_tokens:
            raise RuntimeError(f"{count} tokens came back, {output_tokens} were asked for")
        return first_s, time.perf_counter(), count, cached

    results = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return Timing(
        first_s=min(result[0] for result in results) - start_s,
        last_s=max(result[1] for result in results) - start_s,
        output_tokens=sum(result[2] for result in results),
        cached_tokens=sum(result[3] for result in results),
    )


async def _measure(endpoint: str, rounds: int, progress: Progress) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        figures.setdefault(key, []).append(value)

    w1, w2, w3 = (load_workload(name) for name in ("w1", "w2", "w3"))
    async with await EngineClient.connect(endpoint) as client:
        progress("warm-up")
        await run_workload(client, w1, round_number=0)
        for number in range(1, rounds + 1):
            progress(f"round {number} of {rounds}: w1")
            timing = await run_workload(client, w1, number)
            note("w1_tokens_per_s", timing.output_tokens / timing.last_s)
            decoding_s = timing.last_s - timing.first_s
            note("w1_decode_tokens_per_s", (timing.output_tokens - 1) / decoding_s)
            note("w1_ttft_s", timing.first_s)
            progress(f"round {number} of {rounds}: w2")
            timing = await run_workload(client, w2, number)
            note("w2_prefill_tokens_per_s", w2.num_requests * w2.own_tokens / timing.last_s)
            for temperature in ("cold", "warm"):
                progress(f"round {number} of {rounds}: w3 {temperature}")
                timing = await run_workload(client, w3, number)
                note(f"w3_{temperature}_output_tokens_per_s", timing.output_tokens / timing.last_s)
                note(f"w3_{temperature}_cached_tokens", timing.cached_tokens)
    return figures


def bench_engine(
    config: EngineConfig, rounds: int, progress: Progress
) -> dict[str, float | int | str]:
    """Starts an engine and runs W1 to W3. One metric a key; `ready_s` is from the start of the
    process until it listens with its weights loaded."""
    start_s = time.perf_counter()
    with LocalEngine.start(config, lambda phase: progress(f"engine: {phase}")) as engine:
        ready_s = time.perf_counter() - start_s
        figures = asyncio.run(_measure(engine.endpoint, rounds, progress))
    return {
        "benchmark": "engine",
        "executor": config.executor,
        "model": config.model,
        "dtype": config.dtype,
        "threads": config.threads or 0,
        "rounds": rounds,
        "ready_s": round(ready_s, 3),
        **{key: _median(values) for key, values in figures.items()},
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)
