"""The device's ops against plain torch on the same device.

Invariant: caches hold NaN wherever nothing was written, so that a kernel that reads past a
sequence shows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.gpu_check.parts import NotRun, Result, Setting
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.reference import AttentionOptions

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference, relative to the largest value of the reference."""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Case:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None
    """Of the caches, where that is not `dtype`."""


def check_kernels(setting: Setting) -> Result:
    """Raises `NotRun` where there is no op set, or none for this device."""
    try:
        module = import_module("engine.kernels.ops")
    except ModuleNotFoundError:
        raise NotRun("not built: there is no engine/kernels/ops.py") from None
    ops, oracle = module.select_ops(setting.device), module.TorchOps()
    name = type(ops).__name__
    if setting.device.type == "cuda" and name == "TorchOps":
        raise NotRun("not built: plain torch computes here, for want of Triton or its kernels")
    result = Result(figures={"backend": name})
    torch.manual_seed(0)
    for check in (_attention, _float8, _rope, _norms, _activations, _draws, _copies):
        setting.progress(f"  {check.__name__.strip('_')}")
        check(setting, ops, oracle, result)
    return result


def _cases(setting: Setting) -> Iterator[_Case]:
    dtypes = (torch.float32,) if setting.is_tiny else tuple(_TOLERANCE)
    large = ((32, 8, 128), (32, 8, 64), (9, 3, 64), (8, 1, 96))
    shapes = ((4, 2, 16),) if setting.is_tiny else large
    for (heads, kv_heads, head_dim), dtype in itertools.product(shapes, dtypes):
        yield _Case(heads, kv_heads, head_dim, dtype)
    heads, kv_heads, head_dim = shapes[0]
    yield _Case(heads, kv_heads, head_dim, dtypes[0], window=37)
    yield _Case(heads, kv_heads, head_dim, dtypes[0], softcap=20.0)
    yield _Case(heads, kv_heads, head_dim, dtypes[0], has_sinks=True)
    for heads, kv_heads, head_dim in shapes:
        yield _Case(heads, kv_heads, head_dim, dtypes[-1], kv_dtype=torch.float8_e4m3fn)


