"""A decode batch of fixed size over tensors that stay where they are, to capture a CUDA graph with.

Invariant: everything that a kernel's launch depends on is fixed when it is made; what changes from
step to step is in its tensors alone, so that a captured launch reads the step of the last `fill`.
"""

from dataclasses import dataclass

import torch

from engine.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class PaddedDecodeBatch(AttentionBatch):
    """S sequences with one query each, some of which may be padding: of length 0, with the slot
    block -1. `context_lens` are bounds; what counts is `lengths`."""

    lengths: torch.Tensor
    """[S] int32, tokens that each sequence has with this step's; 0: padding."""

    @classmethod
    def from_tensors(
        cls,
        positions: torch.Tensor,
        slot_blocks: torch.Tensor,
        slot_offsets: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
    ) -> "PaddedDecodeBatch":
        """Over tensors of the caller's, also parts ``[:S]`` of larger ones: int64 ``[S]`` three
        times, int32 ``[S]``, int32 ``[S, max_blocks]``. Raises `ValueError` where their lengths
        differ."""
        size = len(lengths)
        for name, tensor in (
            ("positions", positions),
            ("slot_blocks", slot_blocks),
            ("slot_offsets", slot_offsets),
            ("block_tables", block_tables),
        ):
            if len(tensor) != size:
                raise ValueError(f"{name} has {len(tensor)} rows for {size} sequences")
        batch = cls(
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            query_starts=tuple(range(size + 1)),
            context_lens=(block_tables.shape[1] * block_size,) * size,
            block_tables=block_tables,
            block_size=block_size,
            lengths=lengths,
        )
        # Made now: a capture could not copy it to the device.
        _ = batch.device_query_starts
        return batch

    @classmethod
    def allocate(
        cls, size: int, max_blocks: int, block_size: int, device: torch.device | str
    ) -> "PaddedDecodeBatch":
        """`size` rows of padding, for sequences of up to `max_blocks` blocks."""
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return cls.from_tensors(
            positions=zeros,
            slot_blocks=torch.full_like(zeros, -1),
            slot_offsets=zeros.clone(),
            lengths=zeros.int(),
            block_tables=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
            block_size=block_size,
        )

    @property
    def device_context_lens(self) -> torch.Tensor:
        return self.lengths

    def fill(self, batch: AttentionBatch) -> None:
        """Takes over a step of at most S sequences with one query each; the rows left over become
        padding. Raises `ValueError` for a batch that does not fit."""
        count, width = batch.block_tables.shape
        size, max_blocks = self.block_tables.shape
        if count > size or width > max_blocks:
            raise ValueError(
                f"{count} sequences of up to {width} blocks do not fit a batch of {size} sequences "
                f"of up to {max_blocks}"
            )
        if batch.num_tokens != count or batch.block_size != self.block_size:
            raise ValueError(
                f"not a decode batch over blocks of {self.block_size}: {batch.num_tokens} tokens "
                f"of {count} sequences over blocks of {batch.block_size}"
            )
        for mine, other, padding in (
            (self.positions, batch.positions, 0),
            (self.slot_blocks, batch.slot_blocks, -1),
            (self.slot_offsets, batch.slot_offsets, 0),
            (self.lengths, batch.device_context_lens, 0),
        ):
            mine[:count].copy_(other, non_blocking=True)
            mine[count:].fill_(padding)
        self.block_tables[:count, :width].copy_(batch.block_tables, non_blocking=True)

    def unpadded(self) -> tuple[AttentionBatch, torch.Tensor]:
        """The same step without its padding, and the rows that are left, int64. Waits for the
        device."""
        rows = (self.lengths > 0).nonzero()[:, 0]
        batch = AttentionBatch(
            positions=self.positions[rows],
            slot_blocks=self.slot_blocks[rows],
            slot_offsets=self.slot_offsets[rows],
            query_starts=tuple(range(len(rows) + 1)),
            context_lens=tuple(self.lengths[rows].tolist()),
            block_tables=self.block_tables[rows],
            block_size=self.block_size,
        )
        return batch, rows
