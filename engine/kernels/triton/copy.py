"""Copies of whole and of partial blocks, in all layers at once.

Invariant: bits are copied, whatever number format they are in; tokens beyond those asked for stay.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.kernels.ops import BlockCopy

_TILE = 1024
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def copy_blocks(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """See `engine.kernels.ops.Ops.copy_blocks`; `storage` is contiguous."""
    layers, kinds, num_blocks, kv_heads, block_size, head_dim = storage.shape
    size = block_size * head_dim
    table = torch.tensor(copies, dtype=torch.int32).to(storage.device, non_blocking=True)
    tile = min(_TILE, triton.next_power_of_2(size))
    _copy[(len(copies), layers * kinds * kv_heads)](
        storage.view(_WORDS[storage.itemsize]),
        table,
        num_blocks,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        SIZE=size,
        TILE=tile,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _copy(
    storage,
    copies,
    num_blocks,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head's part of one block in one layer."""
    copies += tl.program_id(0) * 3
    source = tl.load(copies)
    target = tl.load(copies + 1)
    count = tl.load(copies + 2) * HEAD_DIM
    plane = (tl.program_id(1) // KV_HEADS).to(tl.int64) * num_blocks
    head = tl.program_id(1) % KV_HEADS
    sources = storage + ((plane + source) * KV_HEADS + head) * SIZE
    targets = storage + ((plane + target) * KV_HEADS + head) * SIZE
    for begin in range(0, SIZE, TILE):
        places = begin + tl.arange(0, TILE)
        mask = places < count
        tl.store(targets + places, tl.load(sources + places, mask=mask), mask=mask)
