"""Paged attention of a ragged batch, prefill and decode in one launch.

Invariant: no place of the cache at or past a sequence's length is read, and a row's result depends
on nothing but its own sequence.

A program computes ROWS rows for one KV head: queries of one sequence that follow each other, each
with every head of the group, so a group of any size shares what is read of the cache. Softmax is
computed online over tiles of keys (FlashAttention-2, https://arxiv.org/abs/2307.08691); a tile is
gathered key by key through the block table, so its size has nothing to do with the block size.

Sequence s has ``ceil(queries / BLOCK_QUERIES)`` programs for each head. Its first one is number
``query_starts[s] // BLOCK_QUERIES + s``, which leaves it enough room and is found by bisection
without a table; the one program too many that some sequences get ends at once.

Where that makes too few programs, SEGMENTS of them share a sequence's keys and leave unnormalised
float32 results, which `_merge_segments` joins (Flash-Decoding).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.batch import AttentionBatch
from engine.kernels.reference import AttentionOptions
from engine.kernels.triton.numbers import from_float8, tanh
from engine.kernels.triton.tuning import Tuning


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    tuning: Tuning,
) -> torch.Tensor:
    """See `engine.kernels.ops.Ops.paged_attention`; caches are contiguous, and also float8 e4m3."""
    query = query.contiguous()
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    plan = _plan(query, key_cache, batch, tuning)
    output = torch.empty_like(query)
    split = plan.segments > 1
    parts, maxima, sums = _partials(output, plan.segments) if split else (output, output, output)
    sinks = output if options.sinks is None else options.sinks
    is_float8 = key_cache.dtype == torch.float8_e4m3fn
    # The interpreter multiplies no bfloat16.
    interpreted = not isinstance(_attend, triton.JITFunction)
    dtype = _TRITON_DTYPES[query.dtype]
    _attend[(plan.blocks, kv_heads, plan.segments)](
        query,
        key_cache.view(torch.uint8) if is_float8 else key_cache,
        value_cache.view(torch.uint8) if is_float8 else value_cache,
        parts,
        maxima,
        sums,
        sinks,
        batch.device_query_starts,
        batch.device_context_lens,
        batch.block_tables,
        batch.num_sequences,
        batch.block_tables.stride(0),
        options.scale * options.kv_scale,
        options.kv_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=plan.dim,
        BLOCK_SIZE=block_size,
        WINDOW=options.sliding_window or 0,
        SOFTCAP=options.softcap or 0.0,
        HAS_SINKS=options.sinks is not None,
        FLOAT8=is_float8,
        ONE_QUERY=batch.max_query_len == 1,
        SEGMENTS=plan.segments,
        ROWS=plan.rows,
        KEYS=plan.keys,
        ROUNDED=dtype,
        OPERAND=tl.float32 if interpreted else dtype,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if split:
        _merge_segments[(query.shape[0] * heads,)](
            parts,
            maxima,
            sums,
            sinks,
            output,
            options.kv_scale,
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIM=plan.dim,
            HAS_SINKS=options.sinks is not None,
            SEGMENTS=plan.segments,
            SEGMENTS_PADDED=triton.next_power_of_2(plan.segments),
            num_warps=4,
        )
    return output


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The shape of a launch: a function of what the host knows."""

    blocks: int
    """Programs along the queries: of each sequence, as above, or one each."""
    segments: int
    rows: int
    keys: int
    dim: int
    """The head size, padded to a power of two."""
    num_warps: int
    num_stages: int


