"""Requests that wait, and which of them starts next.

Invariant: of two requests of one class and priority the one that came first starts first.

Stronger classes start first; but every fourth start goes to the request whose deadline (its arrival
and its class's target for the first token) is nearest. So a burst of the strong takes three starts
in four from the weak at most, and a weak request whose deadline has come waits for a bounded number
of others: none starves.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from configs.engine import SchedulerConfig
from engine.request import RequestState, by_order
from engine.wire import ServiceClass

_TURNS = 4
"""Starts, of which one goes by deadline."""


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

    def next(self, turn: int) -> RequestState | None:
        """Who starts as the `turn`-th; those whose blocks are on their way let others go first."""
        by_deadline = turn % _TURNS == _TURNS - 1
        for request in self._by_deadline if by_deadline else self._by_class:
            if request.promotion is None or request.promotion.is_over:
                return request
        return None

    def check_integrity(self) -> None:
        assert self._by_class == sorted(self._by_class, key=by_order)
        assert self._by_deadline == sorted(self._by_class, key=_deadline_order)
        assert all(request.run_id is None for request in self)
        assert self.num_tokens == sum(request.num_tokens for request in self)


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
