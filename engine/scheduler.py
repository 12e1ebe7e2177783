"""The scheduler: hands out each step's token budget. There are no phases.

Invariant: every request has `num_tokens` and `num_computed_tokens`, and a step closes some of the
difference. Chunked prefill, cache hits, decode, and coming back after preemption or failover are
that same arithmetic. `add`, `abort`, `expire`, `schedule` and `commit` are the only mutators;
nothing here reads a clock or does I/O.

A request in a plan that is not committed keeps its blocks whatever happens to it meanwhile. With
`overlap` it may be in one more: the token that the first draws is then known to the executor alone,
which is where it is needed. What the second computes for a request that has ended is dropped.
"""

from cache.prefix import PrefixCache, RequestBlocks
from cache.tiers import LowerTiers
from configs.engine import SchedulerConfig
from engine.counts import SchedulerCounts
from engine.draft import Draft, Flight
from engine.errors import RequestRejected
from engine.plan import StepPlan, StepResult
from engine.request import Output, RequestKey, RequestState, ended
from engine.request_cache import Found, RequestCache
from engine.running import RunningRequests
from engine.waiting import WaitingQueue, ttft_s
from engine.wire import Finish, FinishReason, RejectCode, TokenItem

_MAX_IN_FLIGHT = 2
"""Plans that one request may be in: the one that runs, and the next."""
_BLOCKS_PUBLISHED_AT_ONCE = 4
"""Of what a request decodes, as long as it runs: three calls in four are spared. Nobody asks for
the end of an answer before it is there."""
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
        self.requests: dict[RequestKey, RequestState] = {}
        self.counts = SchedulerCounts()
        self._found = RequestCache(cache, block_size, reuse, tiers)
        self._running = RunningRequests(self._found)
        self._waiting = WaitingQueue()
        self._in_flight: dict[int, Flight] = {}
        self._step = 0
        self._now = 0.0
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

    def add(self, request: RequestState, now: float = 0.0) -> list[Output]:
        """Takes a request that fits the pool (`engine.admission` sees to it), at the time `now` in
        seconds. Returns its end if its output is already complete. Raises `RequestRejected` when
        the queue is full."""
        if request.key in self.requests:
            raise RequestRejected(
                RejectCode.STALE_ATTEMPT, f"request {request.key[1]!r} is already here"
            )
        if (reason := request.finish_reason()) is not None:
            return [ended(request, Finish(reason))]
        self._waiting.check_room(request, self.config)
        request.ticket = self._next_ticket
        request.arrived_s = now
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

    def expire(self, now: float) -> list[Output]:
        """Ends those that have not begun and have waited for longer than they may."""
        limit_s = self.config.queue_timeout_s
        if limit_s is None:
            return []
        text = f"it has waited for a place for {limit_s:g} s, the longest allowed"
        finish = Finish(FinishReason.QUEUE_TIMEOUT, text)
        late = self._waiting.late(now - limit_s)
        for request in late:
            self._end(request)
        self.counts.timed_out += len(late)
        return [ended(each, finish) for each in late]

    def schedule(self, now: float = 0.0, prefill_tokens_per_s: float = 0.0) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. The rate is that of late; 0:
        not known."""
        draft = Draft.of(self.config, self._running, prefill_tokens_per_s)
        self._found.advance(self._step)
        if not self._plan_running(draft):
            self._plan_waiting(draft, now)
        if self.tiers is not None:
            # Last, so that it has what those leave who were preempted; an executor does them first.
            draft.saves = self.tiers.plan_saves()
        if draft.is_empty:
            return None
        self._step += 1
        flight = self._in_flight[self._step] = draft.as_flight()
        self.cache.enter_plan(*flight.tables)
        if self.tiers is not None:
            self.tiers.seal(self._step)
        return draft.as_plan(self._step, self._running.take_ended())

    def commit(self, result: StepResult, now: float = 0.0) -> list[Output]:
        """Takes over what a step computed, and gives its blocks free."""
        self._now = now
        flight, take = self._in_flight.pop(result.step), self._take_over
        outputs = [
            take(item.request, item.slice.length, item.slice.samples, result)
            for item in flight.work
        ]
        outputs += [take(request, 1, True, result) for request in flight.decodes]
        self.cache.leave_plan(*flight.tables)
        if self.tiers is not None:
            loaded = [item.slots for item in flight.work if item.slots is not None]
            self.tiers.host.leave_plan(*loaded)
            self.tiers.commit(result.step)
        return [output for output in outputs if output is not None]

    # ------------------------------------------------------------ planning

    def _plan_running(self, draft: Draft) -> bool:
        """Returns whether anything had to be preempted."""
        before, size = self.counts.preempted, self.block_size
        most_in_flight = _MAX_IN_FLIGHT if self.config.overlap else 1
        prompts: list[RequestState] = []
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
            if num_known - start == 1:
                has_room = start < len(table.block_ids) * size
                if draft.budget and (has_room or self._add_block(request, table, draft)):
                    draft.decode(request)
            elif num_known > start:
                prompts.append(request)
        self._plan_prompts(prompts, draft)
        return self.counts.preempted > before

    def _plan_prompts(self, requests: list[RequestState], draft: Draft) -> None:
        """The short ones first: of what is there for prompts, as much as half is theirs, also of
        those that have yet to start. So a short one waits for those before it, and for no long one;
        and the long ones have the other half at least."""
        wanted = draft.num_short_tokens(requests)
        if len(self._running) < self.config.max_num_seqs:
            wanted += self._waiting.num_short_tokens(draft.longest_short)
        draft.keep_for_short(wanted)
        for request in sorted(requests, key=draft.is_long):
            if request.table is None:  # Preempted a moment ago.
                continue
            length = draft.length_for(request)
            if length > 0 and self._make_room(request, length, draft):
                self._plan_slice(request, length, draft)

    def _add_block(self, request: RequestState, table: RequestBlocks, draft: Draft) -> bool:
        """One more block for a decode. False if it cannot have one now."""
        if not self.cache.num_available and not self._make_room(request, 1, draft):
            return False
        fresh = self.cache.grow(table, len(table.block_ids) + 1)
        assert fresh is not None
        assert request.run_id is not None
        draft.new_blocks[request.run_id] = fresh[0]
        return True

    def _make_room(self, request: RequestState, length: int, draft: Draft) -> bool:
        """Preempts until `length` more tokens fit. False if it was itself the one to go, or if
        the room comes only when a plan in flight is committed."""
        table = request.table
        assert table is not None
        num_blocks = self._blocks_for(request.num_planned_tokens + length)
        needed = num_blocks - len(table.block_ids)
        while needed > self.cache.num_available:
            victim = self._running.weakest
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

    def _plan_waiting(self, draft: Draft, now: float) -> None:
        while draft.budget > 0 and draft.prefill_budget > 0:
            is_full = len(self._running) >= self.config.max_num_seqs
            # A place that is taken from somebody goes to the strongest, whoever's turn it is.
            turn = 0 if is_full else self._running.num_started
            longest = None if draft.long_budget > 0 else draft.longest_short
            request = self._waiting.next(turn, longest)
            # Before anything is looked up: with all places taken, most steps end here.
            if request is None or (is_full and not self._is_stronger(request, draft)):
                return
            found = self._found.find(request)
            if self._running.under_way.follow(request, found.num_blocks):
                self._found.release(found.table, found.slots)
                continue
            is_new = request.cached_tokens is None
            may_start = not is_full or self._displace_weakest(draft)
            if not (may_start and self._plan_start(request, found, draft)):
                self._found.release(found.table, found.slots)
                return
            if is_new:
                request.started_s = now
                self.counts.note_start(request.service_class, now - request.arrived_s)
            else:
                self.counts.note_return(request.num_lost_tokens, request.num_computed_tokens)

    def _is_stronger(self, request: RequestState, draft: Draft) -> bool:
        """Whether a waiting request is of a stronger class than somebody who may be displaced."""
        weakest = self._running.weakest
        return (
            request.rank < weakest.rank
            and weakest.num_displaced < _MAX_DISPLACED
            and weakest.run_id not in draft.starts
        )

    def _displace_weakest(self, draft: Draft) -> bool:
        """Makes a place. False if the weakest can only go later."""
        victim = self._running.weakest
        if not self._may_leave(victim):
            return False
        victim.num_displaced += 1
        self.counts.displaced += 1
        self._preempt(victim, draft)
        return True

    def _plan_start(self, request: RequestState, found: Found, draft: Draft) -> bool:
        """Plans a waiting request's first slice after what was found of it. False if there is no
        room for it now."""
        table, start = found.table, found.num_blocks * self.block_size + found.num_copied
        # Before the table grows.
        is_loaded = found.num_loaded > 0
        request.num_planned_tokens = start
        length = draft.length_for(request)
        first = len(table.block_ids)
        needed = self._blocks_for(start + length) - first
        if length <= 0 or needed > self.cache.num_available:
            request.num_planned_tokens = 0
            return False
        self._waiting.remove(request)
        begun = self._running.start(request, table)
        draft.starts[begun.run_id] = begun
        request.slots, request.promotion, request.following = found.slots, None, None
        request.num_computed_tokens = start
        fresh = self._plan_slice(request, length, draft)
        if found.num_copied:
            draft.copies.append((found.source, fresh[0]))
            self.counts.copied_tokens += found.num_copied
        if is_loaded and found.slots is not None:
            draft.loads += self._found.load(table, found.slots, first)
            draft.work[begun.run_id].slots = found.slots
        return True

    def _plan_slice(self, request: RequestState, length: int, draft: Draft) -> list[int]:
        """Returns the blocks that were added for it."""
        table = request.table
        assert table is not None
        fresh = self.cache.grow(table, self._blocks_for(request.num_planned_tokens + length))
        assert fresh is not None
        draft.add(request, table, length, tuple(fresh))
        return fresh

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _wait(self, request: RequestState) -> None:
        self._found.expect(request)
        self._waiting.add(request)

    # ------------------------------------------------------------ leaving

    def _preempt(self, request: RequestState, draft: Draft) -> None:
        """Back to the queue, to be computed again; its part of the draft is refunded."""
        assert request.run_id is not None
        draft.drop(request.run_id)
        request.num_lost_tokens = request.num_computed_tokens
        self._running.leave(request)
        request.num_preemptions += 1
        self.counts.preempted += 1
        self._wait(request)

    def _end(self, request: RequestState) -> None:
        del self.requests[request.key]
        if request.run_id is not None:
            self._running.leave(request)
        else:
            self._waiting.remove(request)

    def _take_over(
        self, request: RequestState, length: int, samples: bool, result: StepResult
    ) -> Output | None:
        """What a step did for a request: `length` tokens, and a draw if it `samples`."""
        run_id, table = request.run_id, request.table
        if run_id is None or table is None:
            return None  # Nobody in flight is preempted, so it has ended.
        try:
            if result.failures and run_id in result.failures:
                return self._fail(request, result.failures[run_id])
            request.num_computed_tokens += length
            num_full = request.num_computed_tokens // self.block_size
            least = _BLOCKS_PUBLISHED_AT_ONCE if length == 1 else 1
            if num_full - table.num_published >= least:
                self._found.publish(request, table, least)
                if length > 1:
                    self._running.under_way.advance(request)
            if not samples:
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
            cached = request.cached_tokens or 0
            return request, TokenItem(
                request.key[1],
                request.attempt,
                offset,
                sampled.token_ids,
                finish,
                cached,
                sampled.logprobs,
                None if request.has_drawn else request.first_token(self._now),
            )
        except Exception as error:
            # One request's fault ends that request; the others' results still count.
            return self._fail(request, f"internal error: {error!r}")

    def _fail(self, request: RequestState, reason: str) -> Output:
        if request.key in self.requests:
            self._end(request)
        return ended(request, Finish(FinishReason.ERROR, reason))

    # ------------------------------------------------------------ checking

    def check_integrity(self) -> None:
        """Raises `AssertionError` if requests, tables and pool do not agree."""
        self.cache.check_integrity()
        self._waiting.check_integrity()
        listed = {request.key for request in (*self._waiting, *self._running)}
        assert listed == set(self.requests), "a request is lost"
        assert len(listed) == len(self._waiting) + len(self._running), "a request is listed twice"
        flights = self._in_flight.values()
        tables = [request.table for request in self._running]
        tables += [table for flight in flights for table in flight.tables]
        slots = [request.slots for request in self._running] + [
            item.slots for flight in flights for item in flight.work
        ]
        if self.tiers is not None:
            self.tiers.check_integrity()
            self.tiers.host.check_references([*slots, *self.tiers.tables()])
        self.cache.check_references(tables)
        self._running.check_integrity(flights, self.block_size)
