"""Engines on the network: who gets in, who does not, and what either of them notices."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from cache.events import KeySet
from cache.keys import key_root
from configs.engine import EngineConfig, SimulationConfig
from configs.secret import derive_key, read_secret, write_secret
from engine import curve, wire
from engine.attempt import EngineRequest, EngineStream
from engine.client import EngineClient
from engine.core import EngineCore
from engine.curve import CurveKeys, CurvePair
from engine.errors import ConfigurationError, EngineLost
from engine.executors.simulated import SimulatedExecutor
from engine.launcher import EngineStartError, LocalEngine
from engine.wire import FinishReason, SamplingParams
from tests.engine.rig import reference_output, running_engine, simulated_config, wait_until
from tests.engine.wire_rig import collect

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@dataclass(frozen=True)
class Secret:
    """A cluster's secret as its file, and what follows from it."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> "Secret":
        write_secret(path)
        return cls(path)

    @property
    def keys(self) -> CurveKeys:
        return CurveKeys.derive(read_secret(self.path))

    def config(self, **options: object) -> EngineConfig:
        config = simulated_config(**options)  # type: ignore[arg-type]
        return config.model_copy(update={"cluster_secret_file": str(self.path)})

    def words(self) -> list[str]:
        """What must not be read anywhere."""
        pairs = self.keys.engine, self.keys.ingress
        seeds = [z85.decode(pair.secret) for pair in pairs]
        text = read_secret(self.path).decode()
        return [
            text,
            *(p.secret.decode() for p in pairs),
            *map(repr, seeds),
            *map(bytes.hex, seeds),
        ]


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret.make(tmp_path / "secret")


@pytest.fixture
def other(tmp_path: Path) -> Secret:
    return Secret.make(tmp_path / "other")


async def ask(client: EngineClient) -> list[int]:
    output, finish = await collect(
        await client.add(EngineRequest(PROMPT, SamplingParams(max_tokens=8)))
    )
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    return output


EXPECTED = reference_output(PROMPT, SamplingParams(max_tokens=8), SimulationConfig(vocab_size=1000))


async def seconds_until_lost(stream: EngineStream) -> tuple[float, str]:
    began_s = time.monotonic()
    try:
        async for _ in stream:
            pass
    except EngineLost as error:
        return time.monotonic() - began_s, str(error)
    raise AssertionError("the stream ended as if nothing had happened")


# ------------------------------------------------------------------ the right secret


class Watcher:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.keys = KeySet()
        self.reports: list[wire.LoadReport] = []
        self.lost: list[str] = []

    def session_opened(self, info: wire.HelloReply) -> KeySet:
        return self.keys

    def session_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def load_reported(self, report: wire.LoadReport) -> None:
        self.reports.append(report)

    def request_seen(self, number: int) -> None:
        pass


def test_tokens_events_and_the_end_of_an_engine_come_through(secret: Secret) -> None:
    watcher = Watcher()

    async def run(engine: LocalEngine) -> None:
        async with await EngineClient.connect(
            engine.endpoint, observer=watcher, keys=secret.keys
        ) as client:
            assert client.info is not None
            assert client.info.stream_endpoint.startswith("curve+tcp://127.0.0.1:")
            assert await ask(client) == EXPECTED
            async with asyncio.timeout(5):
                while not (len(watcher.keys) and watcher.reports):
                    await asyncio.sleep(0.01)
            assert client.follower is not None
            assert client.follower.in_sync
            stream = await client.add(EngineRequest([1], SamplingParams(max_tokens=900)))
            await anext(stream)
            os.kill(engine.pid, signal.SIGKILL)
            noticed_s, reason = await asyncio.wait_for(seconds_until_lost(stream), 5)
            assert noticed_s < 0.5
            assert "has broken" in reason
            assert watcher.lost == [reason]

    with LocalEngine.start(secret.config(lease_s=60, step_s=0.01)) as engine:
        assert engine.endpoint.startswith("curve+tcp://127.0.0.1:")
        asyncio.run(run(engine))


def test_an_engine_that_falls_silent_is_noticed_by_its_lease(secret: Secret) -> None:
    """As one behind a network that has stopped to carry anything: no connection breaks."""

    async def run(engine: LocalEngine) -> None:
        async with await EngineClient.connect(engine.endpoint, keys=secret.keys) as client:
            stream = await client.add(EngineRequest([1], SamplingParams(max_tokens=900)))
            await anext(stream)
            os.kill(engine.pid, signal.SIGSTOP)
            noticed_s, reason = await asyncio.wait_for(seconds_until_lost(stream), 5)
            assert noticed_s < 2.5
            assert "silent" in reason

    with LocalEngine.start(secret.config(lease_s=1, step_s=0.01)) as engine:
        try:
            asyncio.run(run(engine))
        finally:
            os.kill(engine.pid, signal.SIGCONT)


