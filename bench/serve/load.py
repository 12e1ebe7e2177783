"""Drives a load: which request goes out when.

Invariant: in an open loop a conversation begins at its time, whether or not the server keeps up,
and its latency counts from that time, so a stall is felt by every request that was due in it (no
coordinated omission). In a closed loop one begins when another has ended. Turns of a conversation
always follow one another. A stop loses nothing: what is under way is recorded as interrupted.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.serve.client import Client
from bench.serve.dialect import PATHS, BodyOptions, History, request_body
from bench.serve.prompts import Renderer
from bench.serve.records import Record
from bench.serve.watch import ClientLoad, LoadWatch
from bench.serve.workloads import Conversation

_LOOKAHEAD_BYTES = 32 << 20
_LOOKAHEAD_REQUESTS = 1024
_PAUSE_AFTER_FAILURE_S = 0.1
"""A worker of a closed loop must not spin on a server that refuses everything."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """A closed loop of `concurrency` conversations at a time, or, when that is None, an open loop
    at the offsets of the conversations."""

    concurrency: int | None
    duration_s: float | None = None
    """Nothing begins after this; what has begun is waited for."""
    think_s: float = 0.0
    """Between an answer and the next turn."""

    def is_over(self, now_s: float) -> bool:
        return self.duration_s is not None and now_s >= self.duration_s


@dataclass(frozen=True, slots=True)
class _Ready:
    """A conversation whose first request is ready to be written to a socket."""

    conversation: Conversation
    history: History
    body: bytes


@dataclass(slots=True)
class LoadResult:
    """What came of a load; also of one that was stopped."""

    records: list[Record] = field(default_factory=list)
    client: ClientLoad = field(default_factory=ClientLoad)
    interrupted: bool = False


class Load:
    """One load on one server. `running`, `done` and `failed` may be looked at meanwhile."""

    def __init__(
        self, client: Client, renderer: Renderer, options: BodyOptions, pacing: Pacing
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._options = options
        self._pacing = pacing
        self.records: list[Record] = []
        self.running = 0
        self.done = 0
        self.failed = 0
        self.output_tokens = 0

    def elapsed_s(self) -> float:
        return self._client.clock()

    async def run(
        self, conversations: Iterator[Conversation], stop: asyncio.Event | None = None
    ) -> LoadResult:
        """Until the conversations or the duration are over, or `stop` is set."""
        ready = self._prepared(conversations)
        watch = LoadWatch()
        self._client.start_clock()
        drive = self._open_loop if self._pacing.concurrency is None else self._closed_loop
        driving = asyncio.create_task(drive(ready))
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            interrupted = not driving.done()
        finally:
            for task in (driving, stopping):
                task.cancel()
            await asyncio.gather(driving, stopping, return_exceptions=True)
        if not driving.cancelled():
            driving.result()
        return LoadResult(self.records, await watch.finish(), interrupted)

    # ------------------------------------------------------------------ pacing

    async def _closed_loop(self, ready: Iterator[_Ready]) -> None:
        assert self._pacing.concurrency is not None

        async def worker() -> None:
            for one in ready:
                now_s = self._client.clock()
                if self._pacing.is_over(now_s):
                    return
                if not await self._converse(one, now_s):
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as workers:
            for _ in range(self._pacing.concurrency):
                workers.create_task(worker())

    async def _open_loop(self, ready: Iterator[_Ready]) -> None:
        async with asyncio.TaskGroup() as conversing:
            for one in ready:
                due_s = one.conversation.offset_s
                assert due_s is not None, "an open loop needs a time for each conversation"
                if self._pacing.is_over(due_s):
                    return
                await asyncio.sleep(max(0.0, due_s - self._client.clock()))
                conversing.create_task(self._converse(one, due_s))

    def _prepared(self, conversations: Iterator[Conversation]) -> Iterator[_Ready]:
        """Bodies are made ahead, up to a bound, so that making a long prompt delays no request;
        the first of them here, before the clock starts."""
        ahead: deque[_Ready] = deque()
        held_bytes = 0
        while held_bytes < _LOOKAHEAD_BYTES and len(ahead) < _LOOKAHEAD_REQUESTS:
            one = self._prepare(conversations)
            if one is None:
                break
            ahead.append(one)
            held_bytes += len(one.body)

        def take() -> Iterator[_Ready]:
            while ahead:
                yield ahead.popleft()
                one = self._prepare(conversations)
                if one is not None:
                    ahead.append(one)

        return take()

    def _prepare(self, conversations: Iterator[Conversation]) -> _Ready | None:
        conversation = next(conversations, None)
        if conversation is None:
            return None
        history = History()
        if conversation.system:
            history.messages.append(("system", self._renderer.render(conversation.system)))
        first = conversation.turns[0]
        history.messages.append(("user", self._renderer.render(first.pieces)))
        body = request_body(self._options, history, first.output_tokens)
        return _Ready(conversation, history, body)

    # ------------------------------------------------------------------ conversations

    async def _converse(self, ready: _Ready, due_s: float) -> bool:
        """All turns, one after the other; false when one of them failed."""
        conversation, history, body = ready.conversation, ready.history, ready.body
        input_tokens = sum(piece.num_tokens for piece in conversation.system)
        last = len(conversation.turns) - 1
        for number, turn in enumerate(conversation.turns):
            if number:
                history.messages.append(("user", self._renderer.render(turn.pieces)))
                body = request_body(self._options, history, turn.output_tokens)
            input_tokens += turn.input_tokens
            record = Record(due_s, input_tokens, turn.output_tokens)
            async with self._counted(record):
                path = PATHS[self._options.api]
                await self._client.send(path, body, record, keep_text=number < last)
            if record.failure is not None:
                return False
            if number < last:
                input_tokens += record.output_tokens
                history.messages.append(("assistant", record.text))
                record.text = ""
                if self._pacing.think_s:
                    await asyncio.sleep(self._pacing.think_s)
                due_s = self._client.clock()
                if self._pacing.is_over(due_s):
                    return True
        return True

    @asynccontextmanager
    async def _counted(self, record: Record) -> AsyncIterator[None]:
        self.records.append(record)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.done += record.failure is None
            self.failed += record.failure is not None
            self.output_tokens += record.output_tokens
