"""Sizes of the attention kernel's tiles, by architecture.

Invariant: a table, read once: nothing is measured or compiled anew while serving.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

_SMALLEST = 16
"""Tensor cores multiply nothing smaller."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One shape of the attention kernel. Sizes are powers of two, at least 16."""

    rows: int
    """Rows of a program: (query, head of a group) pairs."""
    keys: int
    """Keys looked at together, fewer where `stage_bytes` does not hold them."""
    num_warps: int
    num_stages: int
    """Tiles of keys that are on their way at once."""
    stage_bytes: int
    """Shared memory for the keys and values of one stage."""

    def keys_for(self, head_dim: int, itemsize: int) -> int:
        """Keys of a tile for heads of `head_dim` (a power of two) elements of `itemsize` bytes."""
        keys = self.keys
        while keys > _SMALLEST and 2 * keys * head_dim * itemsize > self.stage_bytes:
            keys //= 2
        return keys


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the kernels need to know of a card."""

    prefill: Tiles
    """Where a sequence has several queries."""
    decode: Tiles
    """Where each has one."""
    fill_programs: int
    """Programs that keep the card busy: with fewer, long sequences are split."""
    segment_keys: int = 256
    """Keys of a segment, at least: less does not repay the second kernel."""
    max_segments: int = 64
    head_tile: int = 8
    """Heads rotated or written by one program."""

    def num_segments(self, num_programs: int, max_context_len: int) -> int:
        """Into how many parts sequences of up to `max_context_len` keys are split where a launch
        has `num_programs` programs without that."""
        wanted = self.fill_programs // max(num_programs, 1)
        return max(1, min(wanted, max_context_len // self.segment_keys, self.max_segments))


# Cautious guesses from each card's shared memory and number of processors; none is measured yet.
_BY_ARCHITECTURE: Mapping[str, Tuning] = MappingProxyType(
    {
        "sm80": Tuning(Tiles(64, 32, 4, 2, 48 << 10), Tiles(16, 32, 4, 3, 32 << 10), 216),
        "sm90": Tuning(Tiles(64, 64, 4, 2, 64 << 10), Tiles(16, 64, 4, 3, 48 << 10), 264),
        "sm100": Tuning(Tiles(64, 64, 4, 2, 64 << 10), Tiles(16, 64, 4, 3, 48 << 10), 296),
        "default": Tuning(Tiles(32, 32, 4, 1, 32 << 10), Tiles(16, 16, 4, 2, 16 << 10), 128),
    }
)


def tuning_for(device: torch.device) -> Tuning:
    """The table's row for `device`; ``default`` for architectures it does not know."""
    if device.type != "cuda":
        return _BY_ARCHITECTURE["default"]
    major, minor = torch.cuda.get_device_capability(device)
    return _BY_ARCHITECTURE.get(f"sm{major}{minor}", _BY_ARCHITECTURE["default"])