def _attention(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    """Prefill from the start and from within, decodes, and one long sequence alone."""
    long = 200 if setting.is_tiny else 4000
    mixed = [(0, 65), (40, 33), (99, 1), (0, 1), (long, 1), (15, 1), (16, 17)]
    for case in _cases(setting):
        for layout in (mixed, [(long, 1)], [(long - 100, 100)]):
            error = _attention_error(setting, ops, oracle, case, layout)
            result.expect(
                error <= _TOLERANCE[case.dtype], f"attention {case}, {layout}: error {error:.3g}"
            )
            name = str(case.kv_dtype or case.dtype).removeprefix("torch.")
            key = f"attention_error_{name}"
            result.figures[key] = max(error, float(result.figures.get(key, 0.0)))


def _attention_error(
    setting: Setting, ops: Any, oracle: Any, case: _Case, layout: list[tuple[int, int]]
) -> float:
    device = setting.device
    counts = [-(-(start + length) // _BLOCK_SIZE) for start, length in layout]
    ids = torch.randperm(sum(counts)).numpy().astype(np.int32)
    tables = np.split(ids, np.cumsum(counts)[:-1])
    slices = [
        SequenceSlice(start, length, table)
        for (start, length), table in zip(layout, tables, strict=True)
    ]
    batch = AttentionBatch.build(slices, _BLOCK_SIZE, device)
    shape = (sum(counts), case.kv_heads, _BLOCK_SIZE, case.head_dim)
    dtype = case.kv_dtype or case.dtype
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    for item in slices:
        places = np.arange(item.start)
        blocks = torch.from_numpy(item.block_ids[places // _BLOCK_SIZE].astype(np.int64)).to(device)
        offsets = torch.from_numpy(places % _BLOCK_SIZE).to(device)
        for cache in caches:
            known = torch.randn(item.start, case.kv_heads, case.head_dim, device=device)
            cache[blocks, :, offsets] = known.to(dtype)
    tokens = batch.num_tokens
    key, value = (
        torch.randn(tokens, case.kv_heads, case.head_dim, device=device).to(case.dtype)
        for _ in range(2)
    )
    query = torch.randn(tokens, case.heads, case.head_dim, device=device).to(case.dtype)
    sinks = torch.randn(case.heads, device=device) if case.has_sinks else None
    options = AttentionOptions(case.head_dim**-0.5, case.window, case.softcap, sinks)
    ops.write_kv(key, value, *caches, batch)
    found = ops.paged_attention(query, *caches, batch, options)
    expected = oracle.paged_attention(query, *caches, batch, options)
    return _error(found, expected)


def _float8(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    """What a cache of 8 bits is given: rounded bit for bit as torch does, and never infinite."""
    device = setting.device
    batch = AttentionBatch.build(
        [SequenceSlice(0, 40, np.arange(3, dtype=np.int32))], _BLOCK_SIZE, device
    )
    key, value = (torch.randn(40, 2, 64, device=device) * 300 for _ in range(2))
    written = []
    for back_end in (ops, oracle):
        shape = (2, 3, 2, _BLOCK_SIZE, 64)
        caches = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
        back_end.write_kv(key, value, caches[0], caches[1], batch)
        written.append(caches.view(torch.uint8))
    num_other = int((written[0] != written[1]).sum())
    result.expect(num_other == 0, f"{num_other} values of an 8-bit cache differ")


def _rope(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    angles_of = import_module("engine.kernels.batch").Angles
    device, dtype = setting.device, torch.bfloat16
    batch = AttentionBatch.build(
        [SequenceSlice(0, 40, np.arange(3, dtype=np.int32)[::-1].copy())], _BLOCK_SIZE, device
    )
    turns = torch.randn(40, 32, device=device)
    angles = angles_of(turns.cos(), turns.sin())
    query, key, value = (torch.randn(40, heads, 64, device=device).to(dtype) for heads in (8, 2, 2))
    outputs = []
    for back_end in (ops, oracle):
        caches = tuple(
            torch.zeros(3, 2, _BLOCK_SIZE, 64, dtype=dtype, device=device) for _ in range(2)
        )
        # Each gets its own: a back end may turn in place.
        rotated = back_end.rope_and_write_kv(
            query.clone(), key.clone(), value.clone(), angles, caches, batch
        )
        outputs.append((rotated, *caches))
    for name, found, expected in zip(("query", "key", "value"), *outputs, strict=True):
        error = _error(found, expected)
        result.expect(error <= _TOLERANCE[dtype], f"rope, {name}: error {error:.3g}")


def _norms(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    for width in (64,) if setting.is_tiny else (2048, 4096, 4000):
        residual = torch.randn(33, width, device=setting.device)
        update, weight = torch.randn_like(residual), torch.randn(width, device=setting.device)
        sums, normed = [], []
        for back_end in (ops, oracle):
            total = residual.clone()
            normed.append(back_end.add_rms_norm(total, update, weight, 1e-5, torch.bfloat16))
            sums.append(total)
        error = max(_error(*normed) / 100, _error(*sums))
        result.expect(error <= 1e-4, f"norm of {width}: error {error:.3g}")


def _activations(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    gate_up = torch.randn(33, 2 * (64 if setting.is_tiny else 8192), device=setting.device)
    for kind in ("silu", "gelu", "gelu_tanh"):
        error = _error(ops.gated_activation(gate_up, kind), oracle.gated_activation(gate_up, kind))
        result.expect(error <= 1e-4, f"{kind}: error {error:.3g}")


def _draws(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    vocabulary = 1000 if setting.is_tiny else 128256
    logits = torch.randn(64, vocabulary, device=setting.device)
    for found, expected in zip(ops.row_max(logits), oracle.row_max(logits), strict=True):
        result.expect(bool((found == expected).all()), "row_max differs")
    scaled, keys = logits[:16].double(), [(1 << 63) + 12345 * i for i in range(16)]
    found = ops.gumbel_argmax(scaled.clone(), keys)
    expected = oracle.gumbel_argmax(scaled.clone(), keys)
    num_other = int((found != expected).sum())
    result.figures["draws_that_differ"] = num_other
    result.expect(num_other == 0, f"{num_other} of 16 draws differ")


def _copies(setting: Setting, ops: Any, oracle: Any, result: Result) -> None:
    storage = torch.randn(2, 2, 12, 2, _BLOCK_SIZE, 64, device=setting.device)
    copies = [(0, 5, _BLOCK_SIZE), (1, 6, 3), (2, 7, 1)]
    found, expected = storage.clone(), storage.clone()
    ops.copy_blocks(found, copies)
    oracle.copy_blocks(expected, copies)
    result.expect(torch.equal(found, expected), "copied blocks differ")


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).abs()
    worst = difference.max() / expected.double().abs().max().clamp_min(1e-12)
    return float(worst.nan_to_num(nan=float("inf")))
