"""What a step is: the plan a scheduler makes, and the result an executor gives back.

Invariant: a plan is a difference. An executor keeps the state of the runs it was told of, so a
decoding request costs a plan one `Slice` whatever its length, and a plan can be broadcast.

A *run* is one stay of a request with the executor, from `Start` to `ended`. A request that is
preempted and resumed comes back under a new run id, with everything it has produced so far.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.wire import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Start:
    """Introduces a run."""

    run_id: int
    token_ids: tuple[int, ...]
    """Prompt and output so far: all that is known."""
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    """Blocks whose KV is already valid: the cached prefix."""


# Structs where there is one a request and step: a frozen dataclass takes ten times as long to make.
class Slice(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens ``[start, start + length)`` of a run."""

    run_id: int
    start: int
    length: int
    new_block_ids: tuple[int, ...]
    """Appended to the run's block table before the step."""
    samples: bool
    """The slice ends at the last known token: draw the next one and append it to the run."""

    @property
    def is_decode(self) -> bool:
        return self.length == 1 and self.samples


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Executed in this order: `ended`, `saves`, `loads`, `copies`, `starts`, then `slices` and
    `decodes` as one batch. A plan may have nothing to compute, only saves."""

    step: int
    ended: tuple[int, ...]
    """Runs whose state the executor drops."""
    copies: tuple[tuple[int, int], ...]
    """Block copies, (source, destination)."""
    starts: tuple[Start, ...]
    slices: tuple[Slice, ...]
    saves: tuple[tuple[int, int], ...] = ()
    """Block copies from the device to the host tier, (block, slot)."""
    loads: tuple[tuple[int, int], ...] = ()
    """And back, (slot, block)."""
    decodes: tuple[int, ...] = ()
    """Runs that compute their last token and draw the next one: most of what there is to do, so
    each takes a number and no `Slice`."""
    new_blocks: tuple[tuple[int, int], ...] = ()
    """(run, block), appended to block tables of `decodes` before the step."""

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.slices) + len(self.decodes)

    @property
    def num_decodes(self) -> int:
        """Of its tokens, those that are computed to draw the next one."""
        return sum(item.is_decode for item in self.slices) + len(self.decodes)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """What a run drew: one token, or more once drafts are verified."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sampled: Mapping[int, Sampled]
    """By run id, for each slice that samples and did not fail."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """By run id: why this run cannot go on. The others are not touched by it."""
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor says of itself once it is loaded."""

    model: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    """The model's own limit on prompt plus output."""
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int
    device: str
    dtype: str
    num_slots: int = 0
    """Blocks of host memory, the tier below."""
    max_step_tokens: int | None = None
    """Most tokens of a step that there is memory for beside the KV; none: any number."""
    max_step_seqs: int | None = None
    """Likewise, most requests."""


class Executor(Protocol):
    """Owns the device. Used by one thread at a time."""

    @property
    def info(self) -> ExecutorInfo: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. A fault that one run causes ends up in `StepResult.failures` and leaves
        the others as if it had not been there; an exception means that the device or the
        executor's own state is lost, and the engine with it."""
        ...

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Called once, before the first plan. If the executor is lost between two plans, `on_lost`
        is called with the reason, from any thread."""
        ...

    def slot_memory(self, slot: int) -> memoryview:
        """The bytes of a slot of host memory, to read a disk into or to write it from. May be used
        from any thread while no plan uses the slot."""
        ...

    def close(self) -> None: ...
