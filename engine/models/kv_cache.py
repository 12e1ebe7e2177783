"""The KV memory of one engine: a fixed number of blocks, allocated once.

Invariant: block ``i`` is block ``i`` in every layer, so one block table serves them all.

Sizing: ``num_blocks = memory_bytes // block_bytes`` with ``block_bytes = block_size *
kv_bytes_per_token``, and ``memory_bytes = num_blocks * block_bytes`` the other way round. Where a
share of the device is asked for, `device_memory` says what the memory is.
"""

import os
from collections.abc import Sequence

import torch

from configs.engine import CacheConfig
from engine.errors import ConfigurationError
from engine.kernels.memory import advise_huge_pages
from engine.kernels.ops import select_ops
from engine.models.traits import ModelTraits

# The rest is for what comes later: other processes, graphs, fragments.
_GPU_SHARE = 0.9


class KVCache:
    """Keys and values of each layer, ``[num_blocks, kv_heads, block_size, head_dim]``: views of
    `storage`, which has the layer, and 0 for keys or 1 for values, before that."""

    def __init__(
        self, traits: ModelTraits, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.storage = torch.empty(
            (traits.num_layers, 2, num_blocks, traits.num_kv_heads, block_size, traits.head_dim),
            dtype=getattr(torch, traits.cache_dtype),
            device=device,
        )
        # Between the two: memory that has been written to keeps its small pages.
        advise_huge_pages(self.storage)
        self.storage.zero_()
        self._ops = select_ops(device)
        self.layers = [(layer[0], layer[1]) for layer in self.storage]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), in order."""
        destinations = {destination for _, destination in pairs}
        independent = len(destinations) == len(pairs) and destinations.isdisjoint(
            source for source, _ in pairs
        )
        # At once where order cannot matter, which is what a scheduler's plans look like.
        for group in [pairs] if independent else [[pair] for pair in pairs]:
            copies = [(source, target, self.block_size) for source, target in group]
            self._ops.copy_blocks(self.storage, copies)


def check_kv_dtype(cache: CacheConfig, device: torch.device) -> None:
    """Raises `ConfigurationError` where nothing here reads KV of the dtype that is asked for."""
    if cache.kv_dtype != "auto" and device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"cache.kv_dtype is {cache.kv_dtype}, which works on cpu and cuda, and the device is "
            f"{device.type}"
        )


def device_share(cache: CacheConfig, device: torch.device) -> float | None:
    """Share of `device` that decides on the number of blocks; none: it is given."""
    if cache.num_blocks is not None or cache.memory_bytes is not None:
        return None
    if cache.memory_fraction is None and device.type == "cuda":
        return _GPU_SHARE
    return cache.memory_fraction


def plan_num_blocks(traits: ModelTraits, cache: CacheConfig, device: torch.device) -> int:
    """How many blocks to allocate. Raises `ConfigurationError`, with both figures, when not even
    one fits the configured memory, or all of them don't fit the device's."""
    block_bytes = cache.block_size * traits.kv_bytes_per_token
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    else:
        num_blocks = cache.kv_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigurationError(
                f"cache.memory_bytes is {cache.kv_bytes}, less than one KV block of this "
                f"model: {cache.block_size} tokens take {block_bytes} bytes"
            )
    available = available_bytes(device)
    if available is not None and num_blocks * block_bytes > available:
        raise ConfigurationError(
            f"{num_blocks} KV blocks of {block_bytes} bytes need {num_blocks * block_bytes} bytes, "
            f"and {device.type} has {available} bytes available"
        )
    return num_blocks


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; none where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        try:
            with open("/proc/meminfo") as file:
                fields = dict(line.split(":", 1) for line in file)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def plan_num_slots(traits: ModelTraits, cache: CacheConfig) -> int:
    """Blocks that the host tier holds. Raises `ConfigurationError` when not even one fits the
    configured memory, or all of them don't fit the machine's."""
    if not cache.slot_bytes:
        return 0
    block_bytes = cache.block_size * traits.kv_bytes_per_token
    num_slots = cache.slot_bytes // block_bytes
    if num_slots < 1:
        raise ConfigurationError(
            f"cache.host_memory_bytes is {cache.slot_bytes}, less than one KV block of this model: "
            f"{cache.block_size} tokens take {block_bytes} bytes"
        )
    available = available_bytes(torch.device("cpu"))
    if available is not None and num_slots * block_bytes > available:
        raise ConfigurationError(
            f"cache.host_memory_bytes is {cache.slot_bytes}, and the machine has {available} bytes "
            f"available"
        )
    return num_slots
