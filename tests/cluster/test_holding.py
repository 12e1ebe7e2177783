"""Requests wait for an engine that is on its way, and for no other. A real engine and the real
application; what the Registry would say is scripted."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.fleet import Alone
from cluster.identity import IngressIdentity
from cluster.ingress import Ingress, build_app
from configs.shoal import IngressConfig, RouterConfig
from engine.core import EngineCore
from engine.models.resolve import resolve_model
from replicas.directory import DirectoryView, EngineEntry, EngineState, ModelEntry
from tests.cluster.conftest import simulated
from tests.engine.rig import running_engine

LOADING, READY, DRAINING = EngineState.LOADING, EngineState.READY, EngineState.DRAINING
FAILED = EngineState.FAILED


class Script(Alone):
    """A directory whose content a test sets."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)
        self._version = 0
        self._changed = asyncio.Event()
        self._view = self._made(())

    def _made(self, engines: tuple[EngineEntry, ...], **changes: Any) -> DirectoryView:
        self._version += 1
        models = changes.get("models", (ModelEntry("m", self.source),))
        return DirectoryView(self._version, "boot", True, models, engines)

    def say(self, *engines: EngineEntry, **changes: Any) -> None:
        self._view = self._made(engines, **changes)
        self._changed.set()

    def engine(self, name: str, state: EngineState, core: EngineCore | None = None) -> EngineEntry:
        endpoint = core.endpoint if core is not None else ""
        return EngineEntry(name, "m", state, source=self.source, endpoint=endpoint)

    async def next_view(self, known: DirectoryView | None) -> DirectoryView:
        while known is not None and known.version == self._view.version:
            self._changed.clear()
            await self._changed.wait()
        return self._view


class Client:
    """Asks the application, in this process."""

    def __init__(self, ingress: Ingress, http: httpx.AsyncClient, script: Script) -> None:
        self.ingress = ingress
        self.http = http
        self.script = script

    def ask(self, **fields: Any) -> "asyncio.Task[httpx.Response]":
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4, **fields}
        return asyncio.ensure_future(self.http.post("/v1/completions", json=body))

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until `/ready` says so of the model."""
        async with asyncio.timeout(10):
            while True:
                models = (await self.http.get("/ready")).json()["models"]
                if "m" in models and condition(models["m"]):
                    return
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def source() -> Path:
    return resolve_model("default")


def with_ingress(
    source: Path, use: Callable[[Client], Awaitable[None]], hold_s: float = 20, max_held: int = 8
) -> None:
    async def run() -> None:
        script = Script(source)
        ingress = Ingress(IngressIdentity.random(), script)
        ingress.configure(IngressConfig(hold_s=hold_s, max_held=max_held), RouterConfig())
        app = build_app(ingress)
        transport = httpx.ASGITransport(app)
        async with (
            asyncio.timeout(30),
            ingress.running(app),
            httpx.AsyncClient(transport=transport, base_url="http://shoal") as http,
        ):
            await use(Client(ingress, http, script))

    asyncio.run(run())


def test_what_comes_before_the_engine_is_answered_by_it(source: Path) -> None:
    async def use(client: Client) -> None:
        early = [client.ask() for _ in range(3)]
        await asyncio.sleep(0.5)
        metrics = (await client.http.get("/metrics")).text
        assert 'shoal_held_requests{model="m"} 3.0' in metrics
        client.script.say(client.script.engine("a", LOADING))
        await asyncio.sleep(0.2)
        assert not any(one.done() for one in early)
        client.script.say(client.script.engine("a", READY, core))
        replies = await asyncio.gather(*early)
        assert [reply.status_code for reply in replies] == [200] * 3, replies[0].text
        assert 'shoal_held_requests{model="m"} 0.0' in (await client.http.get("/metrics")).text

    with running_engine(simulated()) as core:
        with_ingress(source, use)


def test_patience_and_room_have_limits(source: Path) -> None:
    async def use(client: Client) -> None:
        began_s = time.monotonic()
        held = [client.ask() for _ in range(2)]
        await asyncio.sleep(0.1)
        reply = await client.ask()
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "2 requests wait for an engine of model m"
        replies = await asyncio.gather(*held)
        assert [reply.status_code for reply in replies] == [503, 503]
        assert {reply.headers["retry-after"] for reply in replies} == {"1"}
        assert 0.9 < time.monotonic() - began_s < 5

    with_ingress(source, use, hold_s=1, max_held=2)


def test_engines_that_cannot_start_are_not_waited_for(source: Path) -> None:
    async def use(client: Client) -> None:
        await client.until(lambda state: True)
        held = client.ask()
        await asyncio.sleep(0.3)
        client.script.say(client.script.engine("a", FAILED), client.script.engine("b", LOADING))
        await asyncio.sleep(0.3)
        assert not held.done()
        client.script.say(client.script.engine("a", FAILED), client.script.engine("b", FAILED))
        assert (await held).status_code == 503
        assert (await client.ask()).json()["error"]["code"] == "model_not_ready"

    with_ingress(source, use)


def test_a_draining_engine_gives_what_it_refuses_to_the_next(source: Path) -> None:
    async def use(client: Client) -> None:
        say, engine = client.script.say, client.script.engine
        say(engine("a", READY, one))
        await client.until(lambda state: state["state"] == "ready")
        assert (await client.ask()).headers["x-shoal-engine"] == "a#0"
        # The engine knows before the ingress does.
        one.drain()
        refused = client.ask()
        await asyncio.sleep(0.3)
        assert not refused.done()
        say(engine("a", DRAINING, one), engine("b", READY, other))
        assert (await refused).headers["x-shoal-engine"] == "b#0"

    with running_engine(simulated()) as one, running_engine(simulated()) as other:
        with_ingress(source, use)


def test_a_replaced_model_finishes_on_its_old_engine(source: Path, tmp_path: Path) -> None:
    new_source = tmp_path / "new"
    new_source.symlink_to(source)

    async def use(client: Client) -> None:
        say, engine = client.script.say, client.script.engine
        old_engine = engine("old", READY, slow)
        say(old_engine)
        await client.until(lambda state: state["state"] == "ready")
        runs = client.ask(max_tokens=60, ignore_eos=True)
        await client.until(lambda state: state["engines"][0].get("running") == 1)
        client.script.source = str(new_source)
        say(old_engine)
        held = client.ask()
        await asyncio.sleep(0.3)
        assert not held.done()
        assert not runs.done()
        say(old_engine, engine("new", READY, other))
        assert (await held).headers["x-shoal-engine"] == "new#0"
        assert (await runs).json()["usage"]["completion_tokens"] == 60
        assert (await runs).headers["x-shoal-engine"] == "old#0"
        say(engine("new", READY, other), models=())
        async with asyncio.timeout(5):
            while (await client.ask()).status_code != 404:
                await asyncio.sleep(0.02)

    with (
        running_engine(simulated(step_s=0.02)) as slow,
        running_engine(simulated()) as other,
    ):
        with_ingress(source, use)
