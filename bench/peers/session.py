"""One engine under measurement, whichever it is.

Invariant: an engine runs only inside its `open`, and nothing else of this module computes then.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bench.engine import send
from bench.peers.setup import PeerMissing
from configs.engine import EngineConfig
from engine.client import EngineClient
from engine.launcher import LocalEngine

Prompts = Sequence[list[int]]


class Session(Protocol):
    """A process that is ready."""

    def generate(self, prompts: Prompts, output_tokens: int) -> float:
        """Sends all prompts at once, greedy and past any end token. Returns seconds until the last
        token of all. Raises `PeerMissing` where other than `output_tokens` each came back."""
        ...


class Engine(Protocol):
    """How to start one."""

    @property
    def name(self) -> str: ...

    @property
    def flags(self) -> Mapping[str, str]:
        """Everything that was set, and nothing that was left as it comes."""
        ...

    def open(self) -> AbstractContextManager[Session]: ...


@dataclass(frozen=True)
class Shoal:
    """Our own engine, reached over its sockets as an ingress reaches it."""

    threads: int
    name: str = "shoal"
    model: str = "default"
    flags: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", {"model": self.model, "threads": str(self.threads)})

    @contextmanager
    def open(self) -> Iterator[Session]:
        config = EngineConfig(model=self.model, threads=self.threads)
        with LocalEngine.start(config) as engine, asyncio.Runner() as runner:
            client = runner.run(EngineClient.connect(engine.endpoint))
            try:
                yield _ShoalSession(runner, client)
            finally:
                runner.run(client.close())


class _ShoalSession:
    def __init__(self, runner: asyncio.Runner, client: EngineClient) -> None:
        self._runner = runner
        self._client = client

    def generate(self, prompts: Prompts, output_tokens: int) -> float:
        return self._runner.run(send(self._client, prompts, output_tokens)).last_s


def until(deadline_s: float) -> float:
    """Seconds left. Raises `PeerMissing` where there are none."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise PeerMissing("it was not ready in time")
    return left_s
