"""Rotary embedding, and writing keys and values to the paged cache.

Invariant: what goes into the cache is rounded to the model's dtype first, as if it had been stored
in between, and a token whose slot block is -1 is not written.

A program takes a few heads of one token: query heads first, then KV heads.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.triton.numbers import store_kv
from engine.kernels.triton.tuning import Tuning


def rope_and_write_kv(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    tuning: Tuning,
) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.rope_and_write_kv`; `heads` are query, key and value, also parts
    of one tensor."""
    query, key, value = (_rows(x) for x in heads)
    tokens, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    output = torch.empty((tokens, num_heads, head_dim), dtype=value.dtype, device=query.device)
    tile = min(tuning.head_tile, triton.next_power_of_2(max(num_heads, kv_heads)))
    query_parts = triton.cdiv(num_heads, tile)
    key_cache, value_cache = (_as_bytes(cache) for cache in caches)
    half = angles.cos.shape[1]
    _rotate_and_write[(tokens, query_parts + triton.cdiv(kv_heads, tile))](
        query,
        key,
        value,
        output,
        angles.cos,
        angles.sin,
        key_cache,
        value_cache,
        batch.slot_blocks,
        batch.slot_offsets,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=caches[0].shape[2],
        FLOAT8=key_cache.dtype == torch.uint8,
        QUERY_PARTS=query_parts,
        TILE=tile,
        num_warps=2,
    )
    return output


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    tuning: Tuning,
) -> None:
    """See `engine.kernels.ops.Ops.write_kv`."""
    key, value = _rows(key), _rows(value)
    tokens, kv_heads, head_dim = key.shape
    tile = min(tuning.head_tile, triton.next_power_of_2(kv_heads))
    key_cache, value_cache = (_as_bytes(cache) for cache in caches)
    _write[(tokens, triton.cdiv(kv_heads, tile))](
        key,
        value,
        key_cache,
        value_cache,
        batch.slot_blocks,
        batch.slot_offsets,
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=caches[0].shape[2],
        FLOAT8=key_cache.dtype == torch.uint8,
        TILE=tile,
        num_warps=2,
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` ``[T, heads, D]`` with the elements of a head next to each other."""
    return x if x.stride(2) == 1 else x.contiguous()


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def _copy_heads(
    source,
    head_stride,
    target,
    heads,
    is_head,
    BEGIN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Elements from BEGIN on of some heads, to the same places of `target`'s heads."""
    dims = tl.arange(0, DIM)
    mask = is_head[:, None] & ((dims >= BEGIN) & (dims < HEAD_DIM))[None, :]
    x = tl.load(source + heads[:, None] * head_stride + dims[None, :], mask=mask, other=0.0)
    store_kv(target[:, None] + dims[None, :], x.to(tl.float32), mask, FLOAT8)


@triton.jit
def _rotate_heads(
    source,
    head_stride,
    target,
    heads,
    is_head,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    ROUNDED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Some heads of one token, rotated; what is beyond the rotated elements stays as it is."""
    pairs = tl.arange(0, HALF_PADDED)
    is_pair = pairs < HALF
    mask = is_head[:, None] & is_pair[None, :]
    cosine = tl.load(cos + pairs, mask=is_pair, other=0.0)[None, :]
    sine = tl.load(sin + pairs, mask=is_pair, other=0.0)[None, :]
    places = source + heads[:, None] * head_stride + pairs[None, :]
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    low = (first * cosine - second * sine).to(ROUNDED).to(tl.float32)
    high = (second * cosine + first * sine).to(ROUNDED).to(tl.float32)
    store_kv(target[:, None] + pairs[None, :], low, mask, FLOAT8)
    store_kv(target[:, None] + HALF + pairs[None, :], high, mask, FLOAT8)
    if HEAD_DIM > 2 * HALF:
        _copy_heads(source, head_stride, target, heads, is_head, 2 * HALF, HEAD_DIM, DIM, FLOAT8)


@triton.jit
def _rotate_and_write(
    query,
    key,
    value,
    output,
    cos,
    sin,
    key_cache,
    value_cache,
    slot_blocks,
    slot_offsets,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FLOAT8: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    ROUNDED: tl.constexpr = output.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    if part < QUERY_PARTS:
        heads = part * TILE + tl.arange(0, TILE)
        _rotate_heads(
            query + token * query_token_stride,
            query_head_stride,
            output + (token * HEADS + heads) * HEAD_DIM,
            heads,
            heads < HEADS,
            cos,
            sin,
            HEAD_DIM,
            HALF,
            HALF_PADDED,
            DIM,
            ROUNDED,
            False,
        )
    else:
        block = tl.load(slot_blocks + token)
        if block >= 0:
            heads = (part - QUERY_PARTS) * TILE + tl.arange(0, TILE)
            slots = (block * KV_HEADS + heads) * BLOCK_SIZE + tl.load(slot_offsets + token)
            _rotate_heads(
                key + token * key_token_stride,
                key_head_stride,
                key_cache + slots * HEAD_DIM,
                heads,
                heads < KV_HEADS,
                cos,
                sin,
                HEAD_DIM,
                HALF,
                HALF_PADDED,
                DIM,
                ROUNDED,
                FLOAT8,
            )
            _copy_heads(
                value + token * value_token_stride,
                value_head_stride,
                value_cache + slots * HEAD_DIM,
                heads,
                heads < KV_HEADS,
                0,
                HEAD_DIM,
                DIM,
                FLOAT8,
            )


@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
    slot_blocks,
    slot_offsets,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FLOAT8: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + token)
    if block >= 0:
        heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_head = heads < KV_HEADS
        slots = (block * KV_HEADS + heads) * BLOCK_SIZE + tl.load(slot_offsets + token)
        keys = key + token * key_token_stride
        values = value + token * value_token_stride
        key_slots = key_cache + slots * HEAD_DIM
        value_slots = value_cache + slots * HEAD_DIM
        _copy_heads(keys, key_head_stride, key_slots, heads, is_head, 0, HEAD_DIM, DIM, FLOAT8)
        _copy_heads(
            values, value_head_stride, value_slots, heads, is_head, 0, HEAD_DIM, DIM, FLOAT8
        )
