"""Root mean square norms, alone and after an addition to the residual stream.

Invariant: computed in float32 from float32 sums; each row is read once.
"""

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Elements of a program that takes several short rows."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.rms_norm`; the rows of `x` may lie apart."""
    output = torch.empty(x.shape, dtype=dtype, device=x.device)
    heads = x if x.dim() == 3 else x[:, None]
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    tokens, inner, size = heads.shape
    num_rows = tokens * inner
    block, rows, num_warps = _shape(size)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        heads,
        weight,
        output,
        num_rows,
        heads.stride(0),
        heads.stride(1),
        eps,
        INNER=inner,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        num_warps=num_warps,
    )
    return output


def add_rms_norm(
    residual: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.add_rms_norm`; `residual` is contiguous."""
    update = update.contiguous()
    output = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    num_rows, size = residual.shape
    block, rows, num_warps = _shape(size)
    _add_rms_norm[(triton.cdiv(num_rows, rows),)](
        residual,
        update,
        residual if weight is None else weight,
        output,
        num_rows,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        HAS_WEIGHT=weight is not None,
        num_warps=num_warps,
    )
    return output


def _shape(size: int) -> tuple[int, int, int]:
    """Of rows with `size` elements: padded size, rows of a program, warps."""
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    return block, rows, min(16, max(1, block * rows // 512))


@triton.jit
def _normalised(x, weight, eps, columns, is_column, SIZE: tl.constexpr):
    mean_square = tl.sum(x * x, axis=1) / SIZE
    scaled = x * tl.rsqrt(mean_square + eps)[:, None]
    return scaled * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    weight,
    output,
    num_rows,
    outer_stride,
    inner_stride,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    places = rows // INNER * outer_stride + rows % INNER * inner_stride
    value = tl.load(x + places[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    result = _normalised(value, weight, eps, columns, is_column, SIZE)
    tl.store(
        output + rows[:, None] * SIZE + columns[None, :],
        result.to(output.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    residual,
    update,
    weight,
    output,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    places = rows[:, None] * SIZE + columns[None, :]
    value = tl.load(residual + places, mask=mask, other=0.0)
    value += tl.load(update + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + places, value, mask=mask)
    if HAS_WEIGHT:
        value = _normalised(value, weight, eps, columns, is_column, SIZE)
    tl.store(output + places, value.to(output.dtype.element_ty), mask=mask)
