"""What a step's attention works on: a packed, ragged batch over a paged KV cache.

Invariant: built once per step and read by every layer; nothing in it depends on the layer, and
nothing in it changes after `AttentionBatch.build`.

The cache of one layer is a pair of tensors ``[num_blocks, kv_heads, block_size, head_dim]``, so
that the tokens of one head in one block are contiguous. Token ``i`` of a sequence lies in block
``block_table[i // block_size]`` at offset ``i % block_size``. The T tokens of a step are packed
without padding: sequence ``s`` owns rows ``query_starts[s] : query_starts[s + 1]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

# Padded tokens of one `DecodeGroup`: it bounds the memory of a gather that needs padding.
_MAX_GROUP_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: tokens ``[start, start + length)``."""

    start: int
    """Tokens whose KV is in the cache already."""
    length: int
    """Tokens computed in this step, at least one."""
    block_ids: NDArray[np.int32]
    """Physical blocks, enough for ``start + length`` tokens; more are ignored."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosine and sine of each token's rotary embedding, float32 ``[T, rotated / 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """N sequences of similar length with one query each, padded to L tokens (whole blocks)."""

    rows: torch.Tensor
    """[N] int64, their rows in the packed batch."""
    tables: torch.Tensor
    """[N, L / block_size] int64; entries beyond a sequence's own blocks are 0."""
    lengths: torch.Tensor
    """[N] int64, their context lengths."""
    padding: tuple[torch.Tensor, torch.Tensor]
    """Index pairs (sequence, place) of everything at or past a length, int64."""


@dataclass(frozen=True)
class AttentionBatch:
    """The layout of T tokens of S sequences."""

    positions: torch.Tensor
    """[T] int64, each token's index in its sequence."""
    slot_blocks: torch.Tensor
    """[T] int64, the physical block that takes a token's K and V."""
    slot_offsets: torch.Tensor
    """[T] int64, its place in that block."""
    query_starts: tuple[int, ...]
    """[S + 1], first row of each sequence; the last is T."""
    context_lens: tuple[int, ...]
    """[S], tokens a sequence has once this step's are written."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32; entries beyond ``ceil(context_len / block_size)`` are 0."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @cached_property
    def max_query_len(self) -> int:
        """The most queries that a sequence has."""
        starts = self.query_starts
        return max(starts[s + 1] - starts[s] for s in range(self.num_sequences))

    @cached_property
    def max_context_len(self) -> int:
        """The longest of `context_lens`."""
        return max(self.context_lens)

    @cached_property
    def device_query_starts(self) -> torch.Tensor:
        """`query_starts`, int32 on the batch's device; made when first asked for."""
        device = self.block_tables.device
        return torch.tensor(self.query_starts, dtype=torch.int32, device=device)

    @cached_property
    def device_context_lens(self) -> torch.Tensor:
        """`context_lens`, int32 on the batch's device; made when first asked for."""
        device = self.block_tables.device
        return torch.tensor(self.context_lens, dtype=torch.int32, device=device)

    @cached_property
    def prefills(self) -> tuple[int, ...]:
        """Sequences with more than one query."""
        starts = self.query_starts
        return tuple(s for s in range(self.num_sequences) if starts[s + 1] - starts[s] > 1)

    @cached_property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        """The sequences with one query, shortest first, in groups with little padding: for back
        ends without a ragged kernel. Computed when first asked for."""
        groups: list[list[int]] = []
        prefills = set(self.prefills)
        decodes = [s for s in range(self.num_sequences) if s not in prefills]
        for sequence in sorted(decodes, key=lambda s: self.context_lens[s]):
            padded = self.context_lens[sequence] * (len(groups[-1]) + 1 if groups else 1)
            if not groups or padded > _MAX_GROUP_TOKENS:
                groups.append([])
            groups[-1].append(sequence)
        return tuple(self._decode_group(group) for group in groups)

    def _decode_group(self, sequences: list[int]) -> DecodeGroup:
        device = self.block_tables.device
        lengths = [self.context_lens[s] for s in sequences]
        num_blocks = -(-max(lengths) // self.block_size)
        places = np.arange(num_blocks * self.block_size)
        padding = np.nonzero(places[None, :] >= np.array(lengths)[:, None])
        index = torch.tensor(sequences, device=device)
        return DecodeGroup(
            rows=torch.tensor([self.query_starts[s] for s in sequences], device=device),
            tables=self.block_tables[index, :num_blocks].long(),
            lengths=torch.tensor(lengths, device=device),
            padding=(
                torch.from_numpy(padding[0]).to(device),
                torch.from_numpy(padding[1]).to(device),
            ),
        )

    @classmethod
    def build(
        cls,
        slices: Sequence[SequenceSlice],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionBatch":
        """Packs `slices` in their order.

        Raises `ValueError` for an empty batch or slice, or a block table that is too short.
        """
        if not slices:
            raise ValueError("an attention batch needs at least one slice")
        query_starts, context_lens, used = [0], [], []
        for item in slices:
            context_len = item.start + item.length
            num_blocks = -(-context_len // block_size)
            if item.length < 1 or item.start < 0:
                raise ValueError(f"not a slice: start {item.start}, length {item.length}")
            if len(item.block_ids) < num_blocks:
                raise ValueError(
                    f"{context_len} tokens need {num_blocks} blocks of {block_size}, "
                    f"the block table has {len(item.block_ids)}"
                )
            query_starts.append(query_starts[-1] + item.length)
            context_lens.append(context_len)
            used.append(num_blocks)

        tables = np.zeros((len(slices), max(used)), dtype=np.int32)
        positions = np.empty(query_starts[-1], dtype=np.int64)
        slot_blocks = np.empty_like(positions)
        for row, item in enumerate(slices):
            tables[row, : used[row]] = item.block_ids[: used[row]]
            rows = slice(query_starts[row], query_starts[row + 1])
            positions[rows] = np.arange(item.start, context_lens[row])
            slot_blocks[rows] = tables[row, positions[rows] // block_size]
        return cls(
            positions=torch.from_numpy(positions).to(device),
            slot_blocks=torch.from_numpy(slot_blocks).to(device),
            slot_offsets=torch.from_numpy(positions % block_size).to(device),
            query_starts=tuple(query_starts),
            context_lens=tuple(context_lens),
            block_tables=torch.from_numpy(tables).to(device),
            block_size=block_size,
        )
