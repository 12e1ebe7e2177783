"""Whether the server can take rows, and how many at once.

Invariant: rows are sent only while the gate is open. It opens when `/ready` says that a model of
the batch is ready, and closes at the first failure that can mean that the server is away; then
`/ready` is asked at once, and says which it was. So a server that is away costs each row that was
on its way one attempt, and the others none. Away for `wait_s` without any row answered meanwhile,
it ends the run.

`/ready` is asked every few seconds anyway, so that the number of rows follows the engines. A look
that fails while nothing else does closes nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn, Protocol

from cluster.batch import capacity
from cluster.batch.capacity import ReadyReport
from cluster.batch.server import NotReady
from engine.errors import ShoalError

_PERIOD_S = 5.0
_AWAY_PERIOD_S = 1.0


class ServerAway(ShoalError):
    """No server for as long as was to be waited."""


class ReadySource(Protocol):
    """A `Server`, as far as it matters here."""

    @property
    def url(self) -> str: ...

    async def ready(self) -> ReadyReport | None: ...


class Watch:
    """The gate of one run."""

    def __init__(
        self, server: ReadySource, limit: int, wait_s: float, on_change: Callable[[], None]
    ) -> None:
        self._server = server
        self._limit = limit
        self._wait_s = wait_s
        self._on_change = on_change
        self._models: set[str] = set()
        self._report: ReadyReport | None = None
        self._gate = asyncio.Event()
        self._look_now = asyncio.Event()
        self._next_verdict = _new_verdict()
        self._away_since_s: float | None = None
        self._problem = ""
        self.concurrency = 1

    def use(self, model: str | None) -> None:
        """Takes in that rows ask for this model."""
        if model is not None and model not in self._models:
            self._models.add(model)
            self._count()

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    async def until_open(self) -> None:
        await self._gate.wait()

    def answered(self) -> None:
        """A row got an answer: whatever `/ready` says, the server serves."""
        if self._away_since_s is not None:
            self._away_since_s = _now_s()

    async def is_away(self) -> bool:
        """After a failure that can mean it: closes the gate and looks."""
        self._gate.clear()
        self._look_now.set()
        # Not the look that is under way, which may have begun before the failure.
        return await asyncio.shield(self._next_verdict)

    @property
    def waiting(self) -> str:
        """What is waited for and for how long already; empty while nothing is."""
        if self._away_since_s is None:
            return ""
        waited_s = _now_s() - self._away_since_s
        url, of_s = self._server.url, self._wait_s
        return f"waiting for {url}: {self._problem} ({waited_s:.0f} of {of_s:.0f} s)"

    async def run(self) -> NoReturn:
        """Raises `ServerAway`, or `ServerRefused`."""
        while True:
            self._look_now.clear()
            await self._look()
            period_s = _PERIOD_S if self.is_open else _AWAY_PERIOD_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), period_s)

    async def _look(self) -> None:
        verdict, self._next_verdict = self._next_verdict, _new_verdict()
        was_open = self.is_open
        problem = None
        try:
            report = await self._server.ready()
            if report is not None:
                problem = capacity.why_not_ready(report, self._models)
            self._report = report
        except NotReady as error:
            problem = str(error)
        if problem is None:
            self._away_since_s = None
            self._count()
            # A failure meanwhile has closed it, and waits for the next look.
            if not self._look_now.is_set():
                self._gate.set()
                self._on_change()
        elif not was_open:
            self._away(problem)
        verdict.set_result(problem is not None)

    def _away(self, problem: str) -> None:
        now_s = _now_s()
        self._problem = problem
        if self._away_since_s is None:
            self._away_since_s = now_s
        if now_s - self._away_since_s >= self._wait_s:
            waited = f" for {self._wait_s:g} s" if self._wait_s else ""
            raise ServerAway(f"{self._server.url} cannot take rows{waited}: {problem}")

    def _count(self) -> None:
        self.concurrency = capacity.concurrency(self._report, self._models, self._limit)
        self._on_change()


def _new_verdict() -> "asyncio.Future[bool]":
    return asyncio.get_running_loop().create_future()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