def own_address() -> str:
    """An address of this machine that is not loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_it_advertises_the_address_that_it_is_bound_to(secret: Secret, family: str) -> None:
    host = own_address() if family == "ipv4" else "[::1]"
    listen = f"tcp://{host}:*"

    async def run(core: EngineCore) -> None:
        async with await EngineClient.connect(core.endpoint, keys=secret.keys) as client:
            assert client.info is not None
            assert client.info.stream_endpoint.startswith(f"curve+tcp://{host}:")
            assert await ask(client) == EXPECTED

    with running_engine(secret.config(listen=listen, listen_stream=listen)) as core:
        assert core.endpoint.startswith(f"curve+tcp://{host}:")
        assert not core.endpoint.endswith((":0", "*"))
        asyncio.run(run(core))


def test_on_one_machine_a_secret_changes_nothing_for_ipc(secret: Secret, tmp_path: Path) -> None:
    paths = {"listen": f"ipc://{tmp_path}/r", "listen_stream": f"ipc://{tmp_path}/s"}

    async def run(core: EngineCore) -> None:
        for keys in (secret.keys, None):
            async with await EngineClient.connect(core.endpoint, keys=keys) as client:
                assert await ask(client) == EXPECTED

    with running_engine(secret.config(**paths)) as core:
        assert core.endpoint == paths["listen"]
        asyncio.run(run(core))


def test_an_idle_engine_on_the_network_uses_almost_no_cpu(secret: Secret) -> None:
    with running_engine(secret.config()):
        time.sleep(0.3)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.03


# ------------------------------------------------------------------ who is refused


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


# ------------------------------------------------------------------ nothing in the clear


@pytest.mark.parametrize("field", ["listen", "listen_stream"])
@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "engine.example", "eth0"])
def test_an_engine_without_a_secret_stays_on_its_machine(field: str, host: str) -> None:
    config = simulated_config(**{field: f"tcp://{host}:*"})
    with pytest.raises(ConfigurationError, match=r"CurveZMQ.*cluster_secret_file"):
        EngineCore(config, SimulatedExecutor(config))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_engine_listens_on_one_address_and_not_on_all(secret: Secret, host: str) -> None:
    for make in (simulated_config, secret.config):
        config = make(listen=f"tcp://{host}:*")
        with pytest.raises(ConfigurationError, match="one address of this node"):
            EngineCore(config, SimulatedExecutor(config))


def test_an_address_that_cannot_be_had_is_the_engines_own_reason(secret: Secret) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineStartError, match=f"{listen}: Address already in use"):
            LocalEngine.start(secret.config(listen=listen))
    with pytest.raises(EngineStartError, match="cluster_secret_file"):
        LocalEngine.start(simulated_config(listen="tcp://192.0.2.1:*"))


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://192.0.2.1:5555",
        "tcp://[2001:db8::1]:5555",
        "tcp://engine.example:5555",
        "tcp://127.0.0.1;192.0.2.1:5555",
        "tcp://127.0.0.1.example:5555",
    ],
)
def test_a_client_sends_nothing_in_the_clear_over_a_network(secret: Secret, endpoint: str) -> None:
    with pytest.raises(EngineLost, match="not encrypted"):
        asyncio.run(EngineClient.connect(endpoint, keys=secret.keys))


def test_nor_does_it_follow_a_stream_in_the_clear(secret: Secret) -> None:
    with running_engine(simulated_config()) as core:
        forged = {"stream_endpoint": "tcp://192.0.2.1:5555"}
        core._hello = msgspec.structs.replace(core._hello, **forged)
        with pytest.raises(
            EngineLost, match=r"its stream at tcp://192\.0\.2\.1:5555.*not encrypted"
        ):
            asyncio.run(EngineClient.connect(core.endpoint, keys=secret.keys))


# ------------------------------------------------------------------ keys


def test_keys_are_the_same_every_time_and_on_every_release() -> None:
    keys = CurveKeys.derive(b"k" * 32)
    assert keys == CurveKeys.derive(b"k" * 32)
    assert keys.engine.public == b"hb@<!^Dbi>?jbfT3)EV$x@M{3-O28x?CPFf&b<04"
    assert keys.ingress.public == b"!cw1TjP.v<*nL8Q5>Ae14#t*%hMhYPbpjxTQ+/30"
    for pair in (keys.engine, keys.ingress):
        assert zmq.curve_public(pair.secret) == pair.public
    assert CurveKeys.derive(b"k" * 31 + b"l") != keys


def test_no_key_tells_of_another() -> None:
    secret = b"k" * 32
    names = ["curve engine", "curve ingress", "curve engine ", "x"]
    derived = {derive_key(secret, name) for name in names}
    assert len(derived) == len(names)
    root = key_root(secret, "", "", 1).root
    assert not any(key.startswith(root) for key in derived)
    for name in ("", "a purpose that is too long"):
        with pytest.raises(ValueError, match="purpose"):
            derive_key(secret, name)


def test_secrets_are_in_no_text(
    secret: Secret, other: Secret, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    errors: list[str] = []

    async def run(endpoint: str) -> None:
        half = CurveKeys(engine=secret.keys.engine, ingress=other.keys.ingress)
        for keys in (other.keys, half):
            try:
                await EngineClient.connect(endpoint, keys=keys)
            except EngineLost as error:
                errors.append(repr(error))
        async with await EngineClient.connect(endpoint, keys=secret.keys) as client:
            assert await ask(client) == EXPECTED
            errors.append(repr(client.info))

    with open(tmp_path / "log", "w+") as log:
        with LocalEngine.start(secret.config(), stderr=log) as engine:
            asyncio.run(run(engine.endpoint))
            wait_until(lambda: "denied" in (tmp_path / "log").read_text())
        text = (tmp_path / "log").read_text() + caplog.text + "".join(errors)
    text += repr(secret.keys) + str(other.keys) + repr(secret.config())
    assert len(errors) == 3
    for word in (*secret.words(), *other.words()):
        assert word not in text


def test_threads_and_descriptors_go_with_the_engine(secret: Secret) -> None:
    async def run(core: EngineCore) -> None:
        async with await EngineClient.connect(core.endpoint, keys=secret.keys) as client:
            assert await ask(client) == EXPECTED

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(2):
        before = counts()
        with running_engine(secret.config()) as core:
            asyncio.run(run(core))
        wait_until(lambda before=before: counts() <= before)
