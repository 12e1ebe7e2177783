"""A server that answers as it is told, byte for byte: for what no good server does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Respond = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def content(text: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, **more}])


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(choices=[], usage={**counts, **details})


DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def whole_answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Two chunks and their usage."""
    body = content("Hello") + content(" you", finish_reason="stop") + usage(9, 2, 4) + DONE
    writer.write(HEAD + chunked(body) + b"0\r\n\r\n")


class ScriptedServer:
    """Keeps what it was asked; `respond` may be replaced at any time."""

    def __init__(self, url: str, respond: Respond) -> None:
        self.url = url
        self.respond = respond
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                lengths = [
                    int(line.split(":")[1])
                    for line in head.lower().split("\r\n")
                    if line.startswith("content-length")
                ]
                if not lengths:
                    writer.write(plain(200, b'{"data": [{"id": "first"}, {"id": "second"}]}'))
                    continue
                self.bodies.append(json.loads(await reader.readexactly(lengths[0])))
                await self.respond(self.bodies[-1], writer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def scripted(respond: Respond = whole_answer) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer("", respond)
    listener = await asyncio.start_server(server._serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
