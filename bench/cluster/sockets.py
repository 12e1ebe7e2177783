"""The same comparison over real sockets, small and slow enough for two cores.

Invariant: all that runs is what serves: engine processes (their executor is simulated: it sleeps),
sessions over ZeroMQ, the ingress's own `ServedModel`. Each policy has engines of its own, with
empty caches, and is sent the same requests at the same times.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster.shape import BLOCK_SIZE, QUARTER, Prompt, Prompts, Shape
from bench.cluster.simulation import Stage
from bench.figures import Progress
from bench.pool import Pool, opened
from cluster.identity import IngressIdentity, LiveSettings
from cluster.preprocess import GenerationRequest, TokenPrompt
from cluster.served_model import ServedModel
from configs.engine import CacheConfig, EngineConfig, SimulationConfig
from configs.secret import read_secret, write_secret
from configs.shoal import RouterConfig
from engine.wire import SamplingParams

_SHAPE = replace(QUARTER, step_s=0.02, token_s=0.0005, context_token_s=0.0)
"""With a step that is several times as long."""


@dataclass(frozen=True, slots=True)
class _Load:
    rate: float
    num_requests: int


def measure_sockets(quick: bool, progress: Progress) -> dict[str, float]:
    shape = _SHAPE
    warm, load = _Load(8.0, 60 if quick else 90), _Load(16.0, 60 if quick else 180)
    stages: dict[str, Stage] = {}
    for policy in ("prefix", "round_robin"):
        progress(f"{shape.num_engines} engine processes, {policy}")
        stages[policy] = asyncio.run(_serve(shape, policy, (warm, load)))
    ours, theirs = stages["prefix"], stages["round_robin"]
    ttft_ratio = theirs.ttft_percentile_s(90) / ours.ttft_percentile_s(90)
    return {
        "real_requests": load.num_requests,
        "real_rate": load.rate,
        "real_throughput_ratio_vs_round_robin": ours.tokens_per_s / theirs.tokens_per_s,
        "real_ttft_p90_ratio_vs_round_robin": ttft_ratio,
        "real_ttft_s_p90_prefix": ours.ttft_percentile_s(90),
        "real_ttft_s_p90_round_robin": theirs.ttft_percentile_s(90),
        "real_hit_rate_prefix": ours.hit_rate,
        "real_hit_rate_round_robin": theirs.hit_rate,
    }


async def _serve(shape: Shape, policy: str, loads: tuple[_Load, ...]) -> Stage:
    """The last of `loads`."""
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        write_secret(secret_file)
        config = EngineConfig(
            executor="simulated",
            cache=CacheConfig(num_blocks=shape.num_blocks, block_size=BLOCK_SIZE),
            simulation=SimulationConfig(step_s=shape.step_s, token_s=shape.token_s),
            cluster_secret_file=str(secret_file),
        )
        settings = LiveSettings(router=RouterConfig.model_validate({"policy": policy}))
        pool = Pool(config, IngressIdentity("bench", read_secret(secret_file), settings))
        names = [f"engine-{number}" for number in range(shape.num_engines)]
        async with opened(pool, names):
            prompts, rng = iter(Prompts(shape)), random.Random(shape.seed)
            stages = [await _stage(pool.model, shape, prompts, rng, load) for load in loads]
    return stages[-1]


async def _stage(
    model: ServedModel, shape: Shape, prompts: Iterator[Prompt], rng: random.Random, load: _Load
) -> Stage:
    stage = Stage(time.perf_counter())

    async def one(number: int, due_s: float, prompt: Prompt) -> None:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        request = GenerationRequest(
            TokenPrompt(tuple(prompt.token_ids)),
            SamplingParams(ignore_eos=True),
            max_tokens=shape.output_tokens,
        )
        started = await model.start(f"request-{number}", request)
        with started.generation as generation:
            async for _ in generation:
                pass
        stage.ttft_s.append(generation.times.first_token_s - due_s)
        stage.num_prompt_tokens += generation.usage.prompt_tokens
        stage.num_cached_tokens += generation.usage.cached_tokens
        stage.num_output_tokens += generation.usage.completion_tokens

    due_s, tasks = stage.began_s, []
    for number in range(load.num_requests):
        due_s += rng.expovariate(load.rate)
        tasks.append(asyncio.create_task(one(number, due_s, next(prompts))))
    await asyncio.gather(*tasks)
    stage.ended_s = time.perf_counter()
    return stage
