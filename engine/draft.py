"""A step's plan while it is being made.

Invariant: what a request has in a draft can be taken out again until the plan is made.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from cache.prefix import RequestBlocks
from configs.engine import SchedulerConfig
from engine.plan import Slice, Start, StepPlan
from engine.request import RequestState
from engine.wire import ServiceClass

_MIN_PREFILL = 16
"""Prompt tokens that a step may always have, whatever waits for its end."""


class Work(msgspec.Struct, eq=False, gc=False):
    """A slice, and whose it is."""

    request: RequestState
    table: RequestBlocks
    slice: Slice
    slots: RequestBlocks | None = None
    """Those of the host tier that its first blocks are loaded from."""


@dataclass(frozen=True, slots=True)
class Flight:
    """What a plan does, from when it is made until its result is committed."""

    work: tuple[Work, ...]
    decodes: tuple[RequestState, ...]
    tables: tuple[RequestBlocks, ...]
    """Of the work, then of the decodes."""


@dataclass(slots=True)
class Draft:
    """What the next step will do, so far."""

    budget: int
    """Tokens that it may still compute."""
    prefill_budget: int
    """Of them, those of prompts."""
    long_budget: int
    """Of those, the ones of long prompts."""
    longest_short: int
    """Tokens left to compute of a short prompt, at most; also the longest slice."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    starts: dict[int, Start] = field(default_factory=dict)
    """By run id, as are the next two."""
    work: dict[int, Work] = field(default_factory=dict)
    decodes: dict[int, RequestState] = field(default_factory=dict)
    """Those that compute one token and draw the next."""
    new_blocks: dict[int, int] = field(default_factory=dict)
    """Of the decodes, the block that one's table has grown by."""

    @classmethod
    def of(
        cls, config: SchedulerConfig, running: Iterable[RequestState], tokens_per_s: float
    ) -> "Draft":
        """An empty one; prompts are computed at `tokens_per_s` of late (0: not known)."""
        for_prompts = _prefill_budget(config, running, tokens_per_s)
        return cls(
            config.max_num_batched_tokens, for_prompts, for_prompts, config.long_prefill_threshold
        )

    def is_long(self, request: RequestState) -> bool:
        return request.num_unplanned_tokens > self.longest_short

    def num_short_tokens(self, requests: Iterable[RequestState]) -> int:
        """What the short ones of these have left to compute."""
        return sum(each.num_unplanned_tokens for each in requests if not self.is_long(each))

    def keep_for_short(self, num_tokens: int) -> None:
        """Half of what is there for prompts at most."""
        available = min(self.prefill_budget, self.budget)
        self.long_budget = available - min(num_tokens, available // 2)

    def length_for(self, request: RequestState) -> int:
        """Tokens of a request that this step may still compute."""
        pending = request.num_unplanned_tokens
        if pending == 1:
            return min(1, self.budget)
        most = min(pending, self.longest_short, self.budget, self.prefill_budget)
        return max(0, min(most, self.long_budget) if self.is_long(request) else most)

    def decode(self, request: RequestState) -> None:
        """The last token of a request that runs, whose table has room for it."""
        assert request.run_id is not None
        self.decodes[request.run_id] = request
        self.budget -= 1
        request.num_planned_tokens += 1
        request.num_unknown_tokens += 1

    def add(
        self, request: RequestState, table: RequestBlocks, length: int, fresh: tuple[int, ...]
    ) -> None:
        """The next `length` tokens of a request that runs; `fresh` are blocks new in its table."""
        run_id, start = request.run_id, request.num_planned_tokens
        assert run_id is not None
        end = start + length
        if self.is_long(request):
            self.long_budget -= length
        samples = end == len(request.token_ids) + request.num_unknown_tokens
        request.num_planned_tokens = end
        if samples:
            request.num_unknown_tokens += 1
        planned = Slice(run_id, start, length, fresh, samples)
        self._spend(planned, length)
        self.work[run_id] = Work(request, table, planned)

    def drop(self, run_id: int) -> None:
        """Takes a run's slice out again, if it has one."""
        if self.decodes.pop(run_id, None) is not None:
            self.new_blocks.pop(run_id, None)
            self.budget += 1
        elif (work := self.work.pop(run_id, None)) is not None:
            self._spend(work.slice, -work.slice.length)

    def _spend(self, planned: Slice, num_tokens: int) -> None:
        self.budget -= num_tokens
        if not planned.is_decode:
            self.prefill_budget -= num_tokens

    @property
    def is_empty(self) -> bool:
        return not self.work and not self.decodes and not self.saves

    def as_flight(self) -> Flight:
        work, decodes = tuple(self.work.values()), tuple(self.decodes.values())
        tables = [item.table for item in work]
        tables += [request.table for request in decodes if request.table is not None]
        return Flight(work, decodes, tuple(tables))

    def as_plan(self, step: int, ended: tuple[int, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            ended=ended,
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            copies=tuple(self.copies),
            starts=tuple(self.starts.values()),
            slices=tuple([item.slice for item in self.work.values()]),
            decodes=tuple(self.decodes),
            new_blocks=tuple(self.new_blocks.items()),
        )


def _prefill_budget(
    config: SchedulerConfig, running: Iterable[RequestState], tokens_per_s: float
) -> int:
    """Prompt tokens of a step: all that fit, unless an interactive request waits for its next token
    beside them; then what is computed in that one's target, at the rate of late (0: not known)."""
    budget = config.max_num_batched_tokens
    if not tokens_per_s or not any(
        request.service_class is ServiceClass.INTERACTIVE and request.num_output_tokens
        for request in running
    ):
        return budget
    return min(budget, max(_MIN_PREFILL, int(config.interactive_tpot_s * tokens_per_s)))
