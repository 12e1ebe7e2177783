"""Sends the rows of a batch and records their outcomes.

Invariant: every row that is read either has its one line in the output or, if the run ends first,
none. There are never more rows in hand (on their way, or waiting for another attempt) than the
server takes at once, and one that is read waits for room before the next is read.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from cluster.batch.output import OutputFile
from cluster.batch.records import NoAnswer, Outcome, line_of
from cluster.batch.report import Tally
from cluster.batch.retry import RetryPolicy, is_retryable, may_be_away
from cluster.batch.rows import BadRow, Row
from cluster.batch.watch import ReadySource, Watch
from engine.errors import ShoalError

_SYNC_PERIOD_S = 1.0
_ROWS_IN_A_ROW = 64
"""Read without a look at anything else."""


class RowServer(ReadySource, Protocol):
    """A `Server`, as far as it matters here."""

    async def send(self, row: Row) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run."""

    concurrency: int
    wait_s: float
    retry: RetryPolicy


class Runner:
    """One run over the rows of one input. Made inside its event loop."""

    def __init__(self, server: RowServer, output: OutputFile, tally: Tally, limits: Limits) -> None:
        self._server = server
        self._output = output
        self._tally = tally
        self._retry = limits.retry
        self._changed = asyncio.Event()
        self.watch = Watch(server, limits.concurrency, limits.wait_s, self._changed.set)

    async def run(self, rows: Iterator[Row | BadRow | None]) -> None:
        """Returns when every row has its outcome. Raises `ShoalError` if it cannot go on."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._run(rows, group)
        except* ShoalError as errors:
            raise _first(errors) from None

    async def _run(self, rows: Iterator[Row | BadRow | None], group: asyncio.TaskGroup) -> None:
        helpers = [group.create_task(self._sync())]
        for number, row in enumerate(rows):
            if number % _ROWS_IN_A_ROW == 0:
                await asyncio.sleep(0)
            if isinstance(row, BadRow):
                self._end(row, NoAnswer(row.code, row.message))
            elif row is not None:
                self.watch.use(row.model)
                if len(helpers) == 1:
                    # Not before there is a row to send: else no server is needed.
                    helpers.append(group.create_task(self.watch.run()))
                await self._until(self._has_room)
                self._tally.in_flight += 1
                group.create_task(self._complete(row))
        await self._until(lambda: self._tally.in_flight == 0)
        for helper in helpers:
            helper.cancel()

    def _has_room(self) -> bool:
        return self.watch.is_open and self._tally.in_flight < self.watch.concurrency

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _complete(self, row: Row) -> None:
        try:
            self._end(row, await self._outcome(row))
        finally:
            self._tally.in_flight -= 1
            self._changed.set()

    async def _outcome(self, row: Row) -> Outcome:
        """The first that is final, or the last."""
        num_failed = 0
        while True:
            await self.watch.until_open()
            outcome = await self._server.send(row)
            if not may_be_away(outcome):
                self.watch.answered()
            if not is_retryable(outcome):
                return outcome
            is_away = may_be_away(outcome) and await self.watch.is_away()
            # A server that was not there when it was called has nothing against the row.
            was_sent = not isinstance(outcome, NoAnswer) or outcome.was_sent
            num_failed += was_sent or not is_away
            if num_failed > self._retry.num_retries:
                return outcome
            self._tally.retries += 1
            await asyncio.sleep(self._retry.delay_s(num_failed, outcome, random.random()))

    def _end(self, row: Row | BadRow, outcome: Outcome) -> None:
        self._output.append(line_of(row, outcome))
        self._tally.end(row.line, outcome)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_PERIOD_S)
            await asyncio.to_thread(self._output.sync)


def _first(errors: BaseExceptionGroup[ShoalError]) -> ShoalError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
