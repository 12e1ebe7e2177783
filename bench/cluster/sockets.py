"""The same comparison over real sockets, small and slow enough for two cores.

Invariant: all that runs is what serves: engine processes (their executor is simulated: it sleeps),
sessions over ZeroMQ, the ingress's own `ServedModel`. Each policy has engines of its own, with
empty caches, and is sent the same requests at the same times.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bench.cluster.shape import BLOCK_SIZE, Prompt, Prompts, Shape
from bench.cluster.simulation import Stage
from bench.figures import Progress
from cluster.fleet import FixedDirectory
from cluster.identity import IngressIdentity, LiveSettings
from cluster.preprocess import GenerationRequest, TokenPrompt
from cluster.served_model import ServedModel
from cluster.tokenizer import Tokenizer
from configs.engine import CacheConfig, EngineConfig, SimulationConfig
from configs.secret import read_secret, write_secret
from configs.shoal import RouterConfig
from engine.launcher import LocalEngine
from engine.wire import SamplingParams
from replicas.directory import ModelEntry

_SHAPE = Shape(
    num_engines=4,
    kv_tokens=31_200,
    num_groups=30,
    num_users=3,
    shared_tokens=1600,
    own_tokens=480,
    output_tokens=40,
    step_s=0.02,
    token_s=0.0005,
    context_token_s=0.0,
)
"""The published shape at a quarter of its lengths, with a step that is several times as long."""
_START_TIMEOUT_S = 30.0


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
        with _engines(shape) as (endpoints, secret):
            stages[policy] = asyncio.run(_serve(shape, policy, endpoints, secret, (warm, load)))
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


@contextlib.contextmanager
def _engines(shape: Shape) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Their endpoints, and the secret that keys their blocks."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        secret_file = Path(folder) / "secret"
        write_secret(secret_file)
        config = EngineConfig(
            executor="simulated",
            cache=CacheConfig(num_blocks=shape.num_blocks, block_size=BLOCK_SIZE),
            simulation=SimulationConfig(step_s=shape.step_s, token_s=shape.token_s),
            cluster_secret_file=str(secret_file),
        )
        engines = [stack.enter_context(LocalEngine.start(config)) for _ in range(shape.num_engines)]
        yield tuple(engine.endpoint for engine in engines), read_secret(secret_file)


async def _serve(
    shape: Shape, policy: str, endpoints: tuple[str, ...], secret: bytes, loads: tuple[_Load, ...]
) -> Stage:
    """The last of `loads`."""
    settings = LiveSettings(router=RouterConfig.model_validate({"policy": policy}))
    entry = ModelEntry("simulated", "simulated")
    model = ServedModel(entry, IngressIdentity("bench", secret, settings), _tokenizer)
    model.open()
    try:
        view = await FixedDirectory(entry, endpoints).next_view(None)
        model.update(view.engines, is_complete=True)
        async with asyncio.timeout(_START_TIMEOUT_S):
            while model.num_ready < len(endpoints) or not model.is_ready:
                await asyncio.sleep(0.02)
        prompts, rng = iter(Prompts(shape)), random.Random(shape.seed)
        stages = [await _stage(model, shape, prompts, rng, load) for load in loads]
    finally:
        await model.close()
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


def _tokenizer(source: str) -> Tokenizer:
    """A word for each id: nothing here is tokenised, but answers are turned into text."""
    words = {f"word{token_id}": token_id for token_id in range(32_000)}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel(words, "word0"))))
