"""The KV of blocks in host memory: the tier below the device.

Invariant: a slot holds all of one block, of every layer, in one piece: ``[layers, 2, kv_heads,
block_size, head_dim]`` (0: keys, 1: values), so that a disk reads or writes it in one go.
"""

from collections.abc import Sequence

import torch

from engine.models.kv_cache import KVCache


class HostMemory:
    """`num_slots` slots, allocated once; page-locked beside an accelerator."""

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        storage = cache.storage
        shape = (num_slots, *storage.shape[:2], *storage.shape[3:])
        self.num_slots = num_slots
        self._storage = storage
        self._slots = torch.zeros(
            shape, dtype=storage.dtype, pin_memory=storage.device.type == "cuda"
        )

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to slots, (block, slot), in order."""
        for block, slot in pairs:
            self._slots[slot].copy_(self._storage[:, :, block])

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slots to blocks, (slot, block), in order."""
        for slot, block in pairs:
            self._storage[:, :, block].copy_(self._slots[slot])

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes, to read and to write."""
        return self._slots[slot].view(torch.uint8).view(-1).numpy().data
