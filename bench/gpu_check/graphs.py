"""Decode steps replayed from a CUDA graph against the same steps run op by op.

Invariant: the graph is captured once and replayed over steps of other sizes and lengths, each of
which overwrites what the last one left in its tensors.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.gpu_check.parts import NotRun, Result, Setting
from bench.gpu_check.shapes import TINY, Shape
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.models.decoder_traits import DecoderTraits, ExpertNames, ExpertTraits
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import random_weights

_SMALL = Shape(1024, 2816, 4, 16, 4, 64, 8192, False)
_BLOCK_SIZE, _MAX_BLOCKS, _SIZE = 16, 40, 8
_EXPERTS = 8, 64
"""Of 8 all are computed for 8 tokens; of 64 the chosen ones are copied out."""
_COUNTS = (8, 5, 1, 8)
"""Sequences in each step; the rest of the captured batch is padding."""
_TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest of them, in float32."""

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]


def check_graphs(setting: Setting) -> Result:
    """Raises `NotRun` without a batch to capture, or a device that captures."""
    try:
        padded = import_module("engine.kernels.padded_batch").PaddedDecodeBatch
    except ModuleNotFoundError:
        raise NotRun("not built: there is no engine/kernels/padded_batch.py") from None
    if setting.device.type != "cuda":
        raise NotRun(f"graphs are captured on a GPU, not on {setting.device.type}")
    shape = TINY if setting.is_tiny else _SMALL
    result = Result()
    for num_experts in (0, *_EXPERTS):
        traits, decoder = shape.traits(torch.float32)
        if num_experts:
            decoder = _with_experts(decoder, num_experts, shape)
        weights = random_weights(traits, decoder, setting.device)
        model = FusedDecoder.over_weights(traits, decoder, weights, setting.device)
        found = compare_with_eager(setting, model, padded, _captured)
        name = f"experts_{num_experts}_" if num_experts else ""
        result.figures |= {name + key: value for key, value in found.figures.items()}
        result.failures += [name + text for text in found.failures]
    return result


def _with_experts(decoder: DecoderTraits, num_experts: int, shape: Shape) -> DecoderTraits:
    experts = ExpertTraits(
        layers=frozenset(range(shape.num_layers)),
        num_experts=num_experts,
        num_per_token=2,
        intermediate_size=shape.intermediate_size // 4,
        normalized=True,
        names=ExpertNames(),
    )
    return replace(decoder, experts=experts)


@torch.inference_mode()
def compare_with_eager(
    setting: Setting, model: FusedDecoder, padded: Any, capture: Capture
) -> Result:
    """`padded` is the class of batches whose tensors stay where they are."""
    result = Result()
    device, num_blocks = setting.device, _SIZE * _MAX_BLOCKS
    eager_cache, cache = (KVCache(model.traits, num_blocks, _BLOCK_SIZE, device) for _ in range(2))
    eager_cache.storage.normal_()
    cache.storage.copy_(eager_cache.storage)
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = tables.reshape(_SIZE, _MAX_BLOCKS)
    lengths = [1, 15, 16, 17, 100, 333, 500, 600]

    static = padded.allocate(_SIZE, _MAX_BLOCKS, _BLOCK_SIZE, device)
    tokens = torch.zeros(_SIZE, dtype=torch.int64, device=device)
    rows = torch.arange(_SIZE, device=device)
    replay = capture(lambda: model.forward(tokens, static, rows, cache))
    for number, count in enumerate(_COUNTS):
        slices = [SequenceSlice(lengths[s], 1, tables[s]) for s in range(count)]
        batch = AttentionBatch.build(slices, _BLOCK_SIZE, device)
        ids = torch.randint(model.traits.vocab_size, (count,), device=device)
        expected = model.forward(ids, batch, rows[:count], eager_cache)
        static.fill(batch)
        tokens[:count].copy_(ids)
        found = replay()[:count]
        error = float((found - expected).abs().max() / expected.abs().max())
        result.figures[f"step_{number}_error"] = error
        result.expect(error <= _TOLERANCE, f"a step of {count} sequences: error {error:.3g}")
        for sequence in range(count):
            lengths[sequence] += 1
    batch = AttentionBatch.build(
        [SequenceSlice(lengths[s], 1, tables[s]) for s in range(_SIZE)], _BLOCK_SIZE, device
    )
    result.figures |= {
        "eager_step_s": _seconds(setting, lambda: model.forward(tokens, batch, rows, cache)),
        "replayed_step_s": _seconds(setting, replay),
    }
    return result


def _captured(step: Step) -> Step:
    # What is allocated or compiled on first use must not be a part of the graph.
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def _seconds(setting: Setting, step: Step, repeats: int = 20) -> float:
    step()
    setting.synchronize()
    began_s = time.perf_counter()
    for _ in range(repeats):
        step()
    setting.synchronize()
    return float(f"{(time.perf_counter() - began_s) / repeats:.4g}")
