"""What an ingress measures of how well it knows the caches: two engines, the real application."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launcher import LocalEngine
from engine.models.resolve import resolve_model
from tests.cluster.conftest import simulated
from tests.cluster.test_failover_http import entry
from tests.cluster.test_holding import Client, with_ingress


@pytest.fixture(scope="module")
def source() -> Path:
    return resolve_model("default")


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LocalEngine]]:
    with LocalEngine.start(simulated()) as one, LocalEngine.start(simulated()) as two:
        yield [one, two]


async def ready(client: Client, engines: list[LocalEngine]) -> None:
    client.script.say(*(entry(client, f"e{n}", each) for n, each in enumerate(engines)))
    await client.until(lambda state: sum("running" in each for each in state["engines"]) == 2)


def figure(text: str, name: str, **labels: str) -> float:
    """The sum of a metric over the series with these labels."""
    found = re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE)
    return sum(
        float(value)
        for own, value in found
        if all(f'{label}="{wanted}"' in own for label, wanted in labels.items())
    )


def test_what_is_known_of_caches_is_measured(source: Path, engines: list[LocalEngine]) -> None:
    async def use(client: Client) -> None:
        await ready(client, engines)

        async def metrics() -> str:
            return (await client.http.get("/metrics")).text

        for _ in range(2):
            reply = await client.ask(prompt="an unheard-of beginning " * 30)
            cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            await asyncio.sleep(0.3)
        text = await metrics()
        assert cached > 32
        for kind in ("cached", "cached_predicted"):
            assert figure(text, "shoal_tokens_total", kind=kind) == cached
        for kind in ("cached_missed", "cached_unforeseen"):
            assert figure(text, "shoal_tokens_total", kind=kind) == 0
        assert figure(text, "shoal_index_stream_total", kind="snapshots") == 2
        for kind in ("gaps", "replays", "mismatches", "refreshes"):
            assert figure(text, "shoal_index_stream_total", kind=kind) == 0
        assert figure(text, "shoal_index_rough_engines", model="m") == 0
        assert 2_000 < figure(text, "shoal_index_bytes", model="m") < 1_000_000
        core_ids = re.findall(r'staleness_seconds\{engine="([^"]+)"', text)
        assert len(core_ids) == 2
        for core_id in core_ids:
            assert figure(text, "shoal_index_staleness_seconds", engine=core_id) < 0.5
        os.kill(engines[0].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.0)
            text = await metrics()
        finally:
            os.kill(engines[0].pid, signal.SIGCONT)
        ages = [figure(text, "shoal_index_staleness_seconds", engine=each) for each in core_ids]
        assert min(ages) < 0.5 < 0.8 < max(ages)

    with_ingress(source, use)
