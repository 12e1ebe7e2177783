"""`POST /v1/chat/completions`: one generation as a whole answer or as server-sent events.

Invariant: the HTTP status goes out only after the engine has accepted every choice, and when the
client goes away, at whatever point, the generation is closed.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from cluster import openai
from cluster.errors import failure_of
from cluster.generation import Generation, Usage
from cluster.postprocess import OutputDelta, OutputToken
from cluster.tokenizer import Tokenizer

_KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_LOGPROB_FLOOR = -9999.0
"""What OpenAI reports for a token of no probability: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def whole_answer(
    generation: Generation, head: AnswerHead, tokenizer: Tokenizer, request: Request
) -> openai.ChatCompletion:
    """Waits for every choice; raises `ClientGone` as soon as the client disconnects."""
    collecting = asyncio.create_task(_collect(generation))
    watching = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientGone
        deltas = collecting.result()
    finally:
        collecting.cancel()
        watching.cancel()
        generation.close()
    choices = [
        openai.Choice(
            index=index,
            message=openai.AnswerMessage(
                role="assistant", content="".join(delta.text for delta in parts), refusal=None
            ),
            logprobs=_logprobs((token for delta in parts for token in delta.tokens), tokenizer),
            finish_reason=parts[-1].end or "",
        )
        for index, parts in sorted(deltas.items())
    ]
    return openai.ChatCompletion(
        id=head.id,
        object="chat.completion",
        created=head.created,
        model=head.model,
        system_fingerprint=head.fingerprint,
        choices=choices,
        usage=_usage(generation.usage),
    )


async def _collect(generation: Generation) -> dict[int, list[OutputDelta]]:
    deltas: dict[int, list[OutputDelta]] = {}
    async for index, delta in generation:
        deltas.setdefault(index, []).append(delta)
    return deltas


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as server-sent events, ended by `data: [DONE]`.

    A response of its own because the generation must be closed on every way out, also when the
    client leaves before the first byte, or while no token comes. A failure after the status line
    is an event with an `error`, and no `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, head: AnswerHead, tokenizer: Tokenizer, include_usage: bool
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._head = head
        self._tokenizer = tokenizer
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        watching = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._generation.close()
            for task in (sending, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

        async def emit(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        started: set[int] = set()
        try:
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        entry = await self._generation.next_delta()
                except TimeoutError:
                    await emit(_KEEP_ALIVE)
                    continue
                if entry is None:
                    break
                index, delta = entry
                events = b""
                if index not in started:
                    started.add(index)
                    events = self._event(index, openai.Delta(role="assistant", content=""))
                events += self._delta_events(index, delta)
                if events:
                    await emit(events)
        except Exception as error:
            await emit(b"data: " + failure_of(error).body + b"\n\n", more=False)
            return
        usage = self._usage_event() if self._include_usage else b""
        await emit(usage + _DONE, more=False)

    def _delta_events(self, index: int, delta: OutputDelta) -> bytes:
        events = b""
        logprobs = _logprobs(delta.tokens, self._tokenizer)
        if delta.text or logprobs is not None:
            events = self._event(index, openai.Delta(content=delta.text), logprobs)
        if delta.end is not None:
            events += self._event(index, openai.Delta(), finish_reason=delta.end)
        return events

    def _event(
        self,
        index: int,
        delta: openai.Delta,
        logprobs: openai.ChoiceLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = openai.ChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )
        return self._chunk([choice])

    def _usage_event(self) -> bytes:
        return self._chunk([], _usage(self._generation.usage))

    def _chunk(
        self, choices: list[openai.ChunkChoice], usage: openai.CompletionUsage | None = None
    ) -> bytes:
        """With `include_usage` every chunk but the last has `"usage": null`, as OpenAI's."""
        optional = {"usage": usage} if self._include_usage else {}
        chunk = openai.ChatCompletionChunk(
            id=self._head.id,
            object="chat.completion.chunk",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            **optional,
        )
        return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def _usage(usage: Usage) -> openai.CompletionUsage:
    return openai.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=openai.PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def _logprobs(tokens: Iterable[OutputToken], tokenizer: Tokenizer) -> openai.ChoiceLogprobs | None:
    """None when they were not asked for."""
    content = []
    for token in tokens:
        if token.logprobs is None:
            return None
        top = [
            openai.TopLogprob(
                token=tokenizer.token_text(token_id),
                logprob=max(logprob, _LOGPROB_FLOOR),
                bytes=list(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in token.logprobs.top
        ]
        content.append(
            openai.TokenLogprob(
                token=tokenizer.token_text(token.token_id),
                logprob=max(token.logprobs.logprob, _LOGPROB_FLOOR),
                bytes=list(tokenizer.token_bytes(token.token_id)),
                top_logprobs=top,
            )
        )
    return openai.ChoiceLogprobs(content=content) if content else None
