"""Prefill by compiled code against the same steps op by op, on the device itself.

Invariant: both run over the same weights and the same batches; what is compiled while a batch runs
counts as a failure.
"""

import time
from functools import partial

import numpy as np
import torch
from torch._dynamo.utils import counters

from bench.gpu_check.parts import Result, Setting
from bench.gpu_check.shapes import ONE_BILLION, TINY
from bench.gpu_check.speed import seconds
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.ops import select_ops
from engine.models.compiled_prefill import compile_prefill
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import random_weights
from engine.models.op_decoder import OpDecoder

_BLOCK_SIZE = 16
_LENGTHS = ((2048,), (4096,), (1,) * 30 + (700,), (17, 300, 5, 64), (2,))
"""Of the prompts of each batch; the first two are timed. Tiny ones are of a 32nd."""
_TOLERANCE = 0.05
"""Largest difference of logits, relative to their length, in bfloat16: other places are rounded."""


@torch.inference_mode()
def check_compiled(setting: Setting) -> Result:
    result = Result()
    traits, decoder = (TINY if setting.is_tiny else ONE_BILLION).traits(torch.bfloat16)
    weights = random_weights(traits, decoder, setting.device)
    ops = OpDecoder(traits, decoder, weights.tensors, select_ops(setting.device))
    model = FusedDecoder(traits, decoder, ops, setting.device, weights.num_bytes)
    batches = [_batch(setting, lengths) for lengths in _LENGTHS]
    cache = KVCache(traits, max(_num_blocks(batch) for batch in batches), _BLOCK_SIZE, model.device)

    def logits(batch: AttentionBatch) -> torch.Tensor:
        token_ids = torch.arange(batch.num_tokens, device=model.device) * 7919 % traits.vocab_size
        return model.forward(token_ids, batch, _last(batch), cache)

    setting.progress("  op by op")
    expected = [logits(batch) for batch in batches]
    for batch in batches[:2]:
        took_s = seconds(setting, partial(logits, batch), 5)
        result.figures[f"eager_{batch.num_tokens}_s"] = _digits(took_s)
    setting.progress("  compiling")
    began_s = time.perf_counter()
    # The compiler of a CPU takes longer than all else here.
    backend = "aot_eager" if setting.is_tiny else "inductor"
    result.expect(compile_prefill(model, backend=backend), "it was not compiled: see the log")
    num_compiled = int(counters["stats"]["unique_graphs"])
    result.figures |= {
        "compile_s": _digits(time.perf_counter() - began_s),
        "graphs": num_compiled,
    }
    setting.progress("  compiled")
    for batch, other in zip(batches, expected, strict=True):
        found = logits(batch)
        error = float((found - other).norm() / other.norm())
        result.figures["error"] = max(error, float(result.figures.get("error", 0.0)))
        result.expect(
            error <= _TOLERANCE, f"a step of {batch.num_tokens} tokens: error {error:.3g}"
        )
    for batch in batches[:2]:
        took_s = seconds(setting, partial(logits, batch), 5)
        result.figures[f"compiled_{batch.num_tokens}_s"] = _digits(took_s)
    late = int(counters["stats"]["unique_graphs"]) - num_compiled
    result.expect(late == 0, f"{late} graphs were compiled while batches ran")
    return result


def _batch(setting: Setting, lengths: tuple[int, ...]) -> AttentionBatch:
    if setting.is_tiny:
        lengths = tuple(max(2, length // 32) for length in lengths)
    slices, first = [], 0
    for length in lengths:
        count = -(-length // _BLOCK_SIZE)
        slices.append(SequenceSlice(0, length, np.arange(first, first + count, dtype=np.int32)))
        first += count
    return AttentionBatch.build(slices, _BLOCK_SIZE, setting.device)


def _num_blocks(batch: AttentionBatch) -> int:
    return int(batch.block_tables.max()) + 1


def _last(batch: AttentionBatch) -> torch.Tensor:
    return torch.tensor([end - 1 for end in batch.query_starts[1:]], device=batch.positions.device)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
