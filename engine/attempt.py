"""One attempt of one request, at the ingress's end of the wire.

Invariant: a stream yields each output token once and in order, or raises `EngineLost`; what it has
yielded is a prefix of the output, whatever overlaps or gaps arrive.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cache.wheel import Retention
from engine.errors import EngineLost
from engine.wire import SamplingParams, ServiceClass, TokenItem


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One choice of one request, as an ingress hands it to an engine."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    attempt: int = 0
    output_ids: Sequence[int] = ()
    """What earlier attempts delivered."""
    priority: int = 0
    service_class: ServiceClass = ServiceClass.STANDARD
    cache_domain: str = ""
    retention: Retention = Retention.NORMAL


class MoveAsked(Exception):
    """In place of the next output: the attempt should go on elsewhere if it can. It runs on."""


class StreamOwner(Protocol):
    """The client that a stream belongs to."""

    def abort_stream(self, stream: "EngineStream") -> None:
        """Tells the engine to end it."""
        ...

    def forget_stream(self, stream: "EngineStream") -> None:
        """It has ended; nothing more is to be delivered to it."""
        ...


class EngineStream:
    """The output of one attempt: iterate it for `TokenItem`s; the last one carries `finish`."""

    def __init__(self, owner: StreamOwner, request: EngineRequest, number: int = 0) -> None:
        self.request_id = request.request_id
        self.number = number
        """Of the request in its session; see `EngineObserver.request_seen`."""
        self.attempt = request.attempt
        self.num_output_tokens = len(request.output_ids)
        self._owner = owner
        self._items: deque[TokenItem] = deque()
        self._error: Exception | None = None
        self._accepted = False
        self._ended = False
        self._is_asked_to_move = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[TokenItem]:
        return self

    async def __anext__(self) -> TokenItem:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            if self._is_asked_to_move:
                self._is_asked_to_move = False
                raise MoveAsked
            await self._wait()
        return self._items.popleft()

    def ask_to_move(self) -> None:
        """Once all that has arrived is read, `MoveAsked` is raised, once."""
        self._is_asked_to_move = True
        self._wake()

    def abort(self) -> None:
        """Ends the attempt here and in the engine. Harmless when it has ended."""
        if not self._ended:
            self._owner.abort_stream(self)
            self._end()

    async def accepted(self, timeout_s: float = 10.0) -> None:
        """Returns when the engine has accepted the request.

        Raises `RequestRejected` with the engine's code and message, or `EngineLost`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._accepted:
                    if self._error is not None:
                        raise self._error
                    await self._wait()
        except TimeoutError:
            self.abort()
            raise EngineLost(f"engine did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def accept(self) -> None:
        self._accepted = True
        self._wake()

    def put(self, item: TokenItem) -> None:
        """Takes what is new of `item`. A hole means that output was lost on the way."""
        skip = self.num_output_tokens - item.offset
        if skip < 0:
            self.fail(EngineLost(f"output of request {self.request_id} has a gap"))
            self._owner.abort_stream(self)
            return
        if skip > 0:
            logprobs = item.logprobs[skip:] if item.logprobs is not None else None
            item = msgspec.structs.replace(
                item,
                offset=self.num_output_tokens,
                token_ids=item.token_ids[skip:],
                logprobs=logprobs,
            )
        if not item.token_ids and item.finish is None:
            return
        self.num_output_tokens += len(item.token_ids)
        self._items.append(item)
        if item.finish is not None:
            self._end()
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._owner.forget_stream(self)
        self._wake()
