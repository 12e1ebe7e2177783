"""A server that answers as a script says, in a thread of its own, and helpers around files."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.batch import job as batches
from cluster.batch.report import Tally
from cluster.batch.retry import RetryPolicy
from cluster.batch.runner import Limits
from cluster.batch.server import Target

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Step:
    """How one request is answered."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    drop: bool = False
    """The connection is closed without an answer."""
    delay_s: float = 0.0


class ScriptedServer:
    """Answers each prompt by its steps in turn; without any left, with an answer like Shoal's."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Step]] = {}
        self.default = Step()
        self.padding = ""
        self.models: dict[str, Any] = {"m": ready_model(64)}
        self.asked: Counter[str] = Counter()
        self.asked_at_s: dict[str, list[float]] = {}
        self.gone: Counter[str] = Counter()
        """Prompts whose client left."""
        self.keys: set[str | None] = set()
        self.running = self.most_running = 0
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """On the same port as before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        """Closes every connection."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/v1/{endpoint:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _ready(self, _: web.Request) -> web.Response:
        is_ready = any(model["state"] == "ready" for model in self.models.values())
        return web.json_response({"models": self.models}, status=200 if is_ready else 503)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt") or body["messages"][0]["content"]
        self.asked[prompt] += 1
        self.asked_at_s.setdefault(prompt, []).append(time.monotonic())
        self.keys.add(request.headers.get("Authorization"))
        steps = self.steps.get(prompt)
        step = steps.pop(0) if steps else self.default
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(step.delay_s)
        except asyncio.CancelledError:
            self.gone[prompt] += 1
            raise
        finally:
            self.running -= 1
        if step.drop:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        text = step.body if step.body is not None else self._body(prompt, body, step)
        headers = {"X-Request-Id": f"request-{prompt}", **step.headers}
        return web.Response(
            status=step.status, body=text, headers=headers, content_type="application/json"
        )

    def _body(self, prompt: str, body: dict[str, Any], step: Step) -> bytes:
        if step.status != 200:
            return json.dumps({"error": {"message": f"refused {prompt}"}}).encode()
        usage = {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        text = f"answer to {prompt}{self.padding}"
        answer = {"model": body.get("model"), "choices": [{"text": text}], "usage": usage}
        # Blanks before an answer, as Shoal sends them, and an answer over several lines.
        return b"  " + json.dumps(answer, indent=1).encode()


def ready_model(*max_num_seqs: int, state: str = "ready") -> dict[str, Any]:
    """A model as `/ready` has it, with an engine for each figure."""
    engines = [{"id": "e", "state": state, "max_num_seqs": seqs} for seqs in max_num_seqs]
    return {"state": state, "detail": "", "engines": engines}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    scripted.start()
    yield scripted
    scripted.end()


def row(custom_id: Any, prompt: str | None = None, **changes: Any) -> str:
    """An input line; `changes` replace its fields."""
    body = {"model": "m", "prompt": prompt or str(custom_id)}
    fields = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body, **changes}
    return json.dumps(fields) + "\n"


def write_rows(path: Path, count: int) -> list[str]:
    """Good rows; returns their ids."""
    names = [f"row-{number}" for number in range(count)]
    path.write_text("".join(row(name) for name in names))
    return names


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Every line of an output, each whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def ids_of(path: Path) -> Counter[str | None]:
    return Counter(line["custom_id"] for line in lines_of(path))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(
    files: tuple[Path, Path],
    url: str,
    retry: RetryPolicy | None = None,
    wait_s: float = 10,
    **options: Any,
) -> Tally:
    """One run in this process, with short delays; raises what it raises."""
    source, target = files
    concurrency = options.pop("concurrency", 4096)
    timeout_s = options.pop("timeout_s", 10)
    retry = retry or RetryPolicy(num_retries=3, first_delay_s=0.01)
    tally = Tally()
    limits = Limits(concurrency, wait_s, retry)
    ended = batches.run(
        batches.Job(source, target, Target(url, None, timeout_s), limits, **options), tally
    )
    assert ended is None
    return tally


def shoal_batch(*arguments: object) -> "subprocess.Popen[str]":
    """The command as a user runs it."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", "batch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.005)
