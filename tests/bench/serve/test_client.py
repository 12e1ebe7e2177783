"""Every way in which a request can end, over real sockets."""

import asyncio
import contextlib
from typing import Any

import pytest

from bench.serve.client import Client, ServerUnusable, Target
from bench.serve.dialect import BodyOptions
from bench.serve.records import Record
from tests.bench.serve.scripted import (
    DONE,
    HEAD,
    Respond,
    chunked,
    content,
    plain,
    scripted,
    usage,
    whole_answer,
)

_BODY = b'{"n": 1}'
_PATH = "/v1/chat/completions"
_OPTIONS = BodyOptions("chat", "m")


def _write(*parts: bytes, close: bool = False) -> Respond:
    """Each part in a write of its own, a moment apart."""

    async def respond(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()

    return respond


async def _send(client: Client) -> Record:
    record = Record(client.clock(), 1, 2)
    await client.send(_PATH, _BODY, record, keep_text=True)
    return record


def _ask(respond: Respond, timeout_s: float = 5.0) -> Record:
    async def run() -> Record:
        async with scripted(respond) as server:
            with Client(Target(server.url, timeout_s=timeout_s)) as client:
                return await _send(client)

    return asyncio.run(run())


def test_an_answer_in_many_pieces() -> None:
    body = content("Hel") + content("lo") + usage(9, 2, 4) + DONE
    stream = HEAD + chunked(body) + b"0\r\n\r\n"
    record = _ask(_write(*(stream[at : at + 7] for at in range(0, len(stream), 7))))
    assert (record.failure, record.text) == (None, "Hello")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 2, 4)
    first_s, second_s = record.chunk_times_s
    assert record.sent_s < first_s < second_s < (record.end_s or 0)
    assert second_s - first_s > 0.05, "pieces take the time at which they came"


def test_a_body_that_ends_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert _ask(_write(head + content("a"), DONE, close=True)).failure is None


@pytest.mark.parametrize(
    ("respond", "failure", "words"),
    [
        (_write(plain(503, b'{"error": {"message": "full"}}')), "status_503", "503 full"),
        (_write(plain(400, b"<p>no</p>", "text/html")), "status_400", "400 <p>no</p>"),
        (_write(plain(307, b"")), "status_307", "307"),
        (_write(plain(200, b"{}")), "malformed", "'application/json' instead"),
        (_write(b"SSH-2.0-OpenSSH\r\n"), "connection", "no HTTP"),
        (_write(close=True), "connection", "closed"),
        (_write(HEAD, close=True), "incomplete", "closed"),
        (_write(HEAD + chunked(content("a")), close=True), "incomplete", "closed"),
        (_write(HEAD + chunked(content("a")) + b"0\r\n\r\n"), "incomplete", "[DONE]"),
        (_write(HEAD + chunked(b"data: {\n\n") + b"0\r\n\r\n"), "malformed", "data"),
    ],
)
def test_failures(respond: Respond, failure: str, words: str) -> None:
    record = _ask(respond)
    assert record.failure == failure
    assert words in record.reason
    assert record.end_s is None


def test_a_timeout() -> None:
    record = _ask(_write(HEAD + chunked(content("a"))), timeout_s=0.2)
    assert (record.failure, record.reason) == ("timeout", "not complete after 0.2 s")


def test_a_refused_connection() -> None:
    async def run() -> Record:
        async with scripted() as server:
            url = server.url
        with Client(Target(url)) as client:
            record = await _send(client)
            with pytest.raises(ServerUnusable, match=r"/v1/models: .*[Cc]onnect"):
                await client.first_model()
            return record

    assert asyncio.run(run()).failure == "connection"


def test_connections_are_used_again_unless_the_server_closes() -> None:
    async def run(respond: Respond) -> int:
        async with scripted(respond) as server:
            with Client(Target(server.url, api_key="secret")) as client:
                for _ in range(3):
                    assert (await _send(client)).failure is None
                await asyncio.gather(_send(client), _send(client))
            assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)
            return server.num_connections

    assert asyncio.run(run(whole_answer)) == 2
    closing = HEAD.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    answer = _write(closing + chunked(content("a") + DONE) + b"0\r\n\r\n", close=True)
    assert asyncio.run(run(answer)) == 5


def test_a_client_that_is_cancelled_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def respond(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(chunked(content("a")))
                await writer.drain()
                await asyncio.sleep(0.01)
        closed.set()

    async def run() -> Record:
        async with scripted(respond) as server:
            with Client(Target(server.url)) as client:
                record = Record(0.0, 1, 2)
                sending = asyncio.create_task(client.send(_PATH, _BODY, record))
                await asyncio.sleep(0.1)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await asyncio.wait_for(closed.wait(), 5)
                return record

    record = asyncio.run(run())
    assert record.failure == "interrupted"
    assert record.chunk_times_s


def test_first_model_and_probe() -> None:
    async def run() -> None:
        async with scripted() as server:
            with Client(Target(server.url)) as client:
                assert await client.first_model() == "first"
                await client.probe(_OPTIONS)
                (body,) = server.bodies
                assert (body["max_tokens"], body["ignore_eos"]) == (1, True)
                server.respond = _write(plain(503, b""))
                await client.probe(_OPTIONS)  # Busy is no refusal: the load will tell.
                server.respond = _write(
                    plain(400, b'{"error": {"message": "ignore_eos: unknown or not supported"}}')
                )
                with pytest.raises(ServerUnusable, match=r"400 ignore_eos.*--no-ignore-eos"):
                    await client.probe(_OPTIONS)

    asyncio.run(run())
