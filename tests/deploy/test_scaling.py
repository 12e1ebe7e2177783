"""A model that scales itself: Serve's controller runs the policy on what supervisors report."""

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.live import open_stream
from tests.deploy.rig import SIMULATED, Deployed, model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

NAME = "elastic"
SLOTS = 4
STEP_S = 0.02
TOKENS = 50
"""A request takes TOKENS * STEP_S = 1 s, so an engine ends SLOTS requests a second."""
UP_QUEUED = 4.0


def elastic(**autoscaling: Any) -> dict[str, Any]:
    engine = {
        **SIMULATED,
        "scheduler": {"max_num_seqs": SLOTS},
        "simulation": {**SIMULATED["simulation"], "step_s": STEP_S, "token_s": 0.0},
    }
    scaling = {"max_replicas": 3, "up_queued_requests": UP_QUEUED, **autoscaling}
    return model(NAME, engine=engine, autoscaling=scaling, placement={"num_cpus": 0.4})


@dataclass
class Watch:
    """When a model's queue was too long, and how many engines Serve was to run."""

    deployed: Deployed
    crossed_s: list[float] = field(default_factory=list)
    targets: list[tuple[float, int]] = field(default_factory=list)
    """Each change, and when."""

    def look(self) -> None:
        engines = self.deployed.engines(NAME).values()
        now = time.monotonic()
        ready = [engine for engine in engines if engine["state"] == "ready"]
        waiting = sum(engine.get("waiting", 0) for engine in ready)
        if waiting > UP_QUEUED * len(ready):
            self.crossed_s.append(now)
        wanted = self.deployed.target(NAME)
        if not self.targets or self.targets[-1][1] != wanted:
            self.targets.append((now, wanted))

    def counts(self) -> list[int]:
        return [count for _, count in self.targets]


class OpenLoop:
    """Requests at a constant rate, whatever becomes of them, from a thread of its own."""

    def __init__(self, url: str, rate_per_s: float) -> None:
        self.statuses: Counter[int] = Counter()
        self._url = f"{url}/v1/completions"
        self._interval_s = 1 / rate_per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def end(self) -> None:
        """Sends nothing more, and waits for the answers."""
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=120, limits=limits) as http,
            asyncio.TaskGroup() as all_,
        ):
            due_s = time.monotonic()
            number = 0
            while not self._stop.is_set():
                all_.create_task(self._one(http, number))
                number += 1
                due_s += self._interval_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        prompt = f"{number} is the number of this request"
        body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        try:
            self.statuses[(await http.post(self._url, json=body)).status_code] += 1
        except httpx.HTTPError:
            self.statuses[0] += 1


@pytest.fixture
def watch(deployed: Deployed) -> Iterator[Watch]:
    """Nothing else on the machine, and a watcher."""
    deployed.deploy(models=[elastic(down_delay_s="5s", up_delay_s="1s")])
    deployed.wait_ready(NAME)
    watch = Watch(deployed)
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.1):
            watch.look()

    thread = threading.Thread(target=run)
    thread.start()
    yield watch
    ended.set()
    thread.join()


def test_a_burst_brings_engines_and_its_end_takes_them(deployed: Deployed, watch: Watch) -> None:
    load = OpenLoop(deployed.url, rate_per_s=1.6 * SLOTS)
    time.sleep(25)
    load.end()
    grown_s = next(at for at, count in watch.targets if count > 1)
    assert grown_s - watch.crossed_s[0] < 5
    assert max(watch.counts()) <= 3
    deployed.wait(lambda: watch.counts()[-1] == 1, timeout_s=60)
    assert load.statuses.keys() == {200}
    assert load.statuses[200] > 100
    assert_explained(deployed)
    counts = watch.counts()
    highest = counts.index(max(counts))
    assert counts == sorted(counts[:highest]) + sorted(counts[highest:], reverse=True)


def assert_explained(deployed: Deployed) -> None:
    """Each decision is a line in the controller's log, and metrics have the numbers behind it."""
    ray = Path(deployed.environment["RAY_AUTH_TOKEN_PATH"]).parent / "ray"
    logs = (ray / "session_latest" / "logs" / "serve").glob("controller_[0-9]*.log")
    log = "".join(path.read_text() for path in logs)
    assert re.search(rf"{NAME}: from 1 to \d engines: for each of 1 engines .* requests", log)
    assert re.search(rf"{NAME}: from 2 to 1 engines: hardly anything waits", log)
    found = next(ray.rglob("prom_metrics_service_discovery.json"))
    targets = [target for each in json.loads(found.read_text()) for target in each["targets"]]

    def is_there() -> bool:
        text = "".join(httpx.get(f"http://{target}/metrics").text for target in targets)
        up = re.search(r"ray_shoal_autoscaler_decisions_total{[^}]*direction=\"up\"[^}]*}", text)
        uses = re.search(rf"ray_shoal_replica_utilisation{{[^}}]*model=\"{NAME}\"", text)
        return bool(up and uses)

    # Ray collects metrics every few seconds.
    deployed.wait(is_there, timeout_s=30)


def test_a_long_stream_leaves_an_engine_that_is_taken_away(deployed: Deployed) -> None:
    """It would run for 40 s; the engine is gone long before, and its client has noticed nothing."""
    two = {"max_replicas": None, "down_delay_s": "1s"}
    deployed.deploy(models=[{**elastic(**two), "replicas": 2}])
    deployed.wait_ready(NAME, engines=2)
    whole = [deployed.ask(f"Story {number}", NAME, max_tokens=4, seed=1) for number in range(2)]
    assert {reply.status_code for reply in whole} == {200}
    streams = []
    while min(engine["running"] for engine in deployed.engines(NAME).values()) < 1:
        assert len(streams) < 2 * SLOTS, "an engine gets nothing"
        text = f"{len(streams)} is the number of this story"
        streams.append(open_stream(deployed, NAME, text, max_tokens=2000))
        time.sleep(0.3)
    began_s = time.monotonic()
    deployed.deploy(models=[{**elastic(**two), "replicas": 1}])
    deployed.wait_ready(NAME, engines=1, timeout_s=30)
    drained_s = time.monotonic() - began_s
    assert drained_s < 20, "it waited for its streams"
    (engine,) = deployed.engines(NAME).values()
    assert engine["running"] + engine["waiting"] == len(streams)
    assert {stream.num_tokens for stream in streams} == {2000}


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 1.0, 1.5, 2.2])
def test_a_steady_load_settles(deployed: Deployed, watch: Watch, share: float) -> None:
    """Of one engine's capacity. After a minute there is at most one change in five more."""
    load = OpenLoop(deployed.url, rate_per_s=share * SLOTS)
    time.sleep(60)
    settled = len(watch.targets)
    time.sleep(300)
    load.end()
    assert len(watch.targets) - settled <= 2, watch.targets
    assert load.statuses.keys() == {200}
