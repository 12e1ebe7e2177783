"""Engines, their cold starts and their queues in discrete time, scaled by the policy.

Invariant: one seed, one course. An engine runs up to `slots` requests at once, the others wait in
it; what waits is seen by the policy only through samples, every `SAMPLE_S`.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autoscaler.policy import Decision, Fleet, Sample, State, Thresholds, decide

SAMPLE_S = 0.5
_START_S = 1.7e9
_PROMPT_TOKENS = 500
_PREFILL_TOKENS_PER_S = 4000.0


@dataclass
class Engine:
    ready_at_s: float
    waiting: deque[float] = field(default_factory=deque)
    """Seconds of service."""
    running: list[float] = field(default_factory=list)
    """Seconds left."""
    has_served: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)


class Change(NamedTuple):
    at_s: float
    before: int
    after: int
    reason: str


@dataclass
class Simulation:
    num_engines: int = 1
    seed: int = 0
    cold_start_s: float = 30.0
    slots: int = 8
    service_s: float = 8.0
    """Mean of a request, so that an engine ends `slots / service_s` a second at most."""
    most: int = 16
    thresholds: Thresholds = field(default_factory=Thresholds)
    step_s: float = 0.1

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.target = self.num_engines
        self.state = State()
        self.engines = [Engine(0.0) for _ in range(self.num_engines)]
        self.changes: list[Change] = []
        self.decisions: list[tuple[float, Decision]] = []
        self._random = random.Random(self.seed)
        self._samples: list[Sample] = []
        self._sampled_at_s = -math.inf

    @property
    def ready(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.ready_at_s <= self.now_s]

    @property
    def num_waiting(self) -> int:
        return sum(len(engine.waiting) for engine in self.engines)

    def arrive(self, service_s: float | None = None) -> None:
        """One request, at the ready engine that has fewest."""
        if service_s is None:
            service_s = self._random.expovariate(1.0 / self.service_s)
        min(self.ready, key=lambda engine: engine.num_requests).waiting.append(service_s)

    def run(
        self,
        duration_s: float,
        rate: float = 0.0,
        until: "Callable[[Simulation], bool]" = lambda _: False,
    ) -> "Simulation":
        """`rate` requests a second, at random times; ends early as soon as `until` holds."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s - 1e-9 and not until(self):
            for _ in range(self._num_arrivals(rate * self.step_s)):
                self.arrive()
            for engine in self.ready:
                self._serve(engine)
            if self.now_s - self._sampled_at_s >= SAMPLE_S - 1e-9:
                self._samples = [self._sample(engine) for engine in self.engines]
                self._sampled_at_s = self.now_s
            self._scale()
            self.now_s += self.step_s
        return self

    def _num_arrivals(self, mean: float) -> int:
        """Of a Poisson process (inversion)."""
        number, share = 0, math.exp(-mean)
        chance = self._random.random() - share
        while chance > 0:
            number += 1
            share *= mean / number
            chance -= share
        return number

    def _serve(self, engine: Engine) -> None:
        engine.running = [left - self.step_s for left in engine.running if left > self.step_s]
        while engine.waiting and len(engine.running) < self.slots:
            engine.running.append(engine.waiting.popleft())
            engine.has_served = True

    def _sample(self, engine: Engine) -> Sample:
        if engine.ready_at_s > self.now_s:
            return Sample()
        noise = self._random.uniform(0.9, 1.1)
        return Sample(
            ready=1.0,
            queued_requests=len(engine.waiting),
            queued_tokens=len(engine.waiting) * _PROMPT_TOKENS,
            prefill_tokens_per_s=_PREFILL_TOKENS_PER_S * noise if engine.has_served else 0.0,
            utilisation=min(1.0, len(engine.running) / self.slots * noise),
        )

    def _scale(self) -> None:
        fleet = Fleet(self.target, len(self.engines), 1, self.most)
        now = _START_S + self.now_s
        decision, self.state = decide(self._samples, self.thresholds, fleet, self.state, now)
        self.decisions.append((self.now_s, decision))
        if decision.desired == self.target:
            return
        self.changes.append(Change(self.now_s, self.target, decision.desired, decision.reason))
        self.target = decision.desired
        while len(self.engines) < self.target:
            self.engines.append(Engine(self.now_s + self.cold_start_s))
        while len(self.engines) > self.target:
            # Serve takes what does not run first, then the newest; what it holds drains apart.
            self.engines.remove(max(self.engines, key=lambda engine: engine.ready_at_s))
        self._samples = [self._sample(engine) for engine in self.engines]

    def set(self, **thresholds: float) -> None:
        """As a live change of the model's settings does."""
        self.thresholds = replace(self.thresholds, **thresholds)
