"""A step's plan while it is being made.

Invariant: what a request has in a draft can be taken out again until the plan is made.
"""

from dataclasses import dataclass, field

from cache.prefix import RequestBlocks
from engine.plan import Slice, Start, StepPlan
from engine.request import RequestState


@dataclass(slots=True)
class Work:
    """A slice, and whose it is."""

    request: RequestState
    table: RequestBlocks
    slice: Slice
    slots: RequestBlocks | None = None
    """Those of the host tier that its first blocks are loaded from."""


@dataclass(slots=True)
class Draft:
    """What the next step will do, so far."""

    budget: int
    """Tokens that it may still compute."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    starts: dict[int, Start] = field(default_factory=dict)
    """By run id, as is the work."""
    work: dict[int, Work] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.work and not self.saves

    def as_plan(self, step: int, ended: tuple[int, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            ended=ended,
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            copies=tuple(self.copies),
            starts=tuple(self.starts.values()),
            slices=tuple(item.slice for item in self.work.values()),
        )
