"""Engines on the network: who is refused, and that it costs nobody else anything."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from engine import curve, wire
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.core import EngineCore
from engine.curve import CurveKeys, CurvePair
from engine.errors import EngineLost
from engine.wire import SamplingParams
from tests.engine.curve_rig import EXPECTED, Secret, ask
from tests.engine.rig import running_engine


@contextlib.asynccontextmanager
async def undisturbed(core: EngineCore, keys: CurveKeys) -> AsyncIterator[None]:
    """A legitimate client that streams all the while, token by token, and another afterwards."""
    async with await EngineClient.connect(core.endpoint, keys=keys) as client:
        stream = await client.add(EngineRequest([7], SamplingParams(max_tokens=900)))
        gaps_s: list[float] = []

        async def read() -> None:
            last_s = time.monotonic()
            async for _ in stream:
                gaps_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()

        reading = asyncio.create_task(read())
        yield
        assert not reading.done(), "the stream ended early"
        stream.abort()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert len(gaps_s) > 5
        assert max(gaps_s) < 2, "an engine that waits for a handshake would wait for longer"
        async with await EngineClient.connect(core.endpoint, keys=keys) as newcomer:
            assert await ask(newcomer) == EXPECTED


def test_another_secret_is_refused_with_its_reason(
    secret: Secret, other: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(core: EngineCore) -> None:
        async with undisturbed(core, secret.keys):
            began_s = time.monotonic()
            with pytest.raises(EngineLost, match=r"curve\+tcp://.*cluster secret is probably"):
                await EngineClient.connect(core.endpoint, timeout_s=30, keys=other.keys)
            assert time.monotonic() - began_s < 10
            # Knows the engines, but is none of the ingresses.
            half = CurveKeys(engine=secret.keys.engine, ingress=other.keys.ingress)
            with pytest.raises(EngineLost, match=r"did not admit .* cluster secret"):
                await EngineClient.connect(core.endpoint, timeout_s=30, keys=half)
            with pytest.raises(EngineLost, match="no cluster secret here"):
                await EngineClient.connect(core.endpoint)
            plain = curve.transport_address(core.endpoint)
            with pytest.raises(EngineLost, match="may not be an engine, or want CurveZMQ"):
                await EngineClient.connect(plain, timeout_s=0.5)
            await asyncio.sleep(1.2)

    with running_engine(secret.config(step_s=0.005)) as core:
        asyncio.run(asyncio.wait_for(run(core), 30))
    assert "without this cluster's secret" in caplog.text
    assert "1 from 127.0.0.1 without the ingresses' key" in caplog.text


@contextlib.contextmanager
def intruder(
    kind: int, endpoint: str, server_key: bytes = b"", pair: CurvePair | None = None
) -> Iterator["zmq.Socket[bytes]"]:
    """A peer that tries again as fast as it can."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(kind)
    peer.setsockopt(zmq.RECONNECT_IVL, 1)
    if pair is not None:
        peer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        peer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    if kind == zmq.SUB:
        peer.subscribe(b"")
    peer.connect(curve.transport_address(endpoint))
    if kind == zmq.DEALER:
        for message in (wire.Hello(wire.WIRE_VERSION, "intruder"), wire.Heartbeat()):
            peer.send(wire.encode(message), zmq.NOBLOCK)
    try:
        yield peer
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("has", ["no keys", "a pair of its own", "the engine's public key too"])
def test_a_peer_that_is_no_ingress_neither_sends_nor_hears(
    secret: Secret, has: str, caplog: pytest.LogCaptureFixture
) -> None:
    own, server = CurvePair.of(b"x" * 32), CurvePair.of(b"y" * 32).public
    if has == "the engine's public key too":
        server = secret.keys.engine.public
    pair = None if has == "no keys" else own

    async def run(core: EngineCore) -> None:
        streams = core._transport.stream_endpoint
        async with undisturbed(core, secret.keys):
            with (
                intruder(zmq.DEALER, core.endpoint, server, pair) as dealer,
                intruder(zmq.SUB, streams, server, pair) as subscriber,
            ):
                await asyncio.sleep(1.5)
                assert not dealer.poll(0)
                assert not subscriber.poll(0)
            assert "intruder" not in core._transport.sessions

    began_s = time.monotonic()
    with running_engine(secret.config(step_s=0.005)) as core:
        asyncio.run(asyncio.wait_for(run(core), 30))
    denials = [record for record in caplog.records if "denied" in record.message]
    assert 1 <= len(denials) <= time.monotonic() - began_s + 1
    assert "refused a message" not in caplog.text, "something of it reached the engine"


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
    "zeros": bytes(10_000),
    "an old ZMTP": b"\xff" + bytes(8) + b"\x7f\x01\x06",
    "half a greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",
    "a broken hello": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00CURVE"
    + bytes(47)
    + b"\x04\xc8"
    + bytes(200),
    "a huge frame": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00CURVE"
    + bytes(47)
    + b"\x06"
    + b"\x7f" * 5000,
}


def test_garbage_on_the_port_harms_nobody(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_HANDSHAKE_MS", 600)

    def throw(address: tuple[str, int], garbage: bytes) -> None:
        """Returns once the engine has hung up."""
        peer = socket.create_connection(address, timeout=5)
        with peer, contextlib.suppress(ConnectionError):
            peer.sendall(garbage)
            # Its own greeting, and then the end.
            while peer.recv(4096):
                pass

    async def run(core: EngineCore) -> None:
        endpoints = core.endpoint, core._transport.stream_endpoint
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints]
        async with undisturbed(core, secret.keys):
            await asyncio.gather(
                *(
                    asyncio.to_thread(throw, ("127.0.0.1", port), garbage)
                    for port in ports
                    for garbage in GARBAGE.values()
                )
            )

    with running_engine(secret.config(step_s=0.005)) as core:
        asyncio.run(asyncio.wait_for(run(core), 30))


def test_many_connections_that_stall_cost_the_engine_no_turns(secret: Secret) -> None:
    async def run(core: EngineCore) -> None:
        port = int(core.endpoint.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                peer.sendall(GARBAGE["half a greeting"])
            await asyncio.sleep(0.2)
            before = time.process_time()
            await asyncio.sleep(1.0)
            assert time.process_time() - before < 0.05
            async with await EngineClient.connect(core.endpoint, keys=secret.keys) as client:
                assert await ask(client) == EXPECTED

    with running_engine(secret.config()) as core:
        asyncio.run(asyncio.wait_for(run(core), 30))


def test_a_socket_without_a_gate_admits_nobody(secret: Secret) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        endpoint = curve.bind(router, "tcp://127.0.0.1:*", secret.keys)
        with intruder(zmq.DEALER, endpoint, secret.keys.engine.public, secret.keys.ingress):
            assert not router.poll(1000)
    finally:
        context.destroy(linger=0)
