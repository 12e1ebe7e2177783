"""A cluster on a simulated clock, and what its users see.

Invariant: a stage begins on an idle cluster with what the stages before it left in its caches, and
ends with its last answer; latencies count from when a request was due.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.cluster.clock import Clock
from bench.cluster.engine import Delivery, SimulatedEngine
from bench.cluster.ingress import SimulatedIngress
from bench.cluster.shape import Prompt, Prompts, Shape
from cluster.routing.decision import RouteRequest
from configs.shoal import RouterConfig
from engine.request import RequestState
from engine.wire import SamplingParams

NETWORK_S = 0.0005
"""From an ingress to an engine, and back."""


@dataclass(slots=True)
class Stage:
    """What one rate of requests came to."""

    began_s: float
    ended_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    busy_s: list[float] = field(default_factory=list)
    """Of each engine."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / (self.ended_s - self.began_s)

    def ttft_percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent))

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean(self.ttft_s))

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def balance(self) -> float:
        """Mean over most of the engines' busy time: 1 is even."""
        return float(np.mean(self.busy_s) / np.max(self.busy_s))


class Simulation:
    """Call `stage` for each rate in turn."""

    def __init__(self, shape: Shape, policy: str, num_ingresses: int = 1) -> None:
        self._shape = shape
        self._rng = random.Random(shape.seed)
        self._clock = Clock()
        prompts = Prompts(shape)
        self._root = prompts.root
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._sampling = SamplingParams(max_tokens=shape.output_tokens, ignore_eos=True)
        config = RouterConfig.model_validate({"policy": policy})
        self._ingresses = {
            name: SimulatedIngress(name, config)
            for name in (f"ingress-{number}" for number in range(num_ingresses))
        }
        self._engines = {
            name: SimulatedEngine(name, shape, self._clock, self._deliver)
            for name in (f"engine-{number}" for number in range(shape.num_engines))
        }
        for ingress in self._ingresses.values():
            for engine in self._engines.values():
                ingress.open(engine)
        self._stage = Stage(0.0)
        self._due_s: dict[str, float] = {}
        """Of requests without a token."""
        self._num_open = 0
        self._num_sent = 0

    def stage(self, rate: float, num_requests: int) -> Stage:
        """A Poisson process of so many requests."""
        clock = self._clock
        before = [engine.meter.busy_s for engine in self._engines.values()]
        stage = self._stage = Stage(clock.now_s)
        self._num_open = num_requests
        at_s = 0.0
        for _ in range(num_requests):
            at_s += self._rng.expovariate(rate)
            clock.after(at_s, partial(self._send, next(self._prompts)))
        clock.run(lambda: not self._num_open)
        stage.ended_s = clock.now_s
        after = [engine.meter.busy_s for engine in self._engines.values()]
        stage.busy_s = [end - begin for begin, end in zip(before, after, strict=True)]
        for engine in self._engines.values():
            engine.scheduler.check_integrity()
        return stage

    def _send(self, prompt: Prompt) -> None:
        self._num_sent += 1
        request_id = f"request-{self._num_sent}"
        ingress = self._rng.choice([*self._ingresses.values()])
        num_tokens = len(prompt.token_ids)
        route = RouteRequest(request_id, prompt.keys, num_tokens, self._shape.output_tokens)
        decision, number = ingress.place(route)
        request = RequestState(
            key=(ingress.name, request_id),
            attempt=0,
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=num_tokens,
            sampling=self._sampling,
            root=self._root,
            end_token_ids=frozenset(),
            block_keys=list(prompt.keys),
        )
        self._due_s[request_id] = self._clock.now_s
        engine = self._engines[decision.replica_id]
        self._clock.after(NETWORK_S, partial(engine.add, ingress.name, number, request))

    def _deliver(self, engine_name: str, delivery: Delivery) -> None:
        self._clock.after(NETWORK_S, partial(self._arrive, engine_name, delivery))

    def _arrive(self, engine_name: str, delivery: Delivery) -> None:
        for ingress in self._ingresses.values():
            ingress.hear(engine_name, delivery)
        stage = self._stage
        for items in delivery.items.values():
            for item in items:
                stage.num_output_tokens += len(item.token_ids)
                due_s = self._due_s.pop(item.request_id, None)
                if due_s is not None:
                    stage.ttft_s.append(self._clock.now_s - due_s)
                    stage.num_prompt_tokens += self._shape.prompt_tokens
                    stage.num_cached_tokens += item.cached_tokens
                if item.finish is not None:
                    self._num_open -= 1