def _plan(
    query: torch.Tensor, key_cache: torch.Tensor, batch: AttentionBatch, tuning: Tuning
) -> _Plan:
    num_tokens, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    one_query = batch.max_query_len == 1
    tiles = tuning.decode if one_query else tuning.prefill
    rows = max(tiles.rows, triton.next_power_of_2(group))
    blocks = batch.num_sequences
    if not one_query:
        blocks += num_tokens // (rows // group)
    dim = max(16, triton.next_power_of_2(head_dim))
    # Eight bits become the query's dtype before they are multiplied.
    itemsize = max(query.itemsize, key_cache.itemsize)
    return _Plan(
        blocks=blocks,
        segments=tuning.num_segments(blocks * kv_heads, batch.max_context_len),
        rows=rows,
        keys=tiles.keys_for(dim, itemsize),
        dim=dim,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _partials(
    output: torch.Tensor, segments: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for each segment's weighted sum of values, largest score and sum of weights."""
    tokens, heads, head_dim = output.shape
    shape = (tokens, heads, segments)
    return (
        torch.empty((*shape, head_dim), dtype=torch.float32, device=output.device),
        torch.empty(shape, dtype=torch.float32, device=output.device),
        torch.empty(shape, dtype=torch.float32, device=output.device),
    )


@triton.jit
def _sequence_of(block, query_starts, num_sequences, BLOCK_QUERIES: tl.constexpr):
    """The last sequence whose first program is not after number `block`."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle) // BLOCK_QUERIES + middle
        low = tl.where(first <= block, middle, low)
        high = tl.where(first <= block, high, middle)
    return low


@triton.jit
def _load_operand(pointers, mask, FLOAT8: tl.constexpr, OPERAND: tl.constexpr):
    """Keys or values; 0 where they are not to be read."""
    x = tl.load(pointers, mask=mask, other=0)
    if FLOAT8:
        x = from_float8(x)
    return x.to(OPERAND)


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _attend(
    query,
    key_cache,
    value_cache,
    output,
    maxima,
    sums,
    sinks,
    query_starts,
    context_lens,
    block_tables,
    num_sequences,
    table_stride,
    score_scale,
    value_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ROUNDED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_QUERIES: tl.constexpr = 1 if ONE_QUERY else ROWS // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    if ONE_QUERY:
        sequence = block
        start = block
        num_queries = 1
        first_query = 0
    else:
        sequence = _sequence_of(block, query_starts, num_sequences, BLOCK_QUERIES)
        start = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - start
        first_query = (block - start // BLOCK_QUERIES - sequence) * BLOCK_QUERIES
        if first_query >= num_queries:
            return
    context_len = tl.load(context_lens + sequence)

    lanes = tl.arange(0, ROWS)
    queries = first_query + lanes // GROUP
    is_row = (lanes < BLOCK_QUERIES * GROUP) & (queries < num_queries)
    positions = context_len - num_queries + queries
    heads = kv_head * GROUP + lanes % GROUP
    rows = (start + queries).to(tl.int64) * HEADS + heads
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    q = tl.load(
        query + rows[:, None] * HEAD_DIM + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    ).to(OPERAND)

    # Tiles that hold something for at least one row, and of these the segment's.
    first_position = context_len - num_queries + first_query
    end_key = tl.minimum(first_position + BLOCK_QUERIES, context_len)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_position - WINDOW + 1, 0) // KEYS
    end_tile = tl.cdiv(end_key, KEYS)
    segment_tiles = tl.cdiv(end_tile - first_tile, SEGMENTS)
    first_tile += segment * segment_tiles
    end_tile = tl.minimum(first_tile + segment_tiles, end_tile)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile):
        keys = tile * KEYS + tl.arange(0, KEYS)
        is_key = keys < context_len
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        places = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        k = _load_operand(
            key_cache + places[None, :] * HEAD_DIM + dims[:, None],
            is_dim[:, None] & is_key[None, :],
            FLOAT8,
            OPERAND,
        )
        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        if SOFTCAP > 0.0:
            scores = SOFTCAP * tanh(scores / SOFTCAP)
        is_seen = (keys[None, :] <= positions[:, None]) & is_row[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no largest score to measure from.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        v = _load_operand(
            value_cache + places[:, None] * HEAD_DIM + dims[None, :],
            is_key[:, None] & is_dim[None, :],
            FLOAT8,
            OPERAND,
        )
        weights = weights.to(ROUNDED).to(OPERAND)
        result = tl.dot(weights, v, result * shrink[:, None], input_precision="ieee")
        row_max = new_max

    if SEGMENTS > 1:
        tl.store(maxima + rows * SEGMENTS + segment, row_max, mask=is_row)
        tl.store(sums + rows * SEGMENTS + segment, row_sum, mask=is_row)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
            base = tl.maximum(row_max, sink)
            base = tl.where(base == float("-inf"), 0.0, base)
            shrink = tl.exp(row_max - base)
            row_sum = row_sum * shrink + tl.exp(sink - base)
            result = result * shrink[:, None]
        # Padding has seen nothing: 0.
        result = result * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    tl.store(
        output + (rows * SEGMENTS + segment)[:, None] * HEAD_DIM + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit
def _merge_segments(
    parts,
    maxima,
    sums,
    sinks,
    output,
    value_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segments = tl.arange(0, SEGMENTS_PADDED)
    places = row * SEGMENTS + segments
    is_segment = segments < SEGMENTS
    largest = tl.load(maxima + places, mask=is_segment, other=float("-inf"))
    base = tl.max(largest, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32)
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    shrink = tl.exp(largest - base)
    total = tl.sum(shrink * tl.load(sums + places, mask=is_segment, other=0.0), axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - base)
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    found = tl.load(
        parts + places[:, None] * HEAD_DIM + dims[None, :],
        mask=is_segment[:, None] & is_dim[None, :],
        other=0.0,
    )
    result = tl.sum(found * shrink[:, None], axis=0)
    result = result * (value_scale / tl.where(total == 0.0, 1.0, total))
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=is_dim)
