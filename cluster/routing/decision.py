"""What goes into a routing decision and what comes out of it.

Invariant: a decision carries the figures it was made on, so that it can be explained later, when
the state it was made in is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cache.events import BlockKey
from engine.errors import ShoalError


class NoReplica(ShoalError):
    """No replica may be chosen: there is none, or none that is routable and not excluded."""

    def __init__(self, num_known: int, num_routable: int, num_excluded: int) -> None:
        super().__init__(
            f"no replica can take the request: {num_known} known, {num_routable} routable, "
            f"{num_excluded} of them excluded"
        )


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request to an engine."""

    request_id: str
    keys: Sequence[BlockKey]
    """Of the full blocks of its tokens."""
    num_tokens: int
    """To be in the KV cache before it samples: the prompt, and what earlier attempts delivered."""
    max_tokens: int
    """Output tokens still allowed."""
    session: bytes = b""
    """What its client calls the session that it belongs to, if anything."""


class Reason(StrEnum):
    """Why the chosen replica was chosen."""

    CACHED = "cached"
    """No other holds more of the prefix, and it costs least even so."""
    LOAD = "load"
    """Another holds more of the prefix, but computing it here is sooner than waiting there."""
    COLD = "cold"
    """Nobody holds the prefix, and its first blocks hash to this replica."""
    COLD_OVERFLOW = "cold_overflow"
    """As `COLD`, but on those that the hash prefers it would take longer."""
    FOLLOWS = "follows"
    """Nobody holds the prefix, but a request of ours that is on its way there will leave it."""
    LEAST_WAIT = "least_wait"
    """Nothing to gain from a cache, and least to do."""
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"


class Candidate(NamedTuple):
    """A replica as a decision saw it. All times are predictions."""

    replica_id: str
    cached_tokens: int
    """Tokens of the request in its cache."""
    wait_s: float
    """What the work before it, and beside it, costs the request."""
    saved_s: float
    """Prefill spared, against computing all at the fastest replica's rate; below 0 for a slower
    replica that spares nothing."""

    @property
    def score_s(self) -> float:
        """The higher the better."""
        return self.saved_s - self.wait_s


@dataclass(frozen=True, slots=True)
class Decision:
    """A request's replica, and why."""

    request_id: str
    reason: Reason
    chosen: Candidate
    uncached_tokens: int
    """That the replica has to compute: what is booked."""
    others: tuple[Candidate, ...]
    """The best of the rest, best first, and the one that holds most of the prefix."""
    num_replicas: int
    """That could have been chosen."""
    num_tied: int
    """As good as the best, among which a hash decided."""
    cold_keys: Sequence[BlockKey] = ()
    """The request's blocks, if nobody holds them yet."""

    @property
    def replica_id(self) -> str:
        return self.chosen.replica_id
