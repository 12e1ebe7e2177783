"""Engines on the network: where they listen, with which keys, and what either end notices."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from cache.events import KeySet
from cache.keys import key_root
from configs.secret import derive_key
from engine import wire
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.core import EngineCore
from engine.curve import CurveKeys
from engine.errors import ConfigurationError, EngineLost
from engine.executors.simulated import SimulatedExecutor
from engine.launcher import EngineStartError, LocalEngine
from engine.wire import SamplingParams
from tests.engine.curve_rig import EXPECTED, Secret, ask, seconds_until_lost
from tests.engine.rig import running_engine, simulated_config, wait_until

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
