"""A running Shoal as a test sees it: its URL, its engines, and clients that ask all the time."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Live:
    """A Shoal that serves at `url`."""

    url: str
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def ready(self) -> dict[str, Any]:
        models: dict[str, Any] = self.http.get(f"{self.url}/ready").json()["models"]
        return models

    def engines(self, model: str = "good") -> dict[str, dict[str, Any]]:
        return {engine["id"]: engine for engine in self.ready()[model]["engines"]}

    def pids(self, model: str = "good") -> dict[str, int]:
        """Process of each engine."""
        return {name: engine["pid"] for name, engine in self.engines(model).items()}

    def ask(self, text: str = "Hello", model: str = "good", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.http.post(f"{self.url}/v1/chat/completions", json={**body, **fields})

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        end_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if condition():
                    return
            assert time.monotonic() < end_s, f"it never came to that: {self.ready()}"
            time.sleep(0.1)

    def wait_ready(self, model: str = "good", engines: int = 1, timeout_s: float = 60) -> None:
        """Until the model has this many engines, all with a session."""

        def is_so() -> bool:
            found = self.engines(model).values()
            states = [engine["state"] for engine in found if "running" in engine]
            return states == ["ready"] * engines == [engine["state"] for engine in found]

        self.wait(is_so, timeout_s)


@contextlib.contextmanager
def under_load(
    live: Live, num_clients: int = 3, model: str = "good", timeout_s: float = 30
) -> Iterator[Counter[int]]:
    """Clients that ask again and again; yields how often each status came (0: no answer)."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(timeout=timeout_s) as http:
            count = 0
            while not stop.is_set():
                count += 1
                content = f"client {number} asks {count}"
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 4,
                }
                try:
                    reply = http.post(f"{live.url}/v1/chat/completions", json=body)
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


@dataclass
class Stream:
    """One streamed answer, read in a thread of its own."""

    thread: threading.Thread
    texts: list[str]

    @property
    def num_tokens(self) -> int:
        """As the usage at its end says."""
        self.thread.join()
        *_, usage = [line for line in self.texts[0].split("\n") if line.startswith("data: {")]
        tokens: int = json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
        return tokens

    @property
    def text(self) -> str:
        """All content of its only choice."""
        self.thread.join()
        lines = [line for line in self.texts[0].split("\n") if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"] for line in lines]
        return "".join(choice["delta"].get("content") or "" for each in choices for choice in each)

    @property
    def is_complete(self) -> bool:
        self.thread.join()
        return self.texts[0].endswith("data: [DONE]\n\n")


def open_stream(
    live: Live, model: str, text: str = "Hello", *, max_tokens: int, **fields: Any
) -> Stream:
    """Starts to read an answer of `max_tokens` tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }
    texts: list[str] = []

    def read() -> None:
        url = f"{live.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as reply:
            texts.append(reply.read().decode())

    thread = threading.Thread(target=read)
    thread.start()
    return Stream(thread, texts)
