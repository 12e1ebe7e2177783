"""The server under load, as an OpenAI client sees it.

Invariant: whatever happens to a request ends up in its record, as an answer or as one kind of
failure; only cancellation passes through.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.serve.dialect import PATHS, BodyOptions, History, request_body
from bench.serve.http import ConnectionBroken, ConnectionPool
from bench.serve.records import INTERRUPTED, AnswerStream, Record, reason_of
from engine.errors import ShoalError

_PROBE_TIMEOUT_S = 120.0
_MAX_REFUSAL_BYTES = 1 << 20
_OPTIONAL_FIELDS = {
    "ignore_eos": "--no-ignore-eos leaves it out; outputs may then end early",
    "stream_options": """--extra-body '{"stream_options": null}' empties it; tokens are then \
counted by chunk""",
}


class ServerUnusable(ShoalError):
    """The server can't be reached, or refuses what every request of this run would hold."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and how it is spoken to."""

    base_url: str
    """`http://HOST:PORT`, perhaps with a path before `/v1`."""
    api_key: str | None = None
    timeout_s: float = 600.0


class _WholeBody:
    """Keeps a response that is no stream."""

    def __init__(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status

    def on_body(self, data: bytes, received_s: float) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= _MAX_REFUSAL_BYTES:
            self._parts.append(data)

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def words(self) -> str:
        """The status and what the server says about it, on one line."""
        try:
            words = reason_of(msgspec.json.decode(self.body))
        except msgspec.DecodeError:
            words = self.body.decode(errors="replace")
        return f"{self.status} {' '.join(words.split())[:300]}".strip()


class _Answer(_WholeBody):
    """Reads a stream into a record as it arrives, and keeps a refusal for its words."""

    def __init__(self, record: Record, keep_text: bool, origin_s: float) -> None:
        super().__init__()
        self.content_type = ""
        self._stream = AnswerStream(record, keep_text)
        self._record = record
        self._origin_s = origin_s

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    def on_head(self, status: int, content_type: str) -> None:
        self.status, self.content_type = status, content_type

    def on_body(self, data: bytes, received_s: float) -> None:
        if self.is_stream:
            self._stream.feed(data, received_s - self._origin_s)
        else:
            super().on_body(data, received_s)

    def finish(self) -> None:
        """After the whole response."""
        if self.is_stream:
            self._stream.close()
        elif self.status == 200:
            self._record.fail("malformed", f"{self.content_type!r} instead of an event stream")
        else:
            self._record.fail(f"status_{self.status}", self.words())


class Client:
    """One server, and the clock of the run: 0 at the last `start_clock`."""

    def __init__(self, target: Target) -> None:
        _allow_many_sockets()
        key = target.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._pool = ConnectionPool(target.base_url, headers)
        self._target = target
        self._origin_s = time.perf_counter()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def start_clock(self) -> None:
        self._origin_s = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self._origin_s

    async def first_model(self) -> str:
        """Raises `ServerUnusable`."""
        reply = _WholeBody()
        url = f"{self._target.base_url}/v1/models"
        with _reaching(url):
            async with asyncio.timeout(self._probe_timeout_s):
                await self._pool.get("/v1/models", reply)
        if reply.status != 200:
            raise ServerUnusable(f"{url}: {reply.words()}")
        try:
            models: Any = msgspec.json.decode(reply.body)
            return str(models["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise ServerUnusable(f"{url}: no model is listed; name one with --model") from None

    async def probe(self, options: BodyOptions) -> None:
        """One request of a few tokens, so that a field that the server refuses is told before the
        load and not by every request of it. Raises `ServerUnusable`."""
        reply = _WholeBody()
        url = self._target.base_url + PATHS[options.api]
        body = request_body(options, History([("user", "Hello")]), max_tokens=1)
        with _reaching(url):
            async with asyncio.timeout(self._probe_timeout_s):
                await self._pool.post(PATHS[options.api], body, reply)
        if 400 <= reply.status < 500 and reply.status != 429:
            refusal = reply.words()
            hints = [hint for name, hint in _OPTIONAL_FIELDS.items() if name in refusal]
            raise ServerUnusable(". ".join([f"{url} refuses the request: {refusal}", *hints]))

    @property
    def _probe_timeout_s(self) -> float:
        return min(_PROBE_TIMEOUT_S, self._target.timeout_s)

    async def send(self, path: str, body: bytes, record: Record, keep_text: bool = False) -> None:
        """One request, read to its end into the record."""
        answer = _Answer(record, keep_text, self._origin_s)
        record.sent_s = self.clock()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._pool.post(path, body, answer)
            answer.finish()
        except TimeoutError:
            record.fail("timeout", f"not complete after {self._target.timeout_s:g} s")
        except ConnectionBroken as error:
            record.fail("incomplete" if error.answered else "connection", str(error))
        except asyncio.CancelledError:
            record.fail(INTERRUPTED)
            raise


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ServerUnusable(f"{url}: no answer in time") from None
    except ConnectionBroken as error:
        raise ServerUnusable(f"{url}: {error}") from None


def _allow_many_sockets() -> None:
    """A connection is a file; an open loop may hold thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
