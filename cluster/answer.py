"""One request's output as an HTTP answer, whole or as server-sent events, in any dialect.

Invariant: a stream is begun only with output that an engine has accepted, a whole answer only once
there is output, so that what fails before has a status of its own; when the client goes away, at
whatever point, the output is closed; and both kinds of answer are written from the same deltas by
the same dialect.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from cluster.errors import failure_of
from cluster.generation import Usage
from cluster.postprocess import OutputDelta
from engine.errors import ShoalError

logger = logging.getLogger(__name__)

_KEEP_ALIVE = b": keep-alive\n\n"
_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody receives it, logs show it."""


class Output(Protocol):
    """Accepted choices on their way, as `Generation` has them."""

    @property
    def usage(self) -> Usage: ...

    async def next_delta(self) -> tuple[int, OutputDelta] | None: ...

    def close(self) -> None: ...


class Dialect(Protocol):
    """How one API writes one answer. All of it is bytes: events when streamed, else a body."""

    def begin(self, index: int) -> bytes:
        """Events that open a choice."""
        ...

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        """Events that `delta` adds to a choice; may be none."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Events after the last choice has ended."""
        ...

    def failed(self, body: bytes) -> bytes:
        """The event that ends a stream early; `body` is what a failed whole answer would have."""
        ...

    def whole(self, choices: Mapping[int, Sequence[OutputDelta]], usage: Usage) -> bytes:
        """The body of a whole answer; every choice has ended."""
        ...


async def respond(
    output: Output, dialect: Dialect, request: Request, streamed: bool, keep_alive_s: float
) -> Response:
    """The response that carries `output`, which is closed on every way out."""
    if streamed:
        return EventStream(output, dialect, keep_alive_s)
    choices: dict[int, list[OutputDelta]] = {}
    collecting = asyncio.create_task(_collect(output, choices))
    watching = asyncio.create_task(_disconnected(request.receive))
    tasks = {collecting, watching}
    is_handed_over = False
    try:
        while not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if choices:
                break
        if collecting.done():
            body = dialect.whole(collecting.result(), output.usage)
            return Response(body, media_type="application/json")
        if watching.done():
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        is_handed_over = True
        return SlowAnswer(output, dialect, collecting, keep_alive_s)
    finally:
        watching.cancel()
        if not is_handed_over:
            collecting.cancel()
            output.close()


class SlowAnswer(Response):
    """A whole answer that takes its time.

    Blanks keep its connection open: JSON allows them before a value. An answer that fails now
    breaks the connection off, which no client takes for an answer."""

    media_type = "application/json"

    def __init__(
        self,
        output: Output,
        dialect: Dialect,
        collecting: "asyncio.Task[dict[int, list[OutputDelta]]]",
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._output = output
        self._dialect = dialect
        self._collecting = collecting
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(_disconnected(receive))
        tasks = {self._collecting, watching}
        headers = self.raw_headers
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not any(task.done() for task in tasks):
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.wait(
                    tasks, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED
                )
            if self._collecting.done():
                body = self._dialect.whole(self._collecting.result(), self._output.usage)
                await send({"type": "http.response.body", "body": body, "more_body": False})
        except ShoalError as error:
            logger.error("an answer was broken off: %s", error)
        finally:
            for task in tasks:
                task.cancel()
            self._output.close()


async def _collect(
    output: Output, choices: dict[int, list[OutputDelta]]
) -> dict[int, list[OutputDelta]]:
    """Fills `choices`, and returns it once it is whole."""
    while (entry := await output.next_delta()) is not None:
        index, delta = entry
        choices.setdefault(index, []).append(delta)
    return choices


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as server-sent events.

    A response of its own because the output must be closed on every way out, also when the client
    leaves before the first byte, or while no token comes. A failure after the status line is an
    event of its own, and the dialect's usual end does not follow. Comments keep the connection
    alive: no more than twice `keep_alive_s` pass in silence."""

    media_type = "text/event-stream"

    def __init__(self, output: Output, dialect: Dialect, keep_alive_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._output = output
        self._dialect = dialect
        self._keep_alive_s = keep_alive_s
        self._is_quiet = True
        """Nothing was sent since the last look."""
        self._is_sending = False
        self._comment: asyncio.Future[None] | None = None
        """A keep-alive comment that is being sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(_disconnected(receive))
        tasks = {writing, watching}
        try:
            while not (await self._wait_for_any(tasks)):
                await self._keep_alive(send)
            if writing.done():
                writing.result()
        finally:
            self._output.close()
            ending = [*tasks, self._comment] if self._comment is not None else [*tasks]
            for task in ending:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*ending, return_exceptions=True)

    async def _wait_for_any(self, tasks: set[asyncio.Task[None]]) -> bool:
        done, _ = await asyncio.wait(
            tasks, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    async def _keep_alive(self, send: Send) -> None:
        # A send that is under way waits for the client, who has something to read then.
        if self._is_quiet and not self._is_sending:
            body = {"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True}
            self._comment = asyncio.ensure_future(send(body))
            await self._comment
            self._comment = None
        self._is_quiet = True

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        if self._comment is not None:
            await asyncio.wait({self._comment})
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = self._is_quiet = False

    async def _write(self, send: Send) -> None:
        self._is_sending = True
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        self._is_sending = False
        begun: set[int] = set()
        try:
            while (entry := await self._output.next_delta()) is not None:
                index, delta = entry
                events = self._dialect.delta(index, delta)
                if index not in begun:
                    begun.add(index)
                    events = self._dialect.begin(index) + events
                if events:
                    await self._send(send, events)
        except Exception as error:
            await self._send(send, self._dialect.failed(failure_of(error).body), more=False)
            return
        await self._send(send, self._dialect.end(self._output.usage), more=False)
