"""A whole cluster under `shoal serve`: two ingresses, two replicas of one model, a model that is
broken, and whatever can die is killed. Simulated engines; everything around them is real."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from cluster.ports import free_ports
from cluster.reaper import marked
from tests.cluster.live import Live, open_stream, under_load

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

CONFIG = """
models:
  - name: good
    aliases: [also-good]
    replicas: 2
    engine: &simulated
      executor: simulated
      cache: {{num_blocks: 4096}}
      simulation: {{vocab_size: 49152, max_model_len: 8192, step_s: 5ms, token_s: 0.3ms}}
    supervision: {{poll_interval_s: 200ms, stall_s: 2s}}
  - name: bad
    engine: {{model: /no/such/folder}}
ingress: {{port: {port}, replicas: 2}}
"""


@dataclass
class Running(Live):
    """A `shoal serve` process and its cluster."""

    @property
    def folder(self) -> Path:
        """The cluster's private folder."""
        environment = Path(f"/proc/{self.engine_pid()}/environ").read_bytes().decode()
        match = re.search(r"RAY_AUTH_TOKEN_PATH=([^\0]+)/token", environment)
        assert match is not None
        return Path(match[1])

    def engine_pid(self) -> int:
        return next(engine["pid"] for engine in self.engines().values() if engine["pid"])

    def processes(self, title: str) -> list[int]:
        """Processes of this cluster whose title has `title` in it."""
        found = []
        for pid in marked(f"RAY_AUTH_TOKEN_PATH={self.folder}/token"):
            with contextlib.suppress(OSError):
                if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def wait_all_ready(self) -> None:
        self.wait_ready(engines=2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    (port,) = free_ports(1)
    config = tmp_path_factory.mktemp("cluster") / "shoal.yaml"
    config.write_text(CONFIG.format(port=port))
    command = [sys.executable, "-m", "cluster", "serve", str(config)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("curl"):
                break
        else:
            pytest.fail(f"it did not start: {process.stderr and process.stderr.read()}")
        running = Running(f"http://127.0.0.1:{port}")
        running.wait_all_ready()
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def test_the_broken_model_is_named_and_the_good_one_serves(running: Running) -> None:
    models = running.ready()
    assert models["good"]["state"] == "ready"
    assert models["bad"]["state"] in ("failed", "loading")
    running.wait(lambda: "/no/such/folder" in running.ready()["bad"]["engines"][0]["detail"])
    reply = running.ask(model="bad")
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "model_not_ready"
    assert running.ask(model="also-good").status_code == 200
    assert running.ask(model="ugly").status_code == 404
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    assert {m.id for m in client.models.list()} == {"good", "also-good", "bad"}


def test_a_shared_prefix_stays_with_its_holder_and_cold_ones_spread(running: Running) -> None:
    spread: Counter[str] = Counter()
    for number in range(12):
        prefix = f"{number} " + "word " * 500
        engines = []
        for question in range(4):
            reply = running.ask(f"{prefix} question {question}")
            engines.append(reply.headers["x-shoal-engine"])
            usage = reply.json()["usage"]
            if question:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 480, (number, question, usage)
            # Two ingresses take turns: the other one must have heard of the blocks.
            time.sleep(0.05)
        assert len(set(engines)) == 1
        spread[engines[0]] += 1
    for number in range(12, 32):
        reply = running.ask(f"{number} " + "word " * 500)
        spread[reply.headers["x-shoal-engine"]] += 1
    assert len(spread) == 2
    # A fair coin falls on one side less than four times in 32 once in 400,000.
    assert min(spread.values()) >= 4


def test_any_ingress_explains_the_requests_of_all(running: Running) -> None:
    request_id = running.ask("Why there?").json()["id"]
    # Each over a connection of its own: the two ingresses take turns.
    replies = [httpx.get(f"{running.url}/explain/{request_id}") for _ in range(6)]
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1
    report = replies[0].json()
    assert report["stages_s"]["proxy"] > 0
    assert report["decisions"][0]["num_engines"] == 2
    time.sleep(0.1)
    again = running.ask("Why there?").json()["id"]
    report = httpx.get(f"{running.url}/explain/{again}").json()
    assert report["decisions"][0]["reason"] == "cached"
    assert report["cached_tokens"] >= report["predicted_cached_tokens"] >= 16
    unknown = httpx.get(f"{running.url}/explain/nothing")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "not_found"


def test_a_killed_engine_costs_nobody_anything_and_comes_back(running: Running) -> None:
    victim = next(iter(running.engines().values()))
    with under_load(running) as statuses:
        time.sleep(1)
        before = statuses[200]
        os.kill(victim["pid"], signal.SIGKILL)
        running.wait(lambda: running.engines()[victim["id"]]["restarts"] == 1)
        running.wait_all_ready()
        assert running.engines()[victim["id"]]["pid"] != victim["pid"]
        time.sleep(1)
        assert statuses[200] > before + 10
        assert set(statuses) == {200}


def test_a_stream_goes_on_when_its_engine_is_killed(running: Running) -> None:
    fields = {"max_tokens": 600, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    whole = running.ask("Tell me a story", **fields)
    stream = open_stream(running, "good", "Tell me a story", **fields)
    running.wait(lambda: any(engine["running"] for engine in running.engines().values()), 10)
    time.sleep(0.5)
    victim = next(e for e in running.engines().values() if e["running"])
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.is_complete
    assert stream.text == whole.json()["choices"][0]["message"]["content"]
    assert stream.num_tokens == 600
    running.wait_all_ready()
    assert not any(engine["running"] for engine in running.engines().values())


def test_a_killed_registry_is_back_and_nobody_noticed(running: Running) -> None:
    (pid,) = running.processes("ray::Registry")
    with under_load(running) as statuses:
        os.kill(pid, signal.SIGKILL)
        running.wait(lambda: running.processes("ray::Registry") not in ([], [pid]))
        time.sleep(2)
        assert set(statuses) == {200}
    running.wait_all_ready()


def test_a_killed_ingress_is_replaced_and_the_other_serves_on(running: Running) -> None:
    pids = running.processes("ray::ServeReplica:ingress")
    assert len(pids) == 2
    engines = {engine["pid"] for engine in running.engines().values()}
    os.kill(pids[0], signal.SIGKILL)
    running.wait(lambda: running.ask().status_code == 200, 10)
    running.wait(lambda: len(set(running.processes("ray::ServeReplica:ingress")) - {pids[0]}) == 2)
    running.wait_all_ready()
    assert {engine["pid"] for engine in running.engines().values()} == engines


def test_a_killed_supervisor_is_replaced_with_its_engine(running: Running) -> None:
    before = running.engines()
    pids = running.processes("ray::ServeReplica:engine-good")
    assert len(pids) == 2
    with under_load(running) as statuses:
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGKILL)
        running.wait(lambda: len(set(running.engines()) - set(before)) == 1)
        running.wait_all_ready()
        time.sleep(1)
        assert statuses[200] > 20
        assert statuses.total() - statuses[200] <= 3, statuses
    assert len(set(running.engines()) & set(before)) == 1


def test_a_hung_engine_is_taken_out_and_its_streams_go_on(running: Running) -> None:
    stream = open_stream(running, "good", max_tokens=800)
    running.wait(lambda: any(engine["running"] for engine in running.engines().values()), 10)
    victim = next(e for e in running.engines().values() if e["running"])
    os.kill(victim["pid"], signal.SIGSTOP)
    running.wait(lambda: running.engines()[victim["id"]]["restarts"] == victim["restarts"] + 1, 20)
    running.wait_all_ready()
    assert running.ask().status_code == 200
    assert stream.num_tokens == 800
    assert not Path(f"/proc/{victim['pid']}").exists()
