"""What the check is made of, and what a part gives.

Invariant: a part is a process of its own: one that hangs, or takes the device down, leaves the
others as they were.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType

import torch

from bench.figures import Figures, Progress


class NotRun(Exception):
    """A part that cannot run here, and why: neither passed nor failed."""


@dataclass(slots=True)
class Result:
    """Figures by flat keys, and what was found to be wrong."""

    figures: Figures = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a part runs, and how large."""

    device: torch.device
    is_tiny: bool
    """Shapes that a CPU computes in seconds, to check the check itself."""
    progress: Progress

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Part = Callable[[Setting], Result]


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    function: str
    limit_s: int


_PARTS: Mapping[str, _Entry] = MappingProxyType(
    {
        "kernels": _Entry("kernels", "check_kernels", 120),
        "graphs": _Entry("graphs", "check_graphs", 60),
        "greedy": _Entry("greedy", "check_greedy", 60),
        "memory": _Entry("memory", "check_memory", 60),
        "compiled": _Entry("compiled", "check_compiled", 60),
        "speed_1b": _Entry("speed", "measure_1b", 90),
        "speed_8b": _Entry("speed", "measure_8b", 120),
    }
)
NAMES = tuple(_PARTS)
LIMITS_S: Mapping[str, int] = MappingProxyType(
    {name: entry.limit_s for name, entry in _PARTS.items()}
)
"""Seconds after which a part is ended, its imports included; 570 together."""


def part(name: str) -> Part:
    entry = _PARTS[name]
    found: Part = getattr(import_module(f"bench.gpu_check.{entry.module}"), entry.function)
    return found
