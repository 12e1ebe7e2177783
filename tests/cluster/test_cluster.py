"""A whole cluster under `shoal serve`: two ingresses, two replicas of one model, a model that is
broken, and whatever can die is killed. Simulated engines; everything around them is real."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.reaper import marked

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

THIRD = """
  - name: third
    engine:
      executor: simulated
      cache: {{num_blocks: 1024}}
      simulation: {{vocab_size: 49152, max_model_len: 8192, step_s: 10ms}}
"""

START_MODEL = """
import sys
from pathlib import Path
import ray
from configs.load import load
from cluster.launch import Cluster

ray.init(address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
folder = Path(sys.argv[3])
config = load(sys.argv[1]).model_copy(update={"cluster_secret_file": str(folder / "secret")})
Cluster(config, folder / "engine").start_engines([sys.argv[4]])
"""


@dataclass
class Running:
    """A `shoal serve` process and its cluster."""

    process: "subprocess.Popen[str]"
    url: str
    config: Path
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def ready(self) -> dict[str, Any]:
        models: dict[str, Any] = self.http.get(f"{self.url}/ready").json()["models"]
        return models

    def engines(self, model: str = "good") -> dict[str, dict[str, Any]]:
        return {engine["id"]: engine for engine in self.ready()[model]["engines"]}

    def ask(self, text: str = "Hello", model: str = "good", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.http.post(f"{self.url}/v1/chat/completions", json={**body, **fields})

    @property
    def folder(self) -> Path:
        """The cluster's private folder."""
        environment = Path(f"/proc/{self.engine_pid()}/environ").read_bytes().decode()
        match = re.search(r"RAY_AUTH_TOKEN_PATH=([^\0]+)/token", environment)
        assert match is not None
        return Path(match[1])

    def engine_pid(self) -> int:
        return next(engine["pid"] for engine in self.engines().values() if engine["pid"])

    def pids(self, title: str) -> list[int]:
        """Processes of this cluster whose title has `title` in it."""
        found = []
        for pid in marked(f"RAY_AUTH_TOKEN_PATH={self.folder}/token"):
            with contextlib.suppress(OSError):
                if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def gcs_address(self) -> str:
        """Where this cluster's Ray is joined, as its raylet was told."""
        (raylet,) = self.pids("raylet/raylet")
        arguments = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
        return next(a.split("=")[1] for a in arguments if a.startswith("--gcs-address="))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        end_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if condition():
                    return
            assert time.monotonic() < end_s, f"it never came to that: {self.ready()}"
            time.sleep(0.1)

    def wait_all_ready(self) -> None:
        self.wait(
            lambda: (
                [e["state"] for e in self.engines().values() if "running" in e]
                == ["ready", "ready"]
            )
        )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
        running = Running(process, f"http://127.0.0.1:{port}", config)
        running.wait_all_ready()
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def under_load(running: Running, num_clients: int = 3) -> Iterator[Counter[int]]:
    """Clients that ask again and again; yields how often each status came (0: no answer)."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(timeout=30) as http:
            count = 0
            while not stop.is_set():
                count += 1
                content = f"client {number} asks {count}"
                body = {
                    "model": "good",
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 4,
                }
                try:
                    reply = http.post(f"{running.url}/v1/chat/completions", json=body)
                    statuses[reply.status_code] += 1
                except httpx.HTTPError:
                    statuses[0] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


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
    assert len(spread) == 2
    assert min(spread.values()) >= 2


def test_a_killed_engine_costs_only_what_ran_on_it_and_comes_back(running: Running) -> None:
    victim = next(iter(running.engines().values()))
    with under_load(running) as statuses:
        time.sleep(1)
        before = statuses[200]
        os.kill(victim["pid"], signal.SIGKILL)
        # Before it is back, which takes it about a second.
        running.wait(lambda: running.engines()[victim["id"]]["pid"] != victim["pid"], 5)
        failed = statuses.total() - statuses[200]
        assert failed <= 3, "more than one request a client was lost"
        time.sleep(1)
        assert statuses[200] > before + 10
        assert statuses.total() - statuses[200] == failed, "requests failed after the death"
        running.wait(lambda: running.engines()[victim["id"]]["restarts"] == 1)
        running.wait_all_ready()
        assert running.engines()[victim["id"]]["pid"] != victim["pid"]
        assert statuses.total() - statuses[200] == failed


def test_a_killed_registry_is_back_and_nobody_noticed(running: Running) -> None:
    (pid,) = running.pids("ray::Registry")
    with under_load(running) as statuses:
        os.kill(pid, signal.SIGKILL)
        running.wait(lambda: running.pids("ray::Registry") not in ([], [pid]))
        time.sleep(2)
        assert set(statuses) == {200}
    running.wait_all_ready()


def test_a_killed_ingress_is_replaced_and_the_other_serves_on(running: Running) -> None:
    pids = running.pids("ray::ServeReplica:ingress")
    assert len(pids) == 2
    engines = {engine["pid"] for engine in running.engines().values()}
    os.kill(pids[0], signal.SIGKILL)
    running.wait(lambda: running.ask().status_code == 200, 10)
    running.wait(lambda: len(set(running.pids("ray::ServeReplica:ingress")) - {pids[0]}) == 2)
    running.wait_all_ready()
    assert {engine["pid"] for engine in running.engines().values()} == engines


def test_a_killed_supervisor_is_replaced_with_its_engine(running: Running) -> None:
    before = running.engines()
    pids = running.pids("ray::ServeReplica:engine-good")
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


def test_a_hung_engine_is_taken_out_and_replaced(running: Running) -> None:
    victim = next(iter(running.engines().values()))
    os.kill(victim["pid"], signal.SIGSTOP)
    running.wait(lambda: running.engines()[victim["id"]]["restarts"] == victim["restarts"] + 1, 20)
    running.wait_all_ready()
    assert running.ask().status_code == 200
    assert not Path(f"/proc/{victim['pid']}").exists()


def test_a_model_added_under_load_leaves_the_others_alone(running: Running) -> None:
    before = {name: engine["pid"] for name, engine in running.engines().items()}
    running.config.write_text(
        running.config.read_text().replace("ingress:", THIRD.format() + "ingress:", 1)
    )
    with under_load(running) as statuses:
        start_model(running, "third")
        running.wait(lambda: running.ask(model="third").status_code == 200)
        assert set(statuses) == {200}
    assert {name: engine["pid"] for name, engine in running.engines().items()} == before


def test_a_replica_that_is_no_longer_wanted_finishes_its_streams(running: Running) -> None:
    body = {
        "model": "third",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    texts: list[str] = []

    def read() -> None:
        url = f"{running.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            texts.append(reply.read().decode())

    text = running.config.read_text()
    running.config.write_text(text.replace("name: third", "name: third\n    replicas: 2"))
    start_model(running, "third")
    running.wait(lambda: sum("running" in e for e in running.engines("third").values()) == 2)
    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    running.wait(lambda: sum(e["running"] for e in running.engines("third").values()) == 6)
    running.config.write_text(text)
    start_model(running, "third")
    running.wait(lambda: any(e["state"] == "draining" for e in running.engines("third").values()))
    for reader in readers:
        reader.join()
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all(text.count('"content"') > 1500 for text in texts)
    running.wait(lambda: len(running.engines("third")) == 1)


def start_model(running: Running, name: str) -> None:
    """Starts or changes one model's application, as an operator would from elsewhere."""
    folder = running.folder
    environment = {
        **os.environ,
        "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    arguments = [str(running.config), running.gcs_address(), str(folder), name]
    subprocess.run(
        [sys.executable, "-c", START_MODEL, *arguments], env=environment, check=True, timeout=60
    )
