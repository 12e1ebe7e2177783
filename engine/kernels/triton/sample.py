"""The largest of each row, as it is or with Gumbel noise.

Invariant: the result does not depend on how a row is cut into chunks: of equal ones the first wins.
Noise is `engine.sampling.noise`'s, its hash bit for bit.

A row is cut into chunks, so that few rows keep a whole card busy; a second kernel takes the largest
of their results.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.sampling.noise import signed_keys

_CHUNK = 2048


def row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `engine.kernels.ops.Ops.row_max`."""
    logits = logits.contiguous()
    ids = _best(logits, None)
    return logits.gather(1, ids[:, None])[:, 0], ids


def gumbel_argmax(scaled: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.gumbel_argmax`."""
    return _best(scaled.contiguous(), signed_keys(keys).to(scaled.device, non_blocking=True))


def _best(values: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    num_rows, size = values.shape
    chunks = triton.cdiv(size, _CHUNK)
    shape = (num_rows, chunks)
    best = torch.empty(shape, dtype=torch.float64, device=values.device)
    best_ids = torch.empty(shape, dtype=torch.int32, device=values.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _best_of_chunk[shape](
        values,
        values if keys is None else keys,
        best,
        best_ids,
        SIZE=size,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        NOISY=keys is not None,
        num_warps=8,
    )
    _best_of_row[(num_rows,)](
        best,
        best_ids,
        ids,
        CHUNKS=chunks,
        CHUNKS_PADDED=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return ids


@triton.jit
def _gumbel(key, ids):
    """`engine.sampling.noise.gumbel_noise` of `ids` under one key, float64."""
    z = key.to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best_of_chunk(
    values,
    keys,
    best,
    best_ids,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NOISY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < SIZE
    value = tl.load(values + row * SIZE + ids, mask=is_id, other=float("-inf")).to(tl.float64)
    if NOISY:
        value += _gumbel(tl.load(keys + row), ids)
    else:
        # NaN above everything; infinity just below it, and above all of float32.
        value = tl.where(value == float("inf"), 1e300, value)
        value = tl.where(value != value, float("inf"), value)
    largest, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * CHUNKS + chunk, largest)
    tl.store(best_ids + row * CHUNKS + chunk, chunk * CHUNK + place)


@triton.jit
def _best_of_row(best, best_ids, ids, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    value = tl.load(best + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))
    _, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(ids + row, tl.load(best_ids + row * CHUNKS + place).to(tl.int64))
