"""Paged attention in plain torch: the oracle that every other back end is compared with.

Invariant: the result depends on nothing at or past a sequence's length. Blocks that were freed may
hold NaN, and ``0 * NaN`` is NaN, so a masked score is overwritten, whatever it was, and a masked
value is set to zero. Scores, softmax and the weighted sum are float32 whatever the cache holds.
"""

from dataclasses import dataclass, replace

import torch

from engine.kernels.batch import AttentionBatch, DecodeGroup

# Elements of a prefill chunk's scores in float32: 64 MiB. With `batch._MAX_GROUP_TOKENS` for decode
# it bounds peak memory however long the contexts are.
_MAX_SCORES = 1 << 24
FLOAT8_MAX = 448.0
"""The largest number of float8 e4m3, in which a cache may be."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of attention besides its tensors."""

    scale: float
    """Multiplies the scores before anything else."""
    sliding_window: int | None = None
    """Keys a query sees, itself included; none: all before it."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: torch.Tensor | None = None
    """[H], one logit a head that takes part in the softmax and has no value."""
    kv_scale: float = 1.0
    """What the caches hold, times this, are the keys and values: for caches of 8 bits, whose writer
    divided by it."""


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """Puts this step's keys and values ``[T, KV, D]`` into their slots of the layer's cache
    ``[num_blocks, KV, block_size, D]``. Writing the same step again changes nothing."""
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        if cache.dtype == torch.float8_e4m3fn:
            # Beyond its largest number lies NaN.
            tokens = tokens.clamp(-FLOAT8_MAX, FLOAT8_MAX)
        cache[batch.slot_blocks, :, batch.slot_offsets] = tokens.to(cache.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of each token to its own sequence, itself included.

    `query` is ``[T, H, D]`` with H a multiple of the cache's heads (query head h reads head
    ``h // (H / KV)``); this step's keys and values must be in the cache already. Returns
    ``[T, H, D]`` in the query's dtype.
    """
    if options.kv_scale != 1.0:
        # Scores and result are linear in it.
        unscaled = replace(options, scale=options.scale * options.kv_scale, kv_scale=1.0)
        found = paged_attention(query.float(), key_cache, value_cache, batch, unscaled)
        return (found * options.kv_scale).to(query.dtype)
    output = torch.empty_like(query)
    caches = (key_cache, value_cache)
    for sequence in batch.prefills:
        rows = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        output[rows] = _prefill(query[rows], caches, batch, sequence, options)
    for group in batch.decode_groups:
        output[group.rows] = _decode(query[group.rows], caches, group, options)
    return output


def _decode(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    group: DecodeGroup,
    options: AttentionOptions,
) -> torch.Tensor:
    """One token each for N sequences: ``[N, H, D]`` to ``[N, H, D]``."""
    num, heads, head_dim = query.shape
    kv_heads = caches[0].shape[1]
    keys, values = (_gather_padded(cache, group) for cache in caches)
    sequences, places = group.padding
    values[sequences, :, places] = 0.0
    grouped = query.float().view(num, kv_heads, heads // kv_heads, head_dim)
    scores = grouped @ keys.transpose(2, 3)
    place = torch.arange(keys.shape[2], device=query.device)[None, :]
    hidden = place >= group.lengths[:, None]
    if options.sliding_window is not None:
        hidden |= place < group.lengths[:, None] - options.sliding_window
    weights = _softmax(
        scores, hidden[:, None, None, :], options, (1, kv_heads, heads // kv_heads, 1)
    )
    return (weights @ values).reshape(num, heads, -1).to(query.dtype)


def _gather_padded(cache: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    """All blocks of N sequences, float32 ``[N, KV, L, D]``."""
    num, blocks = group.tables.shape
    _, kv_heads, block_size, head_dim = cache.shape
    # Blocks are copied whole (index_select does that, indexing goes by element); the one copy that
    # reorders them also converts them.
    found = _blocks(cache, group.tables.flatten())
    gathered = torch.empty(
        num, kv_heads, blocks, block_size, head_dim, dtype=torch.float32, device=cache.device
    )
    gathered.copy_(found.view(num, blocks, kv_heads, block_size, head_dim).transpose(1, 2))
    return gathered.view(num, kv_heads, blocks * block_size, head_dim)


def _prefill(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    sequence: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Several tokens of one sequence: ``[Q, H, D]`` to ``[Q, H, D]``, queries in chunks."""
    num, heads, head_dim = query.shape
    context_len = batch.context_lens[sequence]
    start = context_len - num
    window = options.sliding_window
    chunk = max(1, _MAX_SCORES // (heads * context_len))
    output = torch.empty_like(query)
    for first in range(0, num, chunk):
        end = min(first + chunk, num)
        low = 0 if window is None else max(0, start + first - window + 1)
        high = start + end
        keys, values = (_gather_range(cache, batch, sequence, low, high) for cache in caches)
        kv_heads = keys.shape[0]
        # [Q, H, D] to [KV, G * Q, D]: one product for all heads of a group.
        grouped = query[first:end].float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = (grouped @ keys.transpose(1, 2)).view(
            kv_heads, heads // kv_heads, end - first, high - low
        )
        places = torch.arange(low, high, device=query.device)[None, :]
        queries = torch.arange(start + first, start + end, device=query.device)[:, None]
        hidden = places > queries
        if window is not None:
            hidden |= places <= queries - window
        weights = _softmax(scores, hidden, options, (kv_heads, heads // kv_heads, 1, 1))
        result = weights.reshape(kv_heads, -1, high - low) @ values
        output[first:end] = result.view(heads, end - first, -1).transpose(0, 1).to(query.dtype)
    return output


def _gather_range(
    cache: torch.Tensor, batch: AttentionBatch, sequence: int, low: int, high: int
) -> torch.Tensor:
    """Tokens ``[low, high)`` of one sequence, float32 ``[KV, high - low, D]``."""
    _, kv_heads, block_size, head_dim = cache.shape
    first_block, end_block = low // block_size, -(-high // block_size)
    found = _blocks(cache, batch.block_tables[sequence, first_block:end_block])
    gathered = torch.empty(
        kv_heads, len(found), block_size, head_dim, dtype=torch.float32, device=cache.device
    )
    gathered.copy_(found.transpose(0, 1))
    offset = first_block * block_size
    return gathered.view(kv_heads, -1, head_dim)[:, low - offset : high - offset]


def _blocks(cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``cache[index]``, copied block by block."""
    if cache.itemsize > 1:
        return cache.index_select(0, index)
    # torch selects no rows of 8-bit floats.
    return cache.view(torch.uint8).index_select(0, index).view(cache.dtype)


def _softmax(
    scores: torch.Tensor,
    hidden: torch.Tensor,
    options: AttentionOptions,
    sink_shape: tuple[int, int, int, int],
) -> torch.Tensor:
    """Weights from raw products: ``[N, KV, G, L]`` in decode, ``[KV, G, Q, L]`` in prefill.

    `hidden` broadcasts against them, and the sinks do in `sink_shape`. A sink is one more column
    that is dropped after the softmax (gpt-oss, https://arxiv.org/abs/2508.10925).
    """
    scores = scores.mul_(options.scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if options.sinks is None:
        return torch.softmax(scores, dim=-1)
    column = options.sinks.float().view(sink_shape).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of `logits` ``[N, V]``, NaN if there is one, and its place."""
    best, ids = logits.max(dim=-1)
    return best, ids
