"""Decode against the bandwidth of the memory, prefill against the rate of matrix products.

Invariant: a step is timed as an engine runs it, the host's work included, and what it is held
against was measured just before, on the same device.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.figures import Figures
from bench.gpu_check.parts import NotRun, Result, Setting
from bench.gpu_check.shapes import EIGHT_BILLION, ONE_BILLION, TINY, Shape
from engine.executors.model import ModelExecutor
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import random_weights
from engine.models.traits import with_kv_dtype
from engine.plan import ExecutorInfo, Slice, Start, StepPlan
from engine.wire import SamplingParams

_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class _Load:
    """How much is measured."""

    context: int
    """Tokens of KV that each decoding request has."""
    prompt: int
    steps: int
    batches: tuple[int, ...] = (1, 64)
    repeats: int = 5


_FULL = _Load(context=1024, prompt=4096, steps=64)
_TINY = _Load(context=40, prompt=64, steps=4, repeats=2)


def measure_1b(setting: Setting) -> Result:
    return _measure(setting, ONE_BILLION)


def measure_8b(setting: Setting) -> Result:
    return _measure(setting, EIGHT_BILLION)


@torch.inference_mode()
def _measure(setting: Setting, shape: Shape) -> Result:
    load = _TINY if setting.is_tiny else _FULL
    shape = TINY if setting.is_tiny else shape
    dtype = torch.bfloat16
    result = Result()
    setting.progress("  bandwidth and products of the device itself")
    copy_rate = copy_bytes_per_s(setting)
    product_rate = product_flops_per_s(setting, dtype)
    result.figures |= {
        "copy_bytes_per_s": round(copy_rate),
        "product_flops_per_s": round(product_rate),
    }
    setting.progress("  making the model")
    traits, decoder = shape.traits(dtype)
    _check_room(setting, shape, load, traits.kv_bytes_per_token)
    weights = random_weights(traits, decoder, setting.device)
    model = FusedDecoder.over_weights(traits, decoder, weights, setting.device)
    result.figures |= {"weight_bytes": model.weight_bytes, "backend": type(model.backend).__name__}
    short = FusedDecoder.over_weights(
        with_kv_dtype(traits, "fp8"), decoder, weights, setting.device
    )
    runs = [("", model, batch) for batch in load.batches]
    runs += [("fp8_kv_", short, batch) for batch in load.batches]
    for name, of_model, batch in runs:
        setting.progress(f"  {name}decode, batch {batch}")
        step_s = _decode_step_s(setting, of_model, load, batch)
        kv_bytes = batch * load.context * of_model.traits.kv_bytes_per_token
        rate = (2 * shape.product_elements + kv_bytes) / step_s
        key = f"{name}decode_b{batch}"
        result.figures |= {
            f"{key}_step_s": _digits(step_s),
            f"{key}_tokens_per_s": _digits(batch / step_s),
            f"{key}_read_bytes_per_s": round(rate),
            f"{key}_share_of_copy": _digits(rate / copy_rate),
        }
    setting.progress("  prefill")
    result.figures |= _prefill(setting, model, load, shape, product_rate)
    for key, value in result.figures.items():
        if isinstance(value, float | int):
            result.expect(value > 0, f"{key} is {value}")
    return result


def _check_room(setting: Setting, shape: Shape, load: _Load, kv_bytes_per_token: int) -> None:
    """Raises `NotRun` where the model and the largest batch do not fit."""
    if setting.device.type != "cuda":
        return
    elements = shape.product_elements + shape.vocab_size * shape.hidden_size
    needed = 2 * elements + 1.5 * max(load.batches) * load.context * kv_bytes_per_token
    free = torch.cuda.mem_get_info(setting.device)[0]
    if needed > free:
        raise NotRun(f"it needs {needed:.3g} bytes of memory, and {free:.3g} are free")


def copy_bytes_per_s(setting: Setting) -> float:
    """Bytes read and written by a copy within the device."""
    size = (1 << 20) if setting.is_tiny else (1 << 30)
    source = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / seconds(setting, lambda: target.copy_(source))


def product_flops_per_s(setting: Setting, dtype: torch.dtype) -> float:
    """Of a square product."""
    size = 128 if setting.is_tiny else 8192
    left = torch.randn(size, size, dtype=dtype, device=setting.device)
    right = torch.randn(size, size, dtype=dtype, device=setting.device)
    return 2.0 * size**3 / seconds(setting, lambda: left @ right)


def seconds(setting: Setting, run: Callable[[], object], repeats: int = 10) -> float:
    """Median of runs, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        setting.synchronize()
        began_s = time.perf_counter()
        run()
        setting.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])


def _executor(model: FusedDecoder, num_blocks: int) -> ModelExecutor:
    traits = model.traits
    info = ExecutorInfo(
        model="random",
        fingerprint="",
        vocab_size=traits.vocab_size,
        max_model_len=traits.max_model_len,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        eos_token_ids=(),
        kv_bytes_per_token=traits.kv_bytes_per_token,
        weight_bytes=model.weight_bytes,
        device=str(model.device),
        dtype=traits.dtype,
    )
    return ModelExecutor(model, KVCache(traits, num_blocks, _BLOCK_SIZE, model.device), info)


def _decode_step_s(setting: Setting, model: FusedDecoder, load: _Load, batch: int) -> float:
    """Median seconds of a step in which `batch` requests draw a token each. Their KV is there
    already: zeros, which are read as fast as anything."""
    blocks = -(-(load.context + load.steps + 3) // _BLOCK_SIZE)
    executor = _executor(model, batch * blocks)
    starts = tuple(
        Start(
            run,
            tuple((run * 7919 + i) % model.traits.vocab_size for i in range(load.context)),
            load.context,
            _GREEDY,
            tuple(range(run * blocks, (run + 1) * blocks)),
        )
        for run in range(batch)
    )
    runs = tuple(range(batch))
    executor.execute(StepPlan(0, (), (), starts, (), decodes=runs))
    times = []
    for step in range(load.steps + 2):
        setting.synchronize()
        began_s = time.perf_counter()
        executor.execute(StepPlan(step + 1, (), (), (), (), decodes=runs))
        setting.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])


def _prefill(
    setting: Setting, model: FusedDecoder, load: _Load, shape: Shape, product_rate: float
) -> Figures:
    blocks = -(-(load.prompt + 1) // _BLOCK_SIZE)
    executor = _executor(model, blocks)
    tokens = tuple(i * 7919 % model.traits.vocab_size for i in range(load.prompt))
    counter = iter(range(1 << 30))

    def run() -> None:
        number = next(counter)
        start = Start(number, tokens, load.prompt, _GREEDY, tuple(range(blocks)))
        piece = Slice(number, 0, load.prompt, (), samples=True)
        executor.execute(StepPlan(number, (number - 1,), (), (start,), (piece,)))

    prefill_s = seconds(setting, run, load.repeats)
    rate = shape.prefill_flops(load.prompt) / prefill_s
    return {
        "prefill_tokens": load.prompt,
        "prefill_tokens_per_s": _digits(load.prompt / prefill_s),
        "prefill_flops_per_s": round(rate),
        "prefill_share_of_product": _digits(rate / product_rate),
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
