"""KV in 8-bit floats: the tokens of `transformers` over keys and values rounded likewise, whatever
happens to a request; and that such KV is never taken for another's."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from configs.secret import write_secret
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.errors import ConfigurationError
from engine.executors.model import ModelExecutor
from engine.models.check import ServingPath, check_model
from engine.models.fused_decoder import FusedDecoder
from engine.models.load import load_model
from engine.models.op_decoder import OpDecoder
from engine.models.traits import fingerprint, with_kv_dtype
from engine.models.transformers_model import TransformersModel
from engine.wire import SamplingParams
from tests.engine import test_equality as equality
from tests.engine.ranks import on_ranks
from tests.engine.rig import running_engine, wait_until
from tests.engine.test_device_memory import FakeMemory, MemoryFigures
from tests.engine.test_equality import LENGTHS, Subject, greedy
from tests.engine.test_parallel import logits_of
from tests.engine.wire_rig import with_client
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
Way = Callable[[Subject, Sequence[SamplingParams]], list[list[int]]]


def config(name: str = "llama", **cache: object) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model(name)),
        device="cpu",
        threads=1,
        cache=CacheConfig.model_validate({"kv_dtype": "fp8"} | cache),
    )


def generated(name: str, prompts: list[list[int]], rounds: bool) -> list[list[int]]:
    """By `generate`, whose attention sees what 8 bits leave of keys and values."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = modeling.eager_attention_forward

    def attend(module, query, key, value, *args, **kwargs):
        key, value = (x.clamp(-448, 448).to(FLOAT8).to(x.dtype) for x in (key, value))
        return own(module, query, key, value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rounds:
            patch.setattr(modeling, "eager_attention_forward", attend)
        return equality._generate(tiny_model(name), prompts)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """By the fused decoder, and by the modules of `transformers`."""
    name = request.param
    executor = ModelExecutor.load(
        config(name, num_blocks=equality.NUM_BLOCKS, host_memory_bytes=64 << 20)
    )
    equality.poison(executor)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 384, (n,), generator=generator).tolist() for n in LENGTHS]
    yield Subject(name, executor, prompts, generated(name, prompts, rounds=True))
    executor.close()


@pytest.mark.parametrize("subject", ["llama", "gpt_oss"], indirect=True)
def test_the_cache_is_of_8_bits(subject: Subject) -> None:
    executor = subject.executor
    assert executor._cache.storage.dtype == executor._host._slots.dtype == FLOAT8
    assert executor.info.kv_bytes_per_token == 2 * 3 * 2 * 16
    kind = FusedDecoder if subject.name == "llama" else TransformersModel
    assert isinstance(executor._model, kind)
    assert subject.expected[-4:] != generated(subject.name, subject.prompts[-4:], rounds=False)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "way",
    [
        equality.run_chunked,
        equality.run_preempted,
        equality.run_cached,
        equality.run_through_host,
        equality.run_restarted,
    ],
)
def test_greedy_output_is_that_of_rounded_attention(subject: Subject, way: Way) -> None:
    assert way(subject, [greedy()] * len(LENGTHS)) == subject.expected


