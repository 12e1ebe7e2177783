"""What an `EngineClient` tells of the engine that it has a session with."""

from dataclasses import dataclass
from typing import Protocol

from cache.events import KeySet
from engine import wire
from engine.stream import StreamCounts


@dataclass(frozen=True, slots=True)
class Followed:
    """How an engine's stream is followed."""

    counts: StreamCounts
    """Over all sessions of the client."""
    staleness_s: float
    """Since what is known of its cache was last in step with what it has."""


class EngineObserver(Protocol):
    """Told of what an engine publishes, in order, from within the event loop; must be quick."""

    def session_opened(self, info: wire.HelloReply) -> KeySet:
        """A session begins, with this incarnation. Returns the set to keep its keys in."""
        ...

    def session_lost(self, reason: str) -> None:
        """The session is over; its keys are no more."""
        ...

    def load_reported(self, report: wire.LoadReport) -> None: ...

    def request_seen(self, number: int) -> None:
        """The engine has seen this client's requests up to `number`."""
        ...
