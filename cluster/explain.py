"""Why a request went where it went, and where its time went.

Invariant: what is kept is bounded in number, the oldest going first, and holds no text and no token
of any request.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from cluster.generation import Generation
from cluster.routing.decision import Candidate, Decision

PROXY_HEADER = "x-request-start"
"""Set by a proxy: when it had the request, as `t=` and milliseconds since 1970."""
_MOST_PROXY_S = 3600.0
"""Beyond it the header is not believed."""


class CandidateShown(msgspec.Struct, frozen=True):
    """A replica as a decision saw it; seconds are predictions."""

    engine: str
    cached_tokens: int
    wait_s: float
    saved_s: float
    score_s: float

    @classmethod
    def of(cls, one: Candidate) -> "CandidateShown":
        figures = (round(value, 6) + 0.0 for value in (one.wait_s, one.saved_s, one.score_s))
        return cls(one.replica_id, one.cached_tokens, *figures)


class DecisionShown(msgspec.Struct, frozen=True):
    """One choice of an engine."""

    engine: str
    reason: str
    candidates: tuple[CandidateShown, ...]
    """The one that was chosen, then the best of the rest."""
    num_engines: int
    """That could have been chosen."""
    num_tied: int

    @classmethod
    def of(cls, decision: Decision) -> "DecisionShown":
        candidates = (decision.chosen, *decision.others)
        return cls(
            decision.replica_id,
            decision.reason.value,
            tuple(map(CandidateShown.of, candidates)),
            decision.num_replicas,
            decision.num_tied,
        )


class Explanation(msgspec.Struct, frozen=True):
    """One request, as far as it has come."""

    request_id: str
    model: str
    ingress: str
    received_s: float
    """Seconds since 1970."""
    decisions: tuple[DecisionShown, ...]
    """The first, and one for each time that its first choice went on elsewhere."""
    prompt_tokens: int
    completion_tokens: int
    predicted_cached_tokens: int
    cached_tokens: int
    """That the engine really found."""
    stages_s: dict[str, float]
    """Seconds to the first token, stage by stage, and together (`ttft`)."""
    is_over: bool


@dataclass(slots=True, eq=False)
class Trace:
    """A request that is explained on demand, while it runs and after."""

    request_id: str
    model: str
    decisions: list[Decision]
    generation: Generation
    proxy_s: float = 0.0
    received_s: float = field(default_factory=time.time)

    def explain(self, ingress_id: str) -> Explanation:
        generation, usage = self.generation, self.generation.usage
        stages = dict(generation.times.stages())
        if self.proxy_s:
            stages = {"proxy": self.proxy_s, **stages}
        return Explanation(
            request_id=self.request_id,
            model=self.model,
            ingress=ingress_id,
            received_s=round(self.received_s, 3),
            decisions=tuple(map(DecisionShown.of, self.decisions)),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            predicted_cached_tokens=self.decisions[0].chosen.cached_tokens,
            cached_tokens=usage.cached_tokens,
            stages_s={name: round(seconds, 6) for name, seconds in stages.items()},
            is_over=generation.is_closed,
        )


class Traces:
    """The latest requests of one ingress, by id."""

    def __init__(self, ingress_id: str) -> None:
        self._ingress_id = ingress_id
        self._traces: OrderedDict[str, Trace | Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, trace: Trace, most: int) -> None:
        """Keeps it, and no more than `most` in all."""
        self._traces[trace.request_id] = trace
        while len(self._traces) > most:
            self._traces.popitem(last=False)

    def close(self, request_id: str) -> None:
        """It is over: what is known of it is all that is kept."""
        trace = self._traces.get(request_id)
        if isinstance(trace, Trace):
            self._traces[request_id] = trace.explain(self._ingress_id)

    def explain(self, request_id: str) -> Explanation | None:
        trace = self._traces.get(request_id)
        return trace.explain(self._ingress_id) if isinstance(trace, Trace) else trace


def proxy_s(header: str | None, now: float) -> float:
    """Seconds since a proxy had the request, by its header; 0 when it says nothing credible."""
    try:
        seconds = now - float((header or "").removeprefix("t=")) / 1000
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < _MOST_PROXY_S else 0.0
