"""Servers for the ingress's tests: a real engine process, the real HTTP application."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from cluster.fleet import FixedDirectory
from cluster.identity import IngressIdentity
from cluster.ingress import Ingress, build_app
from cluster.tokenizer import Tokenizer
from configs.engine import CacheConfig, EngineConfig, SimulationConfig
from configs.shoal import IngressConfig, RouterConfig
from engine.launcher import LocalEngine
from engine.models.resolve import resolve_model
from replicas.directory import ModelEntry

VOCAB_SIZE = 49152
MODEL_NAME = "simulated"
MODEL_ALIAS = "also/simulated"


@dataclass
class Served:
    """An ingress over HTTP and the engine behind it."""

    url: str
    engine: LocalEngine

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def load(self) -> dict[str, int]:
        """The engine's last published load."""
        (engine,) = httpx.get(f"{self.url}/ready").json()["models"][MODEL_NAME]["engines"]
        assert "running" in engine, "there is no session with the engine"
        load: dict[str, int] = engine
        return load

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until nothing runs and no block is held; fails after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while (load := self.load())["running"] or load["waiting"] or load["used_blocks"]:
            assert time.monotonic() < end_s, f"the engine is still busy: {load}"
            time.sleep(0.05)

    def begin(self, path: str, **body: object) -> http.client.HTTPConnection:
        """Asks, and leaves the answer to be read."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps({"model": MODEL_NAME, **body}), headers)
        return connection

    def wait_running(self, count: int, timeout_s: float = 5.0) -> None:
        end_s = time.monotonic() + timeout_s
        while self.load()["running"] < count:
            assert time.monotonic() < end_s, f"never saw {count} running"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model("default")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def simulated(**simulation: float) -> EngineConfig:
    return EngineConfig(
        executor="simulated",
        cache=CacheConfig(num_blocks=4096),
        simulation=SimulationConfig(
            **{"vocab_size": VOCAB_SIZE, "max_model_len": 8192, **simulation}
        ),
    )


@contextlib.contextmanager
def serve_ingress(
    config: EngineConfig, model_folder: Path, **ingress_fields: float
) -> Iterator[Served]:
    with LocalEngine.start(config) as engine:
        model = ModelEntry(MODEL_NAME, str(model_folder), aliases=(MODEL_ALIAS,))
        ingress = Ingress(IngressIdentity.random(), FixedDirectory(model, (engine.endpoint,)))
        # An engine that is lost here has nobody who would start another.
        ingress.configure(IngressConfig(hold_s=0.5, **ingress_fields), RouterConfig())
        app = build_app(ingress)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = Served(url, engine)
        try:
            _wait_healthy(url)
            yield served
        finally:
            server.should_exit = True
            thread.join(10)


def _wait_healthy(url: str) -> None:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.get(f"{url}/ready")
            if reply.status_code == 200 and "running" in reply.text:
                return
        time.sleep(0.02)
    raise AssertionError("the ingress never became healthy")


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Served]:
    """A fast simulated engine that ends an output after about 200 tokens."""
    with serve_ingress(simulated(eos_period=200), model_folder) as served:
        yield served


@pytest.fixture(scope="module")
def slow(model_folder: Path) -> Iterator[Served]:
    """An engine that never ends an output by itself, 20 ms a token."""
    with serve_ingress(simulated(step_s=0.02), model_folder) as served:
        yield served
