"""One request on its way through an engine: every choice a stream, merged as they come.

Invariant: whoever starts a generation ends it: `close` aborts in the engine whatever still runs,
and is called on every way out. A choice whose stop string is complete is aborted at once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from cluster.postprocess import OutputDelta, Postprocessor, TextDecoder
from cluster.preprocess import PreparedRequest
from engine.errors import ShoalError
from engine.wire import Finish, TokenItem


class GenerationFailed(ShoalError):
    """The engine accepted a request and then gave it up."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.message or f"the engine ended the request: {finish.reason}")
        self.reason = finish.reason


class TokenStream(Protocol):
    """One choice of a request as it comes from an engine, or from several."""

    async def __anext__(self) -> TokenItem: ...

    def __aiter__(self) -> AsyncIterator[TokenItem]: ...

    def abort(self) -> None:
        """Ends it. Harmless when it has ended."""
        ...


@dataclass(slots=True)
class RequestTimes:
    """When a request passed each stage, in seconds of `time.perf_counter`."""

    arrived_s: float = field(default_factory=time.perf_counter)
    prepared_s: float = 0.0
    routed_s: float = 0.0
    accepted_s: float = 0.0
    first_token_s: float = 0.0
    queue_s: float = 0.0
    """That the engine says the first choice has waited there, of the engine's share."""
    prefill_s: float = 0.0
    """And how long it took from then to its first token."""

    def stages(self) -> Iterator[tuple[str, float]]:
        """Name and seconds of each stage that is behind it."""
        marks = (
            ("preprocess", self.arrived_s, self.prepared_s),
            ("route", self.prepared_s, self.routed_s),
            ("admit", self.routed_s, self.accepted_s),
            ("engine", self.accepted_s, self.first_token_s),
            ("ttft", self.arrived_s, self.first_token_s),
        )
        for name, start_s, end_s in marks:
            if start_s and end_s:
                yield name, end_s - start_s
        if self.first_token_s:
            yield "queue", self.queue_s
            yield "prefill", self.prefill_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the first choice found in the cache."""


class Generation:
    """The accepted streams of one request. Iterate or call `next_delta`, and `close` (or use it as
    a context manager)."""

    def __init__(
        self,
        prepared: PreparedRequest,
        streams: Sequence[TokenStream],
        decoder: TextDecoder,
        times: RequestTimes | None = None,
        on_close: Callable[["Generation"], None] = lambda generation: None,
    ) -> None:
        """`on_close` is called once, when it is over for whatever reason."""
        self.times = times or RequestTimes()
        self._on_close = on_close
        self._is_closed = False
        self._prepared = prepared
        self._streams = streams
        self._outputs = [Postprocessor(decoder, prepared.rules) for _ in streams]
        self._ended = [False] * len(streams)
        self._readers: list[asyncio.Task[None]] = []
        self._merged: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()
        self._num_merged_ends = 0

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prepared.num_prompt_tokens,
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=self._outputs[0].cached_tokens,
        )

    async def next_delta(self) -> tuple[int, OutputDelta] | None:
        """The next output of any choice with its index; None when all have ended. May be cancelled
        without loss.

        Raises what its streams do, or `GenerationFailed` when the engine gives a choice up."""
        if len(self._streams) == 1:
            delta = await self._next_of(0)
            return None if delta is None else (0, delta)
        if not self._readers:
            self._readers = [asyncio.create_task(self._read(i)) for i in range(len(self._streams))]
        while self._num_merged_ends < len(self._readers):
            entry = await self._merged.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is not None:
                return entry
            self._num_merged_ends += 1
        return None

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        while (entry := await self.next_delta()) is not None:
            yield entry

    async def _next_of(self, index: int) -> OutputDelta | None:
        if self._ended[index]:
            return None
        stream = self._streams[index]
        item = await anext(stream)
        if not self.times.first_token_s:
            self.times.first_token_s = time.perf_counter()
        if item.first is not None and not index and not self.times.prefill_s:
            self.times.queue_s, self.times.prefill_s = item.first.queue_s, item.first.prefill_s
        delta = self._outputs[index].push(item)
        if delta.failure is not None:
            raise GenerationFailed(delta.failure)
        if delta.end is not None:
            self._ended[index] = True
            stream.abort()
        return delta

    async def _read(self, index: int) -> None:
        try:
            while (delta := await self._next_of(index)) is not None:
                self._merged.put_nowait((index, delta))
            self._merged.put_nowait(None)
        except Exception as error:
            self._merged.put_nowait(error)

    def close(self) -> None:
        """Aborts what still runs. Harmless when all has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        for reader in self._readers:
            reader.cancel()
        for stream in self._streams:
            stream.abort()
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
