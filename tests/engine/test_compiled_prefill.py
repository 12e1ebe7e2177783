"""Compiled prefill: the logits of the ops, for any batch that comes along by what was compiled at
load, and no harm where compiling fails."""

import logging
import threading

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.utils import counters

from configs.engine import CacheConfig, EngineConfig
from engine.executors.model import ModelExecutor
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.models import compiled_prefill
from engine.models.compiled_prefill import compile_prefill
from engine.models.kv_cache import KVCache
from engine.models.load import load_model
from tests.engine.rig import Rig
from tests.engine.test_equality import greedy
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
BLOCK = 16
STEPS = (
    [(0, 40)],
    [(0, 2)],
    [(0, 1), (1, 9)],
    [(0, 33), (1, 1), (2, 64)],
    [(n, n + 1) for n in range(6)],
    [(0, 150), (1, 90)],
)
"""Ragged: (sequence, length) each; the fourth of 98 tokens in three sequences."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing compiled so far, and no C++ kernels, so that there is something to compile."""
    monkeypatch.setattr("engine.models.fused_decoder.try_native_decoder", lambda *args: None)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


@torch.inference_mode()
def logits_of(model):
    """Of every token of each of `STEPS`, and of a decode step after the last."""
    cache = KVCache(model.traits, 64, BLOCK, CPU)
    tables = np.random.default_rng(0).permutation(60).astype(np.int32).reshape(6, 10)
    generator = torch.Generator().manual_seed(1)

    def run(parts):
        slices = [SequenceSlice(start, length, tables[s]) for s, start, length in parts]
        batch = AttentionBatch.build(slices, BLOCK)
        ids = torch.randint(3, 384, (batch.num_tokens,), generator=generator)
        return model.forward(ids, batch, torch.arange(batch.num_tokens), cache)

    found = [run([(s, 0, length) for s, length in step]) for step in STEPS]
    found.append(run([(0, 150, 1), (1, 90, 1)]))
    return torch.cat(found)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen3_moe"])
def test_any_batch_has_the_logits_of_the_ops_and_compiles_nothing(name):
    model = load_model(tiny_model(name), CPU)
    expected = logits_of(model)
    assert num_compiled() == 0
    assert compile_prefill(model, backend="aot_eager")
    # Of three parts; again for another set of weights.
    compiled = num_compiled()
    assert 3 <= compiled <= 6
    found = logits_of(model)
    assert num_compiled() == compiled
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_rounded_where_the_ops_round():
    model = load_model(tiny_model("qwen3"), CPU, "bfloat16")
    expected = logits_of(model)
    assert compile_prefill(model, backend="aot_eager")
    found = logits_of(model)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.02


def test_another_thread_compiles_nothing():
    """An engine loads in one thread and computes in another."""
    model = load_model(tiny_model("llama"), CPU)
    compile_prefill(model, backend="aot_eager")
    compiled, found = num_compiled(), []
    thread = threading.Thread(target=lambda: found.append(logits_of(model)))
    thread.start()
    thread.join()
    assert found[0].isfinite().all()
    assert num_compiled() == compiled


def test_a_decode_step_is_not_compiled_code(monkeypatch):
    model = load_model(tiny_model("llama"), CPU)
    compile_prefill(model, backend="aot_eager")
    taken = []
    monkeypatch.setattr(model.backend.prefill_parts, "attention_inputs", taken.append)
    batch = AttentionBatch.build([SequenceSlice(3, 1, np.zeros(1, dtype=np.int32))] * 2, BLOCK)
    model.forward(
        torch.tensor([5, 6]), batch, torch.arange(2), KVCache(model.traits, 1, BLOCK, CPU)
    )
    assert taken == []


def test_what_fails_to_compile_runs_op_by_op_with_one_warning(caplog):
    model = load_model(tiny_model("llama"), CPU)
    expected = logits_of(model)

    def fails(graph, inputs):
        raise RuntimeError("no compiler here")

    with caplog.at_level(logging.WARNING):
        assert not compile_prefill(model, backend=fails)
        assert torch.equal(logits_of(model), expected)
    (record,) = [record for record in caplog.records if record.name.startswith("engine.")]
    assert "prefill is not compiled, and runs op by op" in record.getMessage()
    assert "no compiler here" in record.getMessage()


def test_what_fails_in_a_later_step_leaves_that_step_right(caplog):
    model = load_model(tiny_model("llama"), CPU)
    expected = logits_of(model)
    compile_prefill(model, backend="aot_eager")

    def gone(*args):
        raise torch._dynamo.exc.InternalTorchDynamoError("gone")

    model.backend.prefill_parts._mlp = gone
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)
    assert model.backend.prefill_parts.has_failed


def test_a_model_that_it_does_not_know_is_left_alone(caplog):
    model = load_model(tiny_model("gpt_oss"), CPU)
    with caplog.at_level(logging.WARNING):
        assert not compile_prefill(model)
    assert "has no effect: TransformersModel runs this model" in caplog.text
    model.close()


def outputs(compiles):
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        threads=1,
        compile_prefill=compiles,
        cache=CacheConfig(num_blocks=64),
    )
    phases = []
    executor = ModelExecutor.load(config, phases.append)
    rig = Rig(64, executor=executor, max_num_batched_tokens=40)
    for number, length in enumerate((3, 50, 17, 90)):
        rig.add(str(number), [(7 * i + number) % 380 + 3 for i in range(length)], greedy())
    rig.drain()
    executor.close()
    return rig.output, "compiling prefill" in phases


def test_an_engine_compiles_when_it_is_told_to(monkeypatch):
    plain, compiled = outputs(False)
    assert not compiled
    own = compiled_prefill.compile_prefill
    monkeypatch.setattr(
        compiled_prefill,
        "compile_prefill",
        lambda model, progress: own(model, progress, backend="aot_eager"),
    )
    assert outputs(True) == (plain, True)
    assert num_compiled() == 3


@pytest.mark.slow
def test_the_default_compiler():
    model = load_model(tiny_model("llama"), CPU)
    expected = logits_of(model)
    assert compile_prefill(model)
    compiled = num_compiled()
    found = logits_of(model)
    assert num_compiled() == compiled == 3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_ranks_are_refused():
    with pytest.raises(ValidationError, match="compile_prefill and tensor_parallel_size above 1"):
        EngineConfig(compile_prefill=True, tensor_parallel_size=2)
