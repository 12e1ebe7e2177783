"""How much of a device is left for KV.

Invariant: it follows from what was measured while the largest step ran on the real model, so that
such a step fits beside the KV. What is in use outside of torch counts: other processes, the
driver's context, libraries that allocate on their own.

``kv_bytes = fraction * total_bytes - outside_bytes - peak_bytes``
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import ConfigurationError
from engine.nvml import NvmlDevice


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Of one device, in bytes."""

    total_bytes: int
    outside_bytes: int
    """In use, and not by torch in this process."""
    peak_bytes: int
    """The most that torch has held here: weights, and all that a step needs beside KV."""

    def kv_bytes(self, fraction: float, needed_bytes: int) -> int:
        """What a process that may take `fraction` of the device has left for KV. Raises
        `ConfigurationError`, with both figures, if that is less than `needed_bytes`."""
        limit = int(fraction * self.total_bytes)
        left = limit - self.outside_bytes - self.peak_bytes
        if left < needed_bytes:
            raise ConfigurationError(
                f"the KV cache needs at least {needed_bytes} bytes and {max(0, left)} are left: "
                f"cache.memory_fraction {fraction:g} of {self.total_bytes} bytes is {limit}, of "
                f"which weights and the largest step take {self.peak_bytes}, and others on the "
                f"device {self.outside_bytes}; raise cache.memory_fraction, lower "
                "scheduler.max_num_batched_tokens, scheduler.max_num_seqs or max_model_len, or "
                "give the device to fewer processes"
            )
        return left


class DeviceMemory(Protocol):
    """The counters of one device."""

    def watch(self) -> None:
        """Begins to look for the peak anew."""
        ...

    def figures(self) -> MemoryFigures:
        """As it stands now, with the peak since `watch`."""
        ...


class CudaMemory:
    """Torch's counters for what torch holds, and NVML's (where it is missing, the runtime's) for
    the whole device. What torch has reserved counts, not only what is allocated of it: no one else
    can have it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = NvmlDevice.open(device.index or 0)

    def watch(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def figures(self) -> MemoryFigures:
        torch.cuda.synchronize(self._device)
        free, total = self._free_and_total()
        held = torch.cuda.memory_reserved(self._device)
        return MemoryFigures(
            total_bytes=total,
            outside_bytes=max(0, total - free - held),
            peak_bytes=torch.cuda.max_memory_reserved(self._device),
        )

    def _free_and_total(self) -> tuple[int, int]:
        found = self._nvml.memory() if self._nvml is not None else None
        return found or torch.cuda.mem_get_info(self._device)


def device_memory(device: torch.device) -> DeviceMemory:
    """Raises `ConfigurationError` for a device that does not count."""
    if device.type != "cuda":
        raise ConfigurationError(
            f"cache.memory_fraction is a share of a GPU's memory, and the device is {device.type}: "
            "give cache.memory_bytes"
        )
    return CudaMemory(device)
