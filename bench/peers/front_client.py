"""One HTTP request of a benchmark that asks servers one at a time.

Invariant: time to first token is from just before the request is written until the read that
brought the first event with text in it; events that only name the role, and comments, do not count.
Anything but a complete answer raises `PeerMissing`.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from bench.peers.setup import PeerMissing
from bench.serve.dialect import PATHS
from bench.serve.http import ConnectionBroken, ConnectionPool
from bench.serve.records import AnswerStream, Record
from bench.serve.sse import SseParser

_ANSWER_S = 120.0
_SHOWN_BYTES = 200


class _Head(msgspec.Struct):
    id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer."""

    request_id: str
    ttft_s: float
    prompt_tokens: int
    text_events: int
    """Each of a token or more; fewer than tokens also where a token has no text."""


class _Response:
    """Keeps a body, and reads the stream in it meanwhile."""

    def __init__(self, record: Record) -> None:
        self.status = 0
        self.body = bytearray()
        self.stream = AnswerStream(record)

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status

    def on_body(self, data: bytes, received_s: float) -> None:
        self.body += data
        if self.status == 200:
            self.stream.feed(data, received_s)


async def complete(pool: ConnectionPool, body: bytes) -> Answer:
    """Asks with the JSON of a streamed completion that reports its usage."""
    # Its times are those of `time.perf_counter`, as the connection takes them.
    record = Record(scheduled_s=time.perf_counter(), asked_input_tokens=0, asked_output_tokens=0)
    response = _Response(record)
    with _unbroken():
        async with asyncio.timeout(_ANSWER_S):
            await pool.post(PATHS["completions"], body, response)
    _check_status(response)
    response.stream.close()
    if record.failure is not None:
        raise PeerMissing(f"it answered badly: {record.failure} {record.reason}")
    if record.ttft_s is None or record.prompt_tokens is None:
        raise PeerMissing("its answer has no text, or no usage")
    head = msgspec.json.decode(SseParser().feed(bytes(response.body))[0], type=_Head)
    return Answer(head.id, record.ttft_s, record.prompt_tokens, len(record.chunk_times_s))


async def get(pool: ConnectionPool, path: str) -> bytes:
    """The body of what is there."""
    response = _Response(Record(0.0, 0, 0))
    with _unbroken():
        async with asyncio.timeout(_ANSWER_S):
            await pool.get(path, response)
    _check_status(response)
    return bytes(response.body)


def _check_status(response: _Response) -> None:
    if response.status != 200:
        words = bytes(response.body[:_SHOWN_BYTES]).decode(errors="replace")
        raise PeerMissing(f"it answered {response.status}: {words}")


@contextmanager
def _unbroken() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise PeerMissing(f"no whole answer in {_ANSWER_S:g} s") from None
    except ConnectionBroken as error:
        raise PeerMissing(f"its server broke off: {error}") from error
