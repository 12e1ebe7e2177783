"""Two ranks are one engine: its tokens are those of one process, whatever happens to a request."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from configs.engine import CacheConfig, SchedulerConfig
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.collectives import TorchCollectives
from engine.errors import ModelRefused, RankLost
from engine.executors import parallel
from engine.executors.messages import Ready
from engine.executors.model import ModelExecutor
from engine.executors.parallel import ParallelExecutor
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.models.kv_cache import KVCache
from engine.models.load import ServedModel, load_model
from engine.plan import Slice, Start, StepPlan
from engine.wire import SamplingParams
from tests.engine import test_equality as equality
from tests.engine.ranks import config_of, on_ranks
from tests.engine.rig import running_engine
from tests.engine.test_equality import LENGTHS, Subject, greedy, seeded
from tests.engine.wire_rig import with_client
from tests.tiny_models import reference_module, save_tiny_model, tiny_model

pytestmark = pytest.mark.timeout(180)

CPU = torch.device("cpu")


# ------------------------------------------------------------ equal to one process


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "qwen2", "phi3", "mistral", "qwen3_moe", "mixtral"]
)
def test_every_family_passes_its_comparison_in_two_parts(name: str, tmp_path: Path) -> None:
    """Packed, paged and summed over the ranks, in the logits of the model's own code; the load
    compares them too, and refuses what differs."""
    folder, prompt = tiny_model(name), [(7 * place + 3) % 384 for place in range(40)]

    def run(collectives: TorchCollectives) -> torch.Tensor:
        model = load_model(folder, CPU, "float32", collectives=collectives)
        return logits_of(model, prompt)

    first, second = on_ranks(2, tmp_path, run)
    assert torch.equal(first, second)
    with torch.inference_mode():
        expected = reference_module(name)(torch.tensor([prompt])).logits[0]
    assert torch.allclose(first, expected, atol=2e-4)


@torch.inference_mode()
def logits_of(model: ServedModel, prompt: list[int]) -> torch.Tensor:
    cache = KVCache(model.traits, 8, 8, CPU)
    blocks = torch.arange(8, dtype=torch.int32).numpy()
    batch = AttentionBatch.build([SequenceSlice(0, len(prompt), blocks)], 8, CPU)
    return model.forward(torch.tensor(prompt), batch, torch.arange(len(prompt)), cache)


def test_three_ranks_share_a_vocabulary_that_three_does_not_divide(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=70,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=False,
    )
    module = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    module.save_pretrained(tmp_path)
    prompt = list(range(3, 43))

    def run(collectives: TorchCollectives) -> torch.Tensor:
        return logits_of(load_model(tmp_path, CPU, "float32", collectives=collectives), prompt)

    with torch.inference_mode():
        expected = module(torch.tensor([prompt])).logits[0]
    for found in on_ranks(3, tmp_path, run):
        assert torch.allclose(found, expected, atol=2e-4)


def test_ranks_that_differ_in_a_weight_are_refused(tmp_path: Path) -> None:
    whole, other = tiny_model("llama"), save_tiny_model("llama", tmp_path / "other")
    module = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    module.save_pretrained(other)

    def run(collectives: TorchCollectives) -> ServedModel:
        folder = (whole, other)[collectives.shard.rank]
        return load_model(folder, CPU, "float32", collectives=collectives)

    with pytest.raises(ModelRefused, match="other logits than alone"):
        on_ranks(2, tmp_path, run)


@pytest.fixture(scope="module")
def executor() -> Iterator[ParallelExecutor]:
    executor = ParallelExecutor.load(config_of(tiny_model("llama")))
    yield executor
    executor.close()


SEEDED = [seeded(number) for number in range(len(LENGTHS))]


@dataclass
class Pair:
    """Two processes, and what one of them makes of each prompt."""

    subject: Subject
    greedy: list[list[int]]
    seeded: list[list[int]]


@pytest.fixture(scope="module")
def pair(executor: ParallelExecutor) -> Pair:
    source = random.Random("llama")
    prompts = [[source.randrange(3, 384) for _ in range(length)] for length in LENGTHS]
    one = ModelExecutor.load(config_of(tiny_model("llama"), tensor_parallel_size=1))
    alone = Subject("llama", one, prompts, [])
    outputs = [
        equality.run_alone(alone, sampling) for sampling in ([greedy()] * len(LENGTHS), SEEDED)
    ]
    one.close()
    return Pair(Subject("llama", executor, prompts, []), *outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "way",
    [equality.run_chunked, equality.run_overlapped],
)
def test_two_processes_equal_one(pair: Pair, way: Any) -> None:
    assert way(pair.subject, [greedy()] * len(LENGTHS)) == pair.greedy
    assert way(pair.subject, SEEDED) == pair.seeded != pair.greedy


def test_two_processes_have_a_host_tier_each(pair: Pair) -> None:
    sampling = [greedy()] * len(LENGTHS)
    assert equality.run_through_host(pair.subject, sampling) == pair.greedy


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2")),
    ],
)
def test_clients_are_told_what_one_process_tells_them(name: str) -> None:
    """Through sockets and the whole engine, whose pool is too small for all of them at once."""
    requests = [
        (
            [n + 3, *range(3 + n, 8 + 10 * n)],
            SamplingParams(max_tokens=14, ignore_eos=True, **extra),
        )
        for n in range(5)
        for extra in (
            {},
            {"temperature": 0.9, "seed": n, "top_p": 0.95},
            {"temperature": 0.7, "seed": n, "logprobs": 3, "repetition_penalty": 1.3},
        )
    ]
    for one, two in zip(answers(name, 1, requests), answers(name, 2, requests), strict=True):
        assert len(one.tokens) == 14
        assert two.tokens == one.tokens
        assert two.top == one.top
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-3)


@dataclass
class Answer:
    tokens: list[int]
    top: list[list[int]]
    """The likeliest tokens at each place."""
    logprobs: list[float]


def answers(
    name: str, ranks: int, requests: list[tuple[list[int], SamplingParams]]
) -> list[Answer]:
    config = config_of(
        tiny_model(name),
        tensor_parallel_size=ranks,
        cache=CacheConfig(block_size=8, num_blocks=24, host_memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, long_prefill_threshold=32),
    )
    found: list[Answer] = []

    async def use(client: EngineClient) -> None:
        async def one(prompt: list[int], params: SamplingParams) -> Answer:
            items = [item async for item in await client.add(EngineRequest(prompt, params))]
            logprobs = [each for item in items for each in item.logprobs or ()]
            return Answer(
                [token for item in items for token in item.token_ids],
                [[token for token, _ in each.top] for each in logprobs],
                [each.logprob for each in logprobs],
            )

        found.extend(await asyncio.gather(*(one(*request) for request in requests)))

    load = ModelExecutor.load if ranks == 1 else ParallelExecutor.load
    with running_engine(config, load(config)) as core:
        with_client(core, use)
        stats = core.stats()
    assert stats["preemptions"] > 0
    assert stats["saved_blocks"] > 0
    assert stats["restored_tokens"] > 0
    assert stats["steps"] > 20
    return found


# ------------------------------------------------------------ failures of all, and of one


def plan(step: int, run_id: int, token_ids: tuple[int, ...], block: int) -> StepPlan:
    """Computes a prompt of less than a block."""
    start = Start(run_id, token_ids, len(token_ids), SamplingParams(max_tokens=9), ())
    item = Slice(run_id, 0, len(token_ids), (block,), True)
    return StepPlan(step=step, ended=(), copies=(), starts=(start,), slices=(item,))


def test_ranks_have_equal_memory(executor: ParallelExecutor) -> None:
    blocks, slots = executor.info.num_blocks, executor.info.num_slots
    parallel._check_equal(executor.info, [Ready(blocks, slots)])
    text = f"rank 0 has {blocks} KV blocks and {slots} slots of host memory, and rank 2 8 and 0"
    with pytest.raises(RankLost, match=text):
        parallel._check_equal(executor.info, [Ready(blocks, slots), Ready(8, 0)])


def test_a_run_that_no_rank_can_compute_fails_alone(executor: ParallelExecutor) -> None:
    result = executor.execute(plan(1, 901, (4, 384, 5), 0))
    assert "token id 384 is not in the vocabulary" in result.failures[901]
    result = executor.execute(plan(2, 902, (4, 5, 6), 1))
    assert list(result.sampled) == [902]


def test_ranks_that_draw_otherwise_are_lost(
    executor: ParallelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "drawn_digest", lambda result: b"others")
    with pytest.raises(RankLost, match="rank 1 drew other tokens than rank 0 in step 3"):
        executor.execute(plan(3, 903, (4, 5, 6), 2))
    monkeypatch.undo()
    assert executor.execute(plan(4, 904, (4, 5, 6), 3)).sampled


def test_what_one_rank_fails_by_is_nobodys_request(
    executor: ParallelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process it would be tried again, run by run."""
    model = executor._executor._model
    forward = model.forward

    def fails(*args: Any) -> torch.Tensor:
        forward(*args)
        raise RuntimeError("a fault of rank 0 alone")

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(RuntimeError, match="a fault of rank 0 alone"):
        executor.execute(plan(5, 905, (4, 5, 6), 0))
