"""One request as the scheduler sees it.

Invariant: `token_ids` is prompt and output, in order; `num_computed_tokens` of them have KV in
`table`. Whatever a request is waiting for, it is the difference of the two that a step closes. What
is planned and not committed runs ahead of both: `num_planned_tokens`, `num_unknown_tokens`.
"""

from dataclasses import dataclass, field

from cache.events import BlockKey
from cache.keys import KeyRoot
from cache.prefix import RequestBlocks
from cache.tiers import Promotion
from cache.wheel import Retention
from engine.wire import (
    Finish,
    FinishReason,
    FirstToken,
    SamplingParams,
    ServiceClass,
    TokenItem,
)

RequestKey = tuple[str, str]
"""(ingress id, request id): what two ingresses call alike does not collide."""


@dataclass(slots=True, eq=False)
class RequestState:
    """From `add` to its last token. `run_id` is None while it waits."""

    key: RequestKey
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root: KeyRoot
    end_token_ids: frozenset[int]
    """Any of these ends the request, once `min_tokens` are out."""
    priority: int = 0
    retention: Retention = Retention.NORMAL
    pin_steps: int = 0
    """How long its blocks stay pinned once it has ended, if `retention` is that."""
    service_class: ServiceClass = ServiceClass.STANDARD
    ticket: int = 0
    """Order of arrival; kept over preemption."""
    arrived_s: float = 0.0
    """When it was added."""
    started_s: float = 0.0
    """When a step was first planned for it."""
    has_drawn: bool = False
    """A token, in this engine."""
    deadline_s: float = 0.0
    """When its first token is due."""
    num_displaced: int = 0
    """Times that it made room for a stronger class."""
    block_keys: list[BlockKey] = field(default_factory=list)
    run_id: int | None = None
    table: RequestBlocks | None = None
    slots: RequestBlocks | None = None
    """Its table in the host tier, while it has one in the device's and there is that tier."""
    promotion: Promotion | None = None
    """While it waits: blocks that are on their way from disk."""
    following: "Following | None" = None
    """While it waits: who computes what it needs next."""
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    """Computed, or to be by plans that are not committed."""
    num_unknown_tokens: int = 0
    """That those plans will draw: known to the executor when it needs them."""
    is_held_back: bool = False
    """To be preempted as soon as none of its plans is in flight."""
    cached_tokens: int | None = None
    """Prompt tokens found in the cache when it first started; None before."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """That were computed when it was preempted last."""
    expected_cached_tokens: int = 0
    """While it waits: what the cache held of it when it came. For load reports."""
    max_num_tokens: int = field(init=False)
    """Prompt and output together."""

    def __post_init__(self) -> None:
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_unplanned_tokens(self) -> int:
        """What a next plan can compute."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_planned_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is stronger."""
        return self.priority, self.service_class

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller runs first and is preempted last."""
        return self.priority, self.service_class, self.ticket

    def extend_keys(self, num_blocks: int) -> None:
        """Makes sure that the keys of the first `num_blocks` full blocks are known."""
        known = len(self.block_keys)
        if num_blocks > known:
            size = self.root.block_size
            parent = self.block_keys[-1] if self.block_keys else self.root.root
            tail = self.token_ids[known * size : num_blocks * size]
            self.block_keys.extend(self.root.extend(parent, tail))

    @property
    def is_ready(self) -> bool:
        """Nothing that it needs is on its way."""
        return (self.promotion is None or self.promotion.is_over) and (
            self.following is None or self.following.is_over
        )

    def first_token(self, now: float) -> FirstToken:
        """To be told with it, once."""
        self.has_drawn = True
        return FirstToken(self.started_s - self.arrived_s, now - self.started_s)

    def finish_reason(self) -> FinishReason | None:
        """Whether the output so far is complete."""
        token_ids = self.token_ids
        count = len(token_ids) - self.num_prompt_tokens
        if not count:
            return None
        if token_ids[-1] in self.end_token_ids and count >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_num_tokens else None


@dataclass(frozen=True, slots=True)
class Following:
    """A wait for a prefix that another request computes."""

    leader: RequestState
    run_id: int
    """The leader's, when it was found."""
    num_blocks: int
    """From the first on, that both begin with."""

    @property
    def is_over(self) -> bool:
        leader = self.leader
        return (
            leader.run_id != self.run_id
            or leader.table is None
            or leader.table.num_published >= self.num_blocks
        )


def by_order(request: RequestState) -> tuple[int, int, int]:
    """For sorting: the first is the strongest."""
    return request.order


Output = tuple[RequestState, TokenItem]
"""What a request has to tell: new tokens, its end, or both."""


def ended(request: RequestState, finish: Finish) -> Output:
    """Its end, without new tokens."""
    return request, TokenItem(
        request.key[1],
        request.attempt,
        request.num_output_tokens,
        (),
        finish,
        request.cached_tokens or 0,
    )
