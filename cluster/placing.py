"""Puts requests on the engines of one model, new ones and those that have lost theirs.

Invariant: a request runs on one engine at a time. When `place` returns, that engine has accepted
all of it; when it raises, nothing of it runs. A suspect (`cluster/suspects.py`) goes only where it
may be on trial, in its turn.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.identity import LiveSettings
from cluster.limits import RetryBudget
from cluster.routing.decision import Decision, NoReplica, RouteRequest
from cluster.routing.router import Router
from cluster.session import EngineSession
from cluster.suspects import Case, Quarantine, Verdict
from engine.attempt import EngineRequest, EngineStream
from engine.errors import EngineDied, EngineLost, EngineSilent, RequestRejected, ShoalError
from engine.wire import RejectCode

_RETRY_S = 0.25
"""Pause before engines that had no room are asked again for a stream that must go on."""
_ELSEWHERE = (RejectCode.DRAINING, RejectCode.STALE_ATTEMPT)
"""Refusals that say nothing of the request, nor of how much there is to do."""


class NowhereToGo(ShoalError):
    """No engine can take a request, now or soon."""


class RequestCondemned(ShoalError):
    """The request has killed every engine that computed it."""

    def __init__(self) -> None:
        super().__init__(
            "two engines died while they computed this request, the second with no other request "
            "under suspicion on it; it is not tried again"
        )


class DeathsUsedUp(EngineLost):
    """The request has survived as many ends of engines as it may."""


@dataclass(slots=True, eq=False)
class Wish:
    """What is to be placed, together: all choices of a new request, or one that goes on."""

    route: RouteRequest
    requests: Sequence[EngineRequest]
    case: Case
    end_s: float
    """How long it may wait for an engine, on the clock of `time.monotonic`."""
    attempt: int = 0
    """Of the next try: every one has another number, so that none is taken for another."""
    is_new: bool = False
    """Nobody has been told yet that it runs: it may be refused for want of room."""
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A request on an engine that has accepted it."""

    decision: Decision
    session: EngineSession
    streams: list[EngineStream]
    attempt: int
    on_trial: bool
    routed_s: float
    """When the engine was chosen, on the clock of `time.perf_counter`."""