@pytest.mark.parametrize("subject", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("way", [equality.run_chunked, equality.run_through_host])
def test_so_is_that_of_the_modules_of_transformers(subject: Subject, way: Way) -> None:
    assert way(subject, [greedy()] * len(LENGTHS)) == subject.expected


def test_the_same_memory_has_twice_the_blocks_of_16_bits() -> None:
    counts = []
    for kv_dtype in ("auto", "fp8"):
        memory = {"memory_bytes": 3 << 20, "host_memory_bytes": 6 << 20, "kv_dtype": kv_dtype}
        executor = ModelExecutor.load(config(**memory).model_copy(update={"dtype": "bfloat16"}))
        counts.append((executor.info.num_blocks, executor.info.num_slots))
        executor.close()
    assert counts == [(512, 1024), (1024, 2048)]


def test_a_share_of_a_device_holds_blocks_of_8_bits() -> None:
    memory = FakeMemory(MemoryFigures(1 << 20, 100_000, 200_000))
    small = SchedulerConfig(max_num_batched_tokens=37, max_num_seqs=5)
    given = config(memory_fraction=0.5).model_copy(update={"scheduler": small})
    executor = ModelExecutor.load(given, memory=memory)
    assert executor.info.num_blocks == ((1 << 19) - 300_000) // (16 * 192)
    executor.close()


def test_a_disk_keeps_the_two_apart(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_secret(tmp_path / "secret")
    folder = tmp_path_factory.mktemp("e")
    sockets = {"listen": f"ipc://{folder}/r", "listen_stream": f"ipc://{folder}/s"}
    prompt = list(range(3, 103))

    def found(kv_dtype: str) -> tuple[int, list[int]]:
        given = config(
            kv_dtype=kv_dtype,
            num_blocks=64,
            host_memory_bytes=8 << 20,
            disk_path=str(tmp_path / "kv"),
        )
        fields = {"cluster_secret_file": str(tmp_path / "secret"), "transport": sockets}
        given = EngineConfig.model_validate(given.model_dump() | fields)
        answers = []

        async def ask(client: EngineClient) -> None:
            request = EngineRequest(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
            answers.extend([item async for item in await client.add(request)])

        with running_engine(given, ModelExecutor.load(given)) as core:
            with_client(core, ask)
            wait_until(lambda: core.stats()["disk_blocks"] >= 6)
        tokens = [token_id for item in answers for token_id in item.token_ids]
        return answers[-1].cached_tokens, tokens

    (cold, eight), (other, _), (warm, again) = found("fp8"), found("auto"), found("fp8")
    assert (cold, other) == (0, 0)
    assert warm >= 96
    assert again == eight


def test_fingerprints_differ_and_those_of_before_are_the_same() -> None:
    traits = load_model(tiny_model("llama"), CPU).traits
    eight = with_kv_dtype(traits, "fp8")
    assert with_kv_dtype(eight, "auto") == traits
    assert fingerprint(tiny_model("llama"), eight) != fingerprint(tiny_model("llama"), traits)


def test_two_ranks_are_one(tmp_path: Path) -> None:
    prompt = [(7 * place + 3) % 384 for place in range(40)]

    def run(collectives):
        model = load_model(
            tiny_model("llama"), CPU, "float32", collectives=collectives, kv_dtype="fp8"
        )
        return logits_of(model, prompt)

    first, second = on_ranks(2, tmp_path, run)
    assert torch.equal(first, second)
    alone = load_model(tiny_model("llama"), CPU, "float32", kv_dtype="fp8")
    assert torch.allclose(first, logits_of(alone, prompt), atol=2e-4)


def test_a_cpu_takes_the_ops_and_says_so() -> None:
    model = load_model(tiny_model("llama"), CPU, kv_dtype="fp8")
    assert isinstance(model, FusedDecoder)
    assert isinstance(model.backend, OpDecoder)
    found = check_model(str(tiny_model("llama")), CPU, "bfloat16", kv_dtype="fp8")
    assert found.path is ServingPath.FUSED
    assert found.reason == "the C++ kernels keep KV in the model's dtype, not in float8_e4m3fn"
    assert found.need is not None
    assert (found.need.kv_dtype, found.need.kv_bytes_per_token) == ("float8_e4m3fn", 192)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cache.kv_dtype is fp8, .* device is meta"):
        ModelExecutor.load(config().model_copy(update={"device": "meta"}))
    with pytest.raises(ValidationError, match=r"cache\.kv_dtype fp8 needs executor: model"):
        EngineConfig.model_validate({"executor": "simulated", "cache": {"kv_dtype": "fp8"}})
    with pytest.raises(ValidationError, match="'auto' or 'fp8'"):
        CacheConfig.model_validate({"kv_dtype": "int8"})
