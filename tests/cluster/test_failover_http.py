"""What an HTTP client sees of engines that die: nothing, but for comments that keep it waiting."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.engine import EngineConfig
from configs.shoal import IngressConfig, RouterConfig
from engine.launcher import LocalEngine
from engine.models.resolve import resolve_model
from replicas.directory import EngineEntry, EngineState
from tests.cluster.conftest import simulated
from tests.cluster.test_holding import Client, with_ingress

POISON = 0
"""The end token, which is never drawn here."""


@pytest.fixture(scope="module")
def source() -> Path:
    return resolve_model("default")


@contextlib.contextmanager
def engines(count: int) -> Iterator[list[LocalEngine]]:
    config: EngineConfig = simulated(step_s=0.01, poison_token_id=POISON)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(LocalEngine.start(config)) for _ in range(count)]


def entry(client: Client, name: str, engine: LocalEngine) -> EngineEntry:
    source = client.script.source
    return EngineEntry(name, "m", EngineState.READY, source=source, endpoint=engine.endpoint)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_waits_with_comments_and_goes_on(source: Path) -> None:
    async def use(client: Client) -> None:
        client.ingress.configure(IngressConfig(keep_alive_s=0.1), RouterConfig())
        client.script.say(entry(client, "a", first))
        await client.until(lambda state: state["state"] == "ready")
        fields: dict[str, Any] = {"max_tokens": 60, "seed": 3, "temperature": 1.0}
        whole = (await client.ask(**fields)).json()
        asked = client.ask(**fields, stream=True, stream_options={"include_usage": True})
        await client.until(lambda state: state["engines"][0].get("running") == 1)
        await asyncio.sleep(0.2)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.sleep(0.5)
        assert not asked.done()
        client.script.say(entry(client, "b", second))
        text = (await asked).text
        assert text.count(": keep-alive") >= 2
        assert text.endswith("data: [DONE]\n\n")
        *parts, usage = events(text)
        got = "".join(choice["text"] for part in parts for choice in part["choices"])
        assert got == whole["choices"][0]["text"]
        assert usage["usage"]["completion_tokens"] == 60
        metrics = (await client.http.get("/metrics")).text
        assert 'shoal_failovers_total{kind="resumed",model="m"} 1.0' in metrics

    with engines(2) as (first, second):
        with_ingress(source, use)


def test_a_request_that_kills_engines_is_told_so(source: Path) -> None:
    async def use(client: Client) -> None:
        named = zip("abc", running, strict=True)
        client.script.say(*(entry(client, name, engine) for name, engine in named))
        await client.until(lambda s: sum("running" in engine for engine in s["engines"]) == 3)
        reply = await client.ask(prompt=[1, 2, POISON, 3])
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "request_kills_engines"
        assert "two engines died while they computed this request" in reply.text
        assert (await client.ask()).status_code == 200
        assert sum(engine.alive() for engine in running) == 1

    with engines(3) as running:
        with_ingress(source, use)
