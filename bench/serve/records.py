"""One request as the client saw it, and the reading of its stream.

Invariant: pure. Bytes and times are given to `AnswerStream`, a `Record` comes out; every time is in
seconds on the clock of the run, 0 at its start. Once a request is over, exactly one of its record's
`failure` and `end_s` says how; `failure` is one word for every error of a kind.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.serve.sse import EventTooLarge, SseParser

_DONE = b"[DONE]"
_MAX_REASON_CHARS = 300

INTERRUPTED = "interrupted"
"""The kind of what was cut off by whoever runs the benchmark: no fault of the server's."""


@dataclass(slots=True)
class Record:
    """One request. Filled in while it runs."""

    scheduled_s: float
    """When it was due: by the arrival process, or, in a closed loop, when its turn came."""
    asked_input_tokens: int
    """What the workload holds: new input of this turn and, but for answers, all before it."""
    asked_output_tokens: int
    sent_s: float = 0.0
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    """When each chunk with output came, the first token's first."""
    end_s: float | None = None
    """When the answer was complete; None when it never was."""
    failure: str | None = None
    reason: str = ""
    """In words, of a failure."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """By the server's usage, as the two below."""
    usage_output_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    """The answer, when it was asked to be kept."""

    def fail(self, failure: str, reason: str = "") -> None:
        """The first failure is the one that counts; a complete answer can't fail any more."""
        if self.failure is None and self.end_s is None:
            self.failure, self.reason = failure, reason[:_MAX_REASON_CHARS]

    @property
    def output_tokens(self) -> int:
        """By the server's usage, else one a chunk."""
        if self.usage_output_tokens is not None:
            return self.usage_output_tokens
        return len(self.chunk_times_s)

    @property
    def ttft_s(self) -> float | None:
        if not self.chunk_times_s:
            return None
        return self.chunk_times_s[0] - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None when there was no other."""
        if self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.scheduled_s


# ------------------------------------------------------------------ the wire, as far as it is read


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def has_output(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class AnswerStream:
    """Reads the body of one streamed answer into its record."""

    def __init__(self, record: Record, keep_text: bool = False) -> None:
        self._record = record
        self._parser = SseParser()
        self._keep_text = keep_text
        self._parts: list[str] = []

    def feed(self, data: bytes, now_s: float) -> None:
        """What one read brought, at `now_s`. Chunks that come in one read have one time."""
        try:
            for payload in self._parser.feed(data):
                self._on_event(payload, now_s)
        except (EventTooLarge, msgspec.DecodeError) as error:
            self._record.fail("malformed", str(error))

    def close(self) -> None:
        """At the end of the body: an answer without its `[DONE]` is none."""
        self._record.fail("incomplete", "the stream ended without [DONE]")

    def _on_event(self, payload: bytes, now_s: float) -> None:
        record = self._record
        if record.end_s is not None or record.failure is not None:
            return
        if payload == _DONE:
            self._on_done(now_s)
            return
        chunk = _decode_chunk(payload)
        if chunk.error is not None:
            record.fail("stream_error", reason_of(chunk.error))
            return
        for choice in chunk.choices:
            # The token that ends an answer may have no text; then its finish reason tells of it.
            if choice.has_output() or (choice.finish_reason and not record.chunk_times_s):
                record.chunk_times_s.append(now_s)
            record.finish_reason = choice.finish_reason or record.finish_reason
            if self._keep_text:
                content = choice.text if choice.delta is None else choice.delta.content
                self._parts.append(content or "")
        if chunk.usage is not None:
            self._on_usage(chunk.usage)

    def _on_done(self, now_s: float) -> None:
        if not self._record.chunk_times_s:
            self._record.fail("empty", "the stream held no output")
            return
        self._record.end_s = now_s
        self._record.text = "".join(self._parts)

    def _on_usage(self, usage: _Usage) -> None:
        record = self._record
        record.prompt_tokens = usage.prompt_tokens
        record.usage_output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def reason_of(error: Any) -> str:
    """The words of an error object, wherever this server puts them."""
    while isinstance(error, dict):
        found = next((error[key] for key in ("error", "message", "detail") if key in error), None)
        if found is None:
            break
        error = found
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
