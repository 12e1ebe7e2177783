"""The scheduler: hands out each step's token budget. There are no phases.

Invariant: every request has `num_tokens` and `num_computed_tokens`, and a step closes some of the
difference. Chunked prefill, cache hits, decode, and coming back after preemption or failover are
that same arithmetic. `add`, `abort`, `schedule` and `commit` are the only mutators; nothing here
reads a clock or does I/O.

A request in a plan that is not committed keeps its blocks whatever happens to it meanwhile. With
`overlap` it may be in one more: the token that the first draws is then known to the executor alone,
which is where it is needed. What the second computes for a request that has ended is dropped.
"""

from cache.prefix import PrefixCache, RequestBlocks
from cache.tiers import LowerTiers
from configs.engine import SchedulerConfig
from engine.draft import Draft, Work, prefill_budget
from engine.errors import RequestRejected
from engine.plan import Start, StepPlan, StepResult
from engine.request import RequestKey, RequestState, TokenEvent, by_order
from engine.waiting import WaitingQueue, ttft_s
from engine.wire import Finish, FinishReason, RejectCode

_MAX_IN_FLIGHT = 2
"""Plans that one request may be in: the one that runs, and the next."""
_MAX_DISPLACED = 3
"""Times that one request makes room: a flood of the strong must not undo the same work for ever."""


