"""HTTP/1.1 as a benchmark needs it: requests out of a pool of connections, bodies as they arrive.

Invariant: the time of a piece of a body is taken when its bytes are read from the socket, before
anything else is done with them, and is one time for all that came in that read. A connection has
one request at a time and goes back to the pool only after a complete answer.

A general client wakes a task for every piece and takes the time there; this one calls the handler
from the read itself, which is late by less and costs about half (20 against 37 µs a chunk).
`httptools` does the parsing. Neither proxies nor redirects are followed: what is measured is the
server that was named.
"""

import asyncio
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_TIMEOUT_S = 10.0
_KEEP_IDLE_S = 4.0
"""Below the five seconds after which common servers close: a request must not meet that close."""

_READ_BYTES = 16 << 10


class ConnectionBroken(Exception):
    """No connection, or one that ended before the answer did."""

    def __init__(self, reason: str, answered: bool = False) -> None:
        super().__init__(reason)
        self.answered = answered
        """Whether a status line had come."""


class ResponseHandler(Protocol):
    """Is told of one response as it arrives; it must not raise."""

    def on_head(self, status: int, content_type: str) -> None: ...

    def on_body(self, data: bytes, received_s: float) -> None:
        """`received_s` is on `time.perf_counter`."""


class _Connection(asyncio.BufferedProtocol):
    """Called by the event loop, and by httptools for the parts of a response."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._handler: ResponseHandler | None = None
        self._complete: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._answered = False
        self._received_s = 0.0
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)

    async def exchange(self, request: bytes, handler: ResponseHandler) -> None:
        """Returns after the whole response. Raises `ConnectionBroken`."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroken("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._handler = handler
        self._complete = asyncio.get_running_loop().create_future()
        self._headers, self._answered, self.reusable = {}, False, False
        self._transport.write(request)
        await self._complete

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # ------------------------------------------------------------------ event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received_s = time.perf_counter()
        try:
            self._parser.feed_data(self._view[:nbytes])
        except httptools.HttpParserError as error:
            self._break(f"no HTTP: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        ends_with_connection = not self._headers.keys() & {b"content-length", b"transfer-encoding"}
        if error is None and self._answered and ends_with_connection:
            self.on_message_complete()
        else:
            self._break(str(error) if error else "the server closed the connection")

    def _break(self, reason: str) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_exception(ConnectionBroken(reason, self._answered))

    # ------------------------------------------------------------------ httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._answered = True
        if self._handler is not None:
            content_type = self._headers.get(b"content-type", b"").decode("latin-1")
            self._handler.on_head(
                self._parser.get_status_code(), content_type.partition(";")[0].strip().lower()
            )

    def on_body(self, body: bytes) -> None:
        if self._handler is not None:
            self._handler.on_body(body, self._received_s)

    def on_message_complete(self) -> None:
        self._handler = None
        if self._complete is not None and not self._complete.done():
            self.reusable = self._parser.should_keep_alive()
            self._complete.set_result(None)


class ConnectionPool:
    """As many connections to one server as there are requests under way."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if secure else None
        lines = {"Host": parts.netloc, "Accept-Encoding": "identity", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str, handler: ResponseHandler) -> None:
        """As `post`, without a body."""
        await self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n", b"", handler)

    async def post(self, path: str, body: bytes, handler: ResponseHandler) -> None:
        """Sends JSON; returns after the whole response. Raises `ConnectionBroken`; on cancellation
        the connection is closed, so that the server sees its client leave."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._exchange(head, body, handler)

    async def _exchange(self, head: str, body: bytes, handler: ResponseHandler) -> None:
        connection = self._idle_connection() or await self._connect()
        try:
            await connection.exchange(head.encode("latin-1") + body, handler)
        finally:
            if connection.reusable and not connection.is_closed:
                connection.idle_since_s = time.perf_counter()
                self._idle.append(connection)
            else:
                connection.abort()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if (
                not connection.is_closed
                and time.perf_counter() - connection.idle_since_s < _KEEP_IDLE_S
            ):
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionBroken(f"no connection in {_CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConnectionBroken(str(error)) from None
        return connection

    def close(self) -> None:
        """The idle ones; those under way belong to their requests."""
        while self._idle:
            self._idle.pop().abort()
