"""Requests that wait, and which of them starts next.

Invariant: of two requests of one class and priority the one that came first starts first.

Stronger classes start first; but every fourth start goes to the request whose deadline (its arrival
and its class's target for the first token) is nearest. So a burst of the strong takes three starts
in four from the weak at most, and a weak request whose deadline has come waits for a bounded number
of others: none starves.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from configs.engine import SchedulerConfig
from engine.errors import RequestRejected
from engine.request import RequestState, by_order
from engine.wire import RejectCode, ServiceClass

_TURNS = 4
"""Starts, of which one goes by deadline."""
_MOST_SEEN = 256
"""Of those that wait, looked at for one step: a plan's cost does not rise with the queue."""


class WaitingQueue:
    """Adding and removing is O(log n), and moves references."""

    def __init__(self) -> None:
        self._by_class: list[RequestState] = []
        self._by_deadline: list[RequestState] = []
        self.num_tokens = 0
        """Of all together."""

    def __len__(self) -> int:
        return len(self._by_class)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._by_class)

    def add(self, request: RequestState) -> None:
        insort(self._by_class, request, key=by_order)
        insort(self._by_deadline, request, key=_deadline_order)
        self.num_tokens += request.num_tokens

    def remove(self, request: RequestState) -> None:
        """Its class, priority and deadline must be as they were when it was added."""
        place = bisect_left(self._by_class, request.order, key=by_order)
        assert self._by_class.pop(place) is request
        place = bisect_left(self._by_deadline, _deadline_order(request), key=_deadline_order)
        assert self._by_deadline.pop(place) is request
        self.num_tokens -= request.num_tokens

    def next(self, turn: int, longest: int | None = None) -> RequestState | None:
        """Who starts as the `turn`-th, if it has no more than `longest` tokens to compute; those
        whose blocks are on their way let others go first."""
        by_deadline = turn % _TURNS == _TURNS - 1
        for request in islice(self._by_deadline if by_deadline else self._by_class, _MOST_SEEN):
            if request.is_ready and (longest is None or _num_uncomputed(request) <= longest):
                return request
        return None

    def num_short_tokens(self, longest: int) -> int:
        """To compute, of the first requests that have no more than `longest` each."""
        first = islice(self._by_class, _MOST_SEEN)
        counts = (_num_uncomputed(request) for request in first if request.is_ready)
        return sum(count for count in counts if count <= longest)

    def late(self, arrived_s: float) -> list[RequestState]:
        """Those that came before then and have not begun; batch work may wait for ever."""
        return [
            request
            for request in self._by_class
            if request.arrived_s < arrived_s
            and request.cached_tokens is None
            and request.service_class is not ServiceClass.BATCH
        ]

    def check_room(self, request: RequestState, config: SchedulerConfig) -> None:
        """Raises `RequestRejected` when the queue is full."""
        if len(self) >= config.max_waiting:
            text = f"{len(self)} requests are waiting, the most allowed"
            raise RequestRejected(RejectCode.OVERLOADED, text)
        num_tokens = self.num_tokens + request.num_tokens
        if len(self) and num_tokens > config.max_waiting_tokens:
            text = f"{num_tokens} tokens would be waiting; {config.max_waiting_tokens} may"
            raise RequestRejected(RejectCode.OVERLOADED, text)

    def check_integrity(self) -> None:
        assert self._by_class == sorted(self._by_class, key=by_order)
        assert self._by_deadline == sorted(self._by_class, key=_deadline_order)
        assert all(request.run_id is None for request in self)
        assert self.num_tokens == sum(request.num_tokens for request in self)


def _num_uncomputed(request: RequestState) -> int:
    return request.num_tokens - request.expected_cached_tokens


def _deadline_order(request: RequestState) -> tuple[int, float, int]:
    return request.priority, request.deadline_s, request.ticket


def ttft_s(config: SchedulerConfig, service_class: ServiceClass) -> float:
    """The class's target for the first token, seconds."""
    match service_class:
        case ServiceClass.INTERACTIVE:
            return config.interactive_ttft_s
        case ServiceClass.STANDARD:
            return config.standard_ttft_s
        case ServiceClass.BATCH:
            return config.batch_ttft_s