class Scheduler:
    """Decides what each step computes."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        block_size: int,
        *,
        reuse: bool = True,
        tiers: LowerTiers | None = None,
    ) -> None:
        """`tiers` lie below `cache`; they need `reuse`."""
        self.config = config
        self.cache = cache
        self.tiers = tiers
        self.block_size = block_size
        self.reuse = reuse
        self.requests: dict[RequestKey, RequestState] = {}
        self.num_preemptions = 0
        self.num_copied_tokens = 0
        """Found in a part of another request's block, and copied."""
        self._running: list[RequestState] = []
        self._waiting = WaitingQueue()
        self._ended: list[int] = []
        self._in_flight: dict[int, list[Work]] = {}
        self._step = 0
        self._next_run = 0
        self._num_started = 0
        self._next_ticket = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prefill still to do, less what the cache holds of it: a decoding request's one pending
        token does not count."""
        running = sum(r.num_tokens - r.num_computed_tokens - 1 for r in self._running)
        waiting = sum(r.num_tokens - r.expected_cached_tokens for r in self._waiting)
        return running + waiting

    # ------------------------------------------------------------ mutators

    def add(self, request: RequestState, now: float = 0.0) -> list[TokenEvent]:
        """Takes a request that fits the pool (`engine.admission` sees to it), at the time `now` in
        seconds. Returns its end if its output is already complete. Raises `RequestRejected` when
        the queue is full."""
        if request.key in self.requests:
            raise RequestRejected(
                RejectCode.STALE_ATTEMPT, f"request {request.key[1]!r} is already here"
            )
        if (reason := request.finish_reason()) is not None:
            return [TokenEvent(request, request.num_output_tokens, finish=Finish(reason))]
        self._check_room(request)
        request.ticket = self._next_ticket
        request.deadline_s = now + ttft_s(self.config, request.service_class)
        self._next_ticket += 1
        self.requests[request.key] = request
        self._wait(request)
        return []

    def abort(self, key: RequestKey) -> RequestState | None:
        """Ends a request without a word; None when there is none."""
        request = self.requests.get(key)
        if request is not None:
            self._end(request)
        return request

    def schedule(self, prefill_tokens_per_s: float = 0.0) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. The rate is that of late; 0:
        not known."""
        budget = self.config.max_num_batched_tokens
        draft = Draft(budget, prefill_budget(self.config, self._running, prefill_tokens_per_s))
        self.cache.advance(self._step)
        if self.tiers is not None:
            # First, while no block of theirs can have been given up.
            self.tiers.host.advance(self._step)
            draft.saves = self.tiers.plan_saves()
        if not self._plan_running(draft):
            self._plan_waiting(draft)
        if draft.is_empty:
            return None
        self._step += 1
        work = list(draft.work.values())
        self.cache.enter_plan(*[item.table for item in work])
        if self.tiers is not None:
            self.tiers.seal(self._step)
        self._in_flight[self._step] = work
        ended, self._ended = tuple(self._ended), []
        return draft.as_plan(self._step, ended)

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Takes over what a step computed, and gives its blocks free."""
        events: list[TokenEvent] = []
        work = self._in_flight.pop(result.step)
        for item in work:
            if item.request.run_id == item.slice.run_id:
                try:
                    event = self._commit_slice(item, result)
                except Exception as error:
                    # One request's fault ends that request; the others' results still count.
                    event = self._fail(item.request, f"internal error: {error!r}")
                if event is not None:
                    events.append(event)
        self.cache.leave_plan(*[item.table for item in work])
        if self.tiers is not None:
            loaded = [item.slots for item in work if item.slots is not None]
            self.tiers.host.leave_plan(*loaded)
            self.tiers.commit(result.step)
        return events

    # ------------------------------------------------------------ planning

    def _plan_running(self, draft: Draft) -> bool:
        """Returns whether anything had to be preempted."""
        before, size = self.num_preemptions, self.block_size
        most_in_flight = _MAX_IN_FLIGHT if self.config.overlap else 1
        for request in list(self._running):
            table = request.table
            if table is None:  # Preempted a moment ago.
                continue
            num_known = len(request.token_ids) + request.num_unknown_tokens
            if not table.in_flight:
                request.is_held_back = False
            elif (
                table.in_flight >= most_in_flight
                or num_known >= request.max_num_tokens  # It will surely have ended.
                or request.is_held_back
            ):
                continue
            start = request.num_planned_tokens
            if num_known - start == 1 and start < len(table.block_ids) * size:
                # Most of what there is to plan: one more token, in a block that it has.
                if draft.budget:
                    draft.add(request, table, 1, ())
                continue
            length = self._length(request, draft)
            if length > 0 and self._make_room(request, length, draft):
                self._plan_slice(request, length, draft)
        return self.num_preemptions > before

    def _make_room(self, request: RequestState, length: int, draft: Draft) -> bool:
        """Preempts until `length` more tokens fit. False if it was itself the one to go, or if
        the room comes only when a plan in flight is committed."""
        table = request.table
        assert table is not None
        num_blocks = self._blocks_for(request.num_planned_tokens + length)
        needed = num_blocks - len(table.block_ids)
        while needed > self.cache.num_available:
            victim = max(self._running, key=by_order)
            if not self._may_leave(victim):
                return False
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _may_leave(self, victim: RequestState) -> bool:
        """Whether it can be preempted now; else it is, as soon as it can be, if need be."""
        assert victim.table is not None
        victim.is_held_back = victim.table.in_flight > 0
        return not victim.is_held_back

    def _plan_waiting(self, draft: Draft) -> None:
        while draft.budget > 0 and draft.prefill_budget > 0:
            is_full = len(self._running) >= self.config.max_num_seqs
            # A place that is taken from somebody goes to the strongest, whoever's turn it is.
            request = self._waiting.next(0 if is_full else self._num_started)
            if request is None or (is_full and not self._displace(request, draft)):
                return
            if not self._plan_start(request, draft):
                return

    def _displace(self, stronger: RequestState, draft: Draft) -> bool:
        """Sends a running request back for a waiting one of a stronger class. False if there is
        none weaker, or it can only go later."""
        victim = max(self._running, key=by_order)
        if stronger.rank >= victim.rank:
            return False
        if victim.num_displaced >= _MAX_DISPLACED or victim.run_id in draft.starts:
            return False
        if not self._may_leave(victim):
            return False
        victim.num_displaced += 1
        self._preempt(victim, draft)
        return True

    def _plan_start(self, request: RequestState, draft: Draft) -> bool:
        """Plans a waiting request's first slice. False if there is no room for it now."""
        table, slots = self._find_prefix(request)
        num_blocks = len(table.block_ids)
        num_found = max(num_blocks, len(slots.block_ids) if slots is not None else 0)
        # What comes from the host has no block yet whose children could be lent.
        source, run = self._find_part(request, table) if num_found == num_blocks else (-1, 0)
        request.num_planned_tokens = num_found * self.block_size + run
        length = self._length(request, draft)
        needed = self._blocks_for(request.num_planned_tokens + length) - num_blocks
        if needed > self.cache.num_available:
            request.num_planned_tokens = 0
            self._release(table, slots)
            return False
        self._waiting.remove(request)
        self._start(request, table, draft)
        request.slots, request.promotion = slots, None
        request.num_computed_tokens = request.num_planned_tokens
        fresh = self._plan_slice(request, length, draft)
        if run:
            draft.copies.append((source, fresh[0]))
            self.num_copied_tokens += run
        if num_found > num_blocks:
            self._plan_loads(request, num_blocks, draft)
        return True

    def _plan_loads(self, request: RequestState, first: int, draft: Draft) -> None:
        """Fills the request's blocks from number `first` on with what its slots hold."""
        assert request.run_id is not None
        assert request.table is not None
        assert request.slots is not None
        assert self.tiers is not None
        slots, blocks = request.slots.block_ids, request.table.block_ids
        draft.loads += zip(slots[first:], blocks[first : len(slots)], strict=True)
        draft.work[request.run_id].slots = request.slots
        self.tiers.host.grow(request.slots, len(slots))  # by nothing: counts as a use
        self.tiers.host.enter_plan(request.slots)
        self.tiers.counts.loaded += len(slots) - first

    def _find_prefix(self, request: RequestState) -> tuple[RequestBlocks, RequestBlocks | None]:
        """Tables that begin with what the device, and what the host tier has of the request."""
        slots = RequestBlocks() if self.tiers is not None else None
        if not self.reuse:
            return RequestBlocks(), slots
        # At least one token must be computed, or there is nothing to sample from.
        limit = (request.num_tokens - 1) // self.block_size
        table = self.cache.start(request.block_keys, limit)
        if self.tiers is not None:
            slots = self.tiers.host.start(request.block_keys, limit)
        for each in (table, slots):
            if each is not None:
                each.retention, each.ttl = request.retention, request.pin_steps
        return table, slots

    def _release(self, table: RequestBlocks, slots: RequestBlocks | None) -> None:
        self.cache.release(table)
        if slots is not None and self.tiers is not None:
            self.tiers.host.release(slots)

    def _find_part(self, request: RequestState, table: RequestBlocks) -> tuple[int, int]:
        """A block whose beginning is that of the first one not found, and the tokens of it."""
        if not self.reuse:
            return -1, 0
        start = len(table.block_ids) * self.block_size
        end = min(start + self.block_size, request.num_tokens - 1)
        return self.cache.borrow(table, request.root.root, request.token_ids[start:end])

    def _start(self, request: RequestState, table: RequestBlocks, draft: Draft) -> None:
        self._next_run += 1
        self._num_started += 1
        request.run_id = self._next_run
        request.table = table
        if request.cached_tokens is None:
            request.cached_tokens = min(request.num_planned_tokens, request.num_prompt_tokens)
        self._running.append(request)
        draft.starts[request.run_id] = Start(
            request.run_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            request.sampling,
            tuple(table.block_ids),
        )

    def _plan_slice(self, request: RequestState, length: int, draft: Draft) -> list[int]:
        """Returns the blocks that were added for it."""
        table = request.table
        assert table is not None
        fresh = self.cache.grow(table, self._blocks_for(request.num_planned_tokens + length))
        assert fresh is not None
        draft.add(request, table, length, tuple(fresh))
        return fresh

    def _length(self, request: RequestState, draft: Draft) -> int:
        pending = request.num_unplanned_tokens
        if pending == 1:
            return min(1, draft.budget)
        limit = self.config.long_prefill_threshold
        return max(0, min(pending, limit, draft.budget, draft.prefill_budget))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_room(self, request: RequestState) -> None:
        """Raises `RequestRejected` when the queue is full."""
        config, num_waiting = self.config, len(self._waiting)
        if num_waiting >= config.max_waiting:
            text = f"{num_waiting} requests are waiting, the most allowed"
            raise RequestRejected(RejectCode.OVERLOADED, text)
        num_tokens = self._waiting.num_tokens + request.num_tokens
        if num_waiting and num_tokens > config.max_waiting_tokens:
            text = f"{num_tokens} tokens would be waiting; {config.max_waiting_tokens} may"
            raise RequestRejected(RejectCode.OVERLOADED, text)

    def _wait(self, request: RequestState) -> None:
        if self.reuse:
            request.extend_keys(request.num_tokens // self.block_size)
            num_found = self.cache.match(request.block_keys)
            if self.tiers is not None:
                limit = (request.num_tokens - 1) // self.block_size
                keys, root = request.block_keys, request.root.root
                request.promotion = self.tiers.promote(keys, root, num_found, limit)
                num_found = max(num_found, self.tiers.host.match(keys))
            request.expected_cached_tokens = num_found * self.block_size
        self._waiting.add(request)

    # ------------------------------------------------------------ leaving

    def _preempt(self, request: RequestState, draft: Draft) -> None:
        """Back to the queue, to be computed again; its part of the draft is refunded."""
        assert request.run_id is not None
        draft.drop(request.run_id)
        self._leave_running(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)

    def _leave_running(self, request: RequestState) -> None:
        assert request.run_id is not None
        assert request.table is not None
        self._running.remove(request)
        self._ended.append(request.run_id)
        self._release(request.table, request.slots)
        request.run_id = None
        request.table = request.slots = None
        request.num_computed_tokens = 0
        request.num_planned_tokens = request.num_unknown_tokens = 0

    def _end(self, request: RequestState) -> None:
        del self.requests[request.key]
        if request.run_id is not None:
            self._leave_running(request)
        else:
            self._waiting.remove(request)

    def _commit_slice(self, item: Work, result: StepResult) -> TokenEvent | None:
        request, planned = item.request, item.slice
        run_id = planned.run_id
        if result.failures and run_id in result.failures:
            return self._fail(request, result.failures[run_id])
        request.num_computed_tokens += planned.length
        if self.reuse:
            num_full = request.num_computed_tokens // self.block_size
            if num_full > item.table.num_published:
                self._publish(request, item.table, num_full)
        if not planned.samples:
            return None
        request.num_unknown_tokens -= 1
        sampled = result.sampled[run_id]
        token_ids = request.token_ids
        offset = len(token_ids) - request.num_prompt_tokens
        token_ids += sampled.token_ids
        finish = None
        if len(token_ids) >= request.max_num_tokens or token_ids[-1] in request.end_token_ids:
            reason = request.finish_reason()
            if reason is not None:
                self._end(request)
                finish = Finish(reason)
        return TokenEvent(request, offset, sampled.token_ids, sampled.logprobs, finish)

    def _publish(self, request: RequestState, table: RequestBlocks, num_full: int) -> None:
        request.extend_keys(num_full)
        root = request.root.root
        self.cache.publish(table, root, num_full, request.token_ids)
        if self.tiers is not None and request.slots is not None:
            self.tiers.published(table, request.slots, root)

    def _fail(self, request: RequestState, reason: str) -> TokenEvent:
        if request.key in self.requests:
            self._end(request)
        finish = Finish(FinishReason.ERROR, reason)
        return TokenEvent(request, request.num_output_tokens, finish=finish)

    # ------------------------------------------------------------ checking

    def check_integrity(self) -> None:
        """Raises `AssertionError` if requests, tables and pool do not agree."""
        self.cache.check_integrity()
        self._waiting.check_integrity()
        listed = {request.key for request in (*self._waiting, *self._running)}
        assert listed == set(self.requests), "a request is lost"
        assert len(listed) == len(self._waiting) + len(self._running), "a request is listed twice"
        work = [item for items in self._in_flight.values() for item in items]
        tables = [request.table for request in self._running] + [item.table for item in work]
        slots = [request.slots for request in self._running] + [item.slots for item in work]
        if self.tiers is not None:
            self.tiers.check_integrity()
            self.tiers.host.check_references([*slots, *self.tiers.tables()])
        self.cache.check_references(tables)
        for request in self._running:
            assert request.table is not None
            assert request.num_computed_tokens < request.num_tokens
            ahead = [item.slice for item in work if item.slice.run_id == request.run_id]
            num_ahead = sum(each.length for each in ahead)
            assert request.num_planned_tokens == request.num_computed_tokens + num_ahead
            assert request.num_unknown_tokens == sum(each.samples for each in ahead)
            assert len(request.table.block_ids) >= self._blocks_for(request.num_planned_tokens)