class Placer:
    """One model's. `hold(end_s, is_new)` waits until something has changed that may help, or raises
    `NowhereToGo`."""

    def __init__(
        self,
        router: Router,
        sessions: Mapping[str, EngineSession],
        settings: LiveSettings,
        hold: Callable[[float, bool], Awaitable[None]],
    ) -> None:
        self.quarantine = Quarantine()
        self.retries = RetryBudget()
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """Streams that have `resumed` elsewhere when their engine was lost or have `moved` from one
        that drains, and requests that were `condemned`."""
        self._router = router
        self._sessions = sessions
        self._hold = hold
        self._queue: deque[asyncio.Future[None]] = deque()
        """Suspects that wait for their turn."""

    async def place(self, wish: Wish) -> Placed:
        """Chooses an engine and returns once it has accepted; another is asked if it does not, and
        one that is on its way is waited for.

        Raises `RequestRejected`, `EngineLost`, `RequestCondemned` or `NowhereToGo`."""
        try:
            return await self._place(wish)
        except BaseException:
            if wish.is_suspect:
                self._call_next()  # It may have been its turn.
            raise

    async def _place(self, wish: Wish) -> Placed:
        tried: set[str] = set()
        refusals: list[Exception] = []
        num_waited_for = 0
        if wish.is_new:
            self.retries.earn(self.settings.router.retry_share)
        while self._may_try(wish, refusals):
            if wish.case.is_condemned:  # In another of its choices.
                raise RequestCondemned
            try:
                decision = self._router.route(wish.route, exclude=tried | self._closed_to(wish))
            except NoReplica:
                is_refused = len(refusals) > num_waited_for
                await self._wait(wish, refusals[-1] if is_refused else None)
                num_waited_for = len(refusals)
                tried.clear()
                continue
            tried.add(decision.replica_id)
            try:
                return await self._try(wish, decision)
            except EngineLost as error:
                refusals.append(error)
            except RequestRejected as error:
                if error.code is RejectCode.OVERLOADED:
                    refusals.append(error)
                elif error.code not in _ELSEWHERE:
                    raise
        raise refusals[-1]

    def _may_try(self, wish: Wish, refusals: Sequence[Exception]) -> bool:
        """What goes on is tried for as long as it may wait, unless engines die of it."""
        most = self.settings.router.max_attempts
        if not wish.is_new:
            return sum(map(_has_died, refusals)) < most
        return not refusals or (len(refusals) < most and self.retries.spend())

    async def try_elsewhere(self, wish: Wish, here: EngineSession) -> Placed | None:
        """Places what runs on the engine `here` on another one that runs the very same, if one
        takes it at once."""
        tried = {
            core_id
            for core_id, session in self._sessions.items()
            if session is here or session.fingerprint != here.fingerprint
        }
        while True:
            try:
                decision = self._router.route(wish.route, exclude=tried)
                tried.add(decision.replica_id)
                return await self._try(wish, decision)
            except (NoReplica, EngineLost):
                return None
            except RequestRejected:
                continue

    def lost(self, wish: Wish, how: str, is_suspect: bool, is_blamed: bool) -> None:
        """What `wish` is for has lost its engine through no wish of ours; `how` names that end, and
        `is_blamed` says that it died while the request was on trial there.
        Raises `RequestCondemned`, or `DeathsUsedUp` when it has survived enough of them."""
        wish.is_suspect = is_suspect
        limit = self.settings.failover.max_failovers
        verdict = self.quarantine.ended(wish.case, how, is_blamed, limit)
        if verdict is Verdict.CONDEMNED:
            self.counts["condemned"] += 1
            raise RequestCondemned
        if verdict is Verdict.WORN_OUT:
            raise DeathsUsedUp(f"{len(wish.case.ends)} engines ended under a request")

    def end_trial(self, case: Case) -> None:
        """One choice is on trial no more."""
        if self.quarantine.end(case):
            self._call_next()

    def note_change(self) -> None:
        """The engines have changed: all who wait for their turn look again."""
        while self._call_next():
            pass

    # ------------------------------------------------------------ one try

    async def _try(self, wish: Wish, decision: Decision) -> Placed:
        session = self._sessions[decision.replica_id]
        attempt, wish.attempt = wish.attempt, wish.attempt + 1
        requests = [replace(request, attempt=attempt) for request in wish.requests]
        num_on_trial = len(requests) if wish.is_suspect else 0
        for _ in range(num_on_trial):
            self.quarantine.begin(wish.case, session.core_id)
        routed_s = time.perf_counter()
        try:
            streams = await session.start(requests, decision)
        except BaseException as error:
            for _ in range(num_on_trial):
                self.end_trial(wish.case)
            # It had probably been dead before, as with others of its node. But its word may have
            # been lost with it: a suspect, not condemned.
            wish.is_suspect |= _has_died(error)
            raise
        return Placed(decision, session, streams, attempt, num_on_trial > 0, routed_s)

    def _closed_to(self, wish: Wish) -> set[str]:
        return self.quarantine.closed_to(wish.case, self._sessions) if wish.is_suspect else set()

    # ------------------------------------------------------------ waiting

    async def _wait(self, wish: Wish, refusal: Exception | None) -> None:
        """Until it makes sense to ask all engines anew. Raises `refusal`, the last one if any, when
        it never will, or what `hold` does."""
        if wish.is_new and isinstance(refusal, RequestRejected):
            raise refusal
        if self._closed_to(wish):
            await self._await_turn(wish)
            return
        if wish.is_suspect:
            self._call_next()  # The turn is not what this waits for.
        if wish.is_new or refusal is None:
            await self._hold(wish.end_s, wish.is_new)
        else:
            await _pause(wish.end_s, refusal)

    async def _await_turn(self, wish: Wish) -> None:
        """Until there may be an engine without a trial."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await asyncio.wait({turn}, timeout=max(0.0, wish.end_s - time.monotonic()))
        finally:
            is_called = turn.done()
            turn.cancel()
        if not is_called:
            await self._hold(wish.end_s, wish.is_new)  # Says that the time is over.

    def _call_next(self) -> bool:
        """Lets the first of the queue look again; whether there was one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return True
        return False


def _has_died(error: BaseException) -> bool:
    return isinstance(error, EngineDied) and not isinstance(error, EngineSilent)


async def _pause(end_s: float, refusal: Exception) -> None:
    """Before all engines are asked once more. Raises `refusal` at `end_s`."""
    patience_s = end_s - time.monotonic()
    if patience_s <= 0:
        raise refusal
    await asyncio.sleep(min(_RETRY_S, patience_s))
