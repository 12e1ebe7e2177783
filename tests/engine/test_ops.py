"""The op set in plain torch, which back end is chosen, and that a CPU never loads another one."""

import logging
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.ops import TorchOps, select_ops
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.reference import AttentionOptions
from tests.tiny_models import tiny_model

OPS = TorchOps()
FLOAT8 = torch.float8_e4m3fn


def decode_batch(starts, block_size=4):
    counts = [-(-(start + 1) // block_size) for start in starts]
    ends = np.cumsum(counts)
    ids = np.arange(sum(counts), dtype=np.int32)[::-1]
    tables = [ids[end - n : end] for end, n in zip(ends, counts, strict=True)]
    slices = [SequenceSlice(s, 1, t) for s, t in zip(starts, tables, strict=True)]
    return AttentionBatch.build(slices, block_size)


def caches(num_blocks=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks, 2, 4, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def test_tensors_of_a_batch_on_its_device():
    slices = [
        SequenceSlice(3, 3, np.array([7, 2], dtype=np.int32)),
        SequenceSlice(0, 1, np.array([5], dtype=np.int32)),
    ]
    batch = AttentionBatch.build(slices, 4)
    assert batch.device_query_starts.tolist() == [0, 3, 4]
    assert batch.device_context_lens.tolist() == [6, 1]
    assert batch.device_context_lens.dtype == batch.device_query_starts.dtype == torch.int32
    assert batch.device_context_lens is batch.device_context_lens
    assert batch.max_query_len == 3


def test_a_padded_batch_takes_one_step_after_the_other():
    padded = PaddedDecodeBatch.allocate(4, 3, 4, "cpu")
    tables = padded.block_tables
    first, second = decode_batch([9, 3, 6]), decode_batch([5])
    padded.fill(first)
    assert padded.lengths.tolist() == [10, 4, 7, 0]
    assert padded.positions.tolist() == [9, 3, 6, 0]
    assert padded.slot_blocks.tolist() == [*first.slot_blocks.tolist(), -1]
    assert padded.slot_offsets.tolist() == [1, 3, 2, 0]
    padded.fill(second)
    assert padded.lengths.tolist() == [6, 0, 0, 0]
    assert padded.slot_blocks.tolist() == [second.slot_blocks.item(), -1, -1, -1]
    assert padded.block_tables is tables
    assert (padded.num_tokens, padded.num_sequences, padded.max_query_len) == (4, 4, 1)
    real, rows = padded.unpadded()
    assert rows.tolist() == [0]
    assert real.context_lens == (6,)
    assert padded.device_context_lens is padded.lengths


def test_padded_batches_of_several_sizes_share_tensors():
    large = PaddedDecodeBatch.allocate(4, 3, 4, "cpu")
    small = PaddedDecodeBatch.from_tensors(
        large.positions[:2],
        large.slot_blocks[:2],
        large.slot_offsets[:2],
        large.lengths[:2],
        large.block_tables[:2],
        4,
    )
    small.fill(decode_batch([9]))
    assert large.lengths.tolist() == [10, 0, 0, 0]
    assert small.context_lens == (12, 12)


def test_a_step_that_does_not_fit_a_padded_batch_is_refused():
    padded = PaddedDecodeBatch.allocate(2, 2, 4, "cpu")
    with pytest.raises(ValueError, match="3 sequences of up to 1 blocks do not fit a batch of 2"):
        padded.fill(decode_batch([1, 1, 1]))
    with pytest.raises(ValueError, match=r"1 sequences of up to 3 blocks .* up to 2"):
        padded.fill(decode_batch([9]))
    with pytest.raises(ValueError, match=r"over blocks of 4: 1 tokens of 1 .* blocks of 8"):
        padded.fill(decode_batch([1], 8))
    table = np.array([0], dtype=np.int32)
    with pytest.raises(ValueError, match="2 tokens of 1 sequences"):
        padded.fill(AttentionBatch.build([SequenceSlice(0, 2, table)], 4))
    with pytest.raises(ValueError, match="slot_blocks has 1 rows for 2 sequences"):
        PaddedDecodeBatch.from_tensors(
            padded.positions,
            padded.slot_blocks[:1],
            padded.slot_offsets,
            padded.lengths,
            padded.block_tables,
            4,
        )


def test_padding_is_neither_written_nor_read():
    batch = decode_batch([9, 3])
    padded = PaddedDecodeBatch.allocate(4, 5, 4, "cpu")
    padded.fill(batch)
    query, key, value = (torch.randn(4, n, 8) for n in (4, 2, 2))
    found, expected = caches(), caches()
    OPS.write_kv(key, value, *found, padded)
    OPS.write_kv(key[:2], value[:2], *expected, batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    options = AttentionOptions(0.3)
    output = OPS.paged_attention(query, *found, padded, options)
    assert torch.equal(output[:2], OPS.paged_attention(query[:2], *found, batch, options))
    assert (output[2:] == 0.0).all()


def test_nothing_but_padding():
    padded = PaddedDecodeBatch.allocate(3, 5, 4, "cpu")
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    found, expected = caches(), caches()
    OPS.write_kv(key, key, *found, padded)
    assert torch.equal(found[0], expected[0])
    assert (OPS.paged_attention(query, *found, padded, AttentionOptions(0.3)) == 0.0).all()


@pytest.mark.parametrize("starts", [[9, 3, 6], None], ids=["decode", "prefill"])
def test_an_8_bit_cache_is_what_it_holds_times_its_scale(starts):
    if starts is None:
        table = np.arange(3, dtype=np.int32)
        batch = AttentionBatch.build([SequenceSlice(4, 6, table)], 4)
    else:
        batch = decode_batch(starts)
    query = torch.randn(batch.num_tokens, 4, 8).bfloat16()
    small = caches(dtype=FLOAT8)
    whole = [cache.float() * 0.25 for cache in small]
    found = OPS.paged_attention(query, *small, batch, AttentionOptions(0.3, kv_scale=0.25))
    expected = OPS.paged_attention(query, *whole, batch, AttentionOptions(0.3))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0, rtol=2**-8)


def test_an_8_bit_cache_saturates():
    batch = decode_batch([0])
    key = torch.tensor([[[1e9, -1e9, 448.0, 17.2, 0.0, math.nan, 1.0, -1.0]] * 2])
    small = caches(dtype=FLOAT8)
    OPS.write_kv(key, key, *small, batch)
    written = small[0][int(batch.slot_blocks), 0, 0].float()
    expected = torch.tensor([448.0, -448.0, 448.0, 18.0, 0.0, math.nan, 1.0, -1.0])
    torch.testing.assert_close(written, expected, rtol=0, atol=1.0, equal_nan=True)


def test_a_cpu_computes_with_torch():
    assert isinstance(select_ops(torch.device("cpu")), TorchOps)


def test_cuda_without_triton_is_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "engine.kernels.triton.ops", None)
    select_ops.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert isinstance(select_ops(torch.device("cuda:7")), TorchOps)
    select_ops.cache_clear()
    (record,) = caplog.records
    assert "no Triton kernels, so plain torch computes on cuda:7" in record.getMessage()


# torch itself imports Triton where it is installed (torch._dynamo does), so here it is not.
STEP = """
import sys
sys.modules["triton"] = None
from configs.engine import CacheConfig, EngineConfig
from engine.executors.model import ModelExecutor
from engine.plan import Slice, Start, StepPlan
from engine.wire import SamplingParams

config = EngineConfig(
    model=sys.argv[1], device="cpu", cache=CacheConfig(block_size=16, num_blocks=4)
)
executor = ModelExecutor.load(config)
start = Start(0, (5, 6, 7), 3, SamplingParams(temperature=1.0, seed=1), ())
plan = StepPlan(0, (), ((0, 1),), (start,), (Slice(0, 0, 3, (2,), True),))
assert len(executor.execute(plan).sampled[0].token_ids) == 1
print(*(name for name in sys.modules if name.startswith("engine.kernels")))
"""


def test_an_engine_on_a_cpu_needs_no_triton():
    run = subprocess.run(
        [sys.executable, "-c", STEP, str(tiny_model("llama"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    loaded = run.stdout.splitlines()[-1].split()
    assert "engine.kernels.torch_ops" in loaded
    assert not [name for name in loaded if name.startswith("engine.kernels.triton")]
