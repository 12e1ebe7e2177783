"""The HTTP of a batch: rows out, outcomes back.

Invariant: every request ends in an `Answer` that is whole and valid JSON, or in a `NoAnswer` that
says why; no more of an answer is held than `MAX_ANSWER_BYTES`. A request that is cancelled has its
connection closed, so that the server stops working on it. Redirects are not followed: an API key
goes to the server that was named and no other.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cluster.batch.capacity import ReadyReport, parse_report
from cluster.batch.records import MAX_ANSWER_BYTES, Answer, NoAnswer, Outcome
from cluster.batch.retry import parse_retry_after
from cluster.batch.rows import Row
from engine.errors import ShoalError

_CONNECT_TIMEOUT_S = 10.0
_READY_TIMEOUT_S = 5.0
_KEEP_IDLE_S = 4.0
"""Below the five seconds after which common servers close: a request must not meet that close."""
_READ_BYTES = 64 << 10
_MAX_TEXT_CHARS = 500
_JSON = {"Content-Type": "application/json"}


class ServerRefused(ShoalError):
    """The server will not have this client: wrong key, or wrong URL."""


class NotReady(Exception):
    """The server cannot be reached; the text says how."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which server, and how."""

    url: str
    api_key: str | None
    timeout_s: float | None
    """For one attempt."""


def base_url(url: str) -> str:
    """Without the end that rows bring with them. Raises `ValueError`."""
    if "//" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"not the URL of a server: {url}")
    _ = parts.port
    return url.rstrip("/").removesuffix("/v1")


class Server:
    """A session with one server; an async context manager."""

    def __init__(self, target: Target) -> None:
        self.url = target.url
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        # Whoever calls limits how many there are at once.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ready(self) -> ReadyReport | None:
        """None from a server that has no such report and is there all the same.

        Raises `NotReady`, or `ServerRefused` where waiting will not help."""
        timeout = aiohttp.ClientTimeout(total=_READY_TIMEOUT_S)
        try:
            async with self._session.get(
                f"{self.url}/ready", timeout=timeout, allow_redirects=False
            ) as response:
                self._check(response)
                body = await _read(response)
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerRefused(f"{self.url}: {error.certificate_error}") from None
        except (OSError, aiohttp.ClientError, _TooLarge) as error:
            raise NotReady(_reason(error)) from None
        if report := parse_report(body):
            return report
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise NotReady(f"{self.url}/ready answers {response.status}")
        return None

    async def send(self, row: Row) -> Outcome:
        """Raises `ServerRefused` if it is not the row that is refused, but the client."""
        try:
            async with self._session.post(
                self.url + row.url, data=row.body, headers=_JSON, allow_redirects=False
            ) as response:
                self._check(response)
                return _answer(response, await _read(response))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return NoAnswer("connection_failed", _reason(error), was_sent=False)
        except TimeoutError:
            return NoAnswer("timeout", "no answer in time")
        except _TooLarge as error:
            return NoAnswer("answer_too_large", str(error))
        except (OSError, aiohttp.ClientError) as error:
            return NoAnswer("connection_lost", _reason(error))

    def _check(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status == HTTPStatus.UNAUTHORIZED:
            raise ServerRefused(
                f"{self.url} wants an API key, or another one (401): see --api-key-file"
            )
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            location = response.headers.get("Location", "elsewhere")
            raise ServerRefused(f"{self.url} redirects to {location}: see --url")


class _TooLarge(Exception):
    pass


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_chunked(_READ_BYTES):
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise _TooLarge(f"an answer may have at most {MAX_ANSWER_BYTES:,} bytes")
    return bytes(body)


def _answer(response: aiohttp.ClientResponse, body: bytes) -> Outcome:
    headers = response.headers
    retry_after_s = parse_retry_after(headers.get("Retry-After"), datetime.now(UTC))
    is_success = response.status < HTTPStatus.MULTIPLE_CHOICES
    line = _object_on_one_line(body)
    if line is None:
        text = body.decode(errors="replace").strip()[:_MAX_TEXT_CHARS]
        if is_success:
            return NoAnswer("invalid_answer", f"status {response.status} without JSON: {text}")
        line = msgspec.json.encode({"error": {"message": text}})
    return Answer(response.status, headers.get("X-Request-Id", ""), line, retry_after_s)


def _object_on_one_line(body: bytes) -> bytes | None:
    """With every number as it was written. None if it is no JSON object."""
    try:
        body.decode()
        line = msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return line if line.startswith(b"{") else None


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        # Its own text is asyncio's, which names the call that failed.
        cause = error.os_error
        if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        return cause.strerror or str(cause)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
