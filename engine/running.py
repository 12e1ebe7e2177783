"""Requests that run.

Invariant: a request that runs has a run id, used by no other before or after, and a table of the
device's blocks, both from `start` to `leave`. The executor hears of its end with the next plan.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from cache.prefix import RequestBlocks
from engine.draft import Flight
from engine.following import PrefixesUnderWay
from engine.plan import Start
from engine.request import RequestState, by_order
from engine.request_cache import RequestCache


class RunningRequests:
    """In the order in which they started."""

    def __init__(self, found: RequestCache) -> None:
        self.num_started = 0
        """Since the engine started; the last run's id."""
        self.under_way = PrefixesUnderWay()
        self._found = found
        self._requests: list[RequestState] = []
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)

    @property
    def weakest(self) -> RequestState:
        """Who is preempted next; there must be one."""
        return max(self._requests, key=by_order)

    def start(self, request: RequestState, table: RequestBlocks) -> Start:
        """With what was found of it, before its table grows."""
        self.num_started += 1
        request.run_id = self.num_started
        request.table = table
        if request.cached_tokens is None:
            request.cached_tokens = min(request.num_planned_tokens, request.num_prompt_tokens)
        self._requests.append(request)
        self.under_way.advance(request)
        return Start(
            request.run_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            request.sampling,
            tuple(table.block_ids),
        )

    def leave(self, request: RequestState) -> None:
        """Has what it computed published, and gives its blocks free."""
        assert request.run_id is not None
        assert request.table is not None
        self._requests.remove(request)
        self.under_way.leave(request.run_id)
        self._ended.append(request.run_id)
        self._found.publish(request, request.table, at_least=1)
        self._found.release(request.table, request.slots)
        request.run_id = None
        request.table = request.slots = None
        request.num_computed_tokens = 0
        request.num_planned_tokens = request.num_unknown_tokens = 0

    def take_ended(self) -> tuple[int, ...]:
        """Run ids that have left since it was asked last."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def check_integrity(self, flights: Collection[Flight], block_size: int) -> None:
        """Raises `AssertionError` if what is planned of a request is not what is in flight."""
        work = [item for flight in flights for item in flight.work]
        decodes = Counter(id(request) for flight in flights for request in flight.decodes)
        for request in self._requests:
            assert request.table is not None
            assert request.num_computed_tokens < request.num_tokens
            ahead = [item.slice for item in work if item.slice.run_id == request.run_id]
            num_ahead = sum(each.length for each in ahead) + decodes[id(request)]
            num_unknown = sum(each.samples for each in ahead) + decodes[id(request)]
            assert request.num_planned_tokens == request.num_computed_tokens + num_ahead
            assert request.num_unknown_tokens == num_unknown
            assert len(request.table.block_ids) * block_size >= request.num_planned_tokens
