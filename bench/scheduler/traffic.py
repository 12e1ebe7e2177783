"""Requests over time, from files with a seed, and how a scheduler and a model serve them.

Invariant: the requests of a workload are always the same, whoever serves them. Everything but the
sockets is real: scheduler, cache, compute thread, executor.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from random import Random

import msgspec

from cache.keys import KeyRoot
from engine.compute import ComputeThread, Step
from engine.plan import Executor
from engine.request import RequestKey, RequestState
from engine.scheduler import Scheduler
from engine.wire import SamplingParams, ServiceClass

_FIRST_PLAIN_ID = 1000
"""Ids below may be special tokens."""
_STOP_TIMEOUT_S = 5.0


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one kind. Ranges are inclusive."""

    num_requests: int
    own_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_prefixes: int = 1
    shared_tokens: int = 0
    """That the requests of one prefix begin with; they take turns."""
    start_s: float = 0.0
    interval_s: float = 0.0
    """Mean time between two; exponential."""
    concurrency: int = 0
    """Of so many clients, each sends its next request when its last has ended; 0: by interval."""
    is_probe: bool = False
    """Its times to first token are what is asked about."""


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str
    seed: int
    groups: tuple[Group, ...]


def load_traffic(name: str) -> Traffic:
    """Reads `bench/workloads/scheduler/<name>.json`."""
    text = (files("bench") / "workloads" / "scheduler" / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=Traffic)


@dataclass(slots=True)
class Record:
    """What one run took; seconds."""

    wall_s: float = 0.0
    num_tokens: int = 0
    """Of prompts and output of all requests: what a client is served."""
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of the probes, or of all when there are none."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of a request."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Tokens, and from the end of the step before, or its own beginning if that was later."""

    @property
    def gap_p99_s(self) -> float:
        return _percentile(self.gaps_s, 99)

    @property
    def ttft_p95_s(self) -> float:
        return _percentile(self.ttft_s, 95)


@dataclass(slots=True)
class _Client:
    """What is still to be sent by one group."""

    group: Group
    due: deque[tuple[float, RequestState]]
    num_open: int = 0

    def take(self, now: float) -> list[RequestState]:
        taken = []
        while self.due and self.due[0][0] <= now:
            if self.group.concurrency and self.num_open >= self.group.concurrency:
                break
            taken.append(self.due.popleft()[1])
            self.num_open += 1
        return taken


class Drive:
    """Serves `traffic` once; a step is planned while one runs if the scheduler may overlap."""

    def __init__(self, scheduler: Scheduler, executor: Executor, traffic: Traffic, root: KeyRoot):
        self._scheduler = scheduler
        self._wakes = threading.Event()
        self._compute = ComputeThread(executor, self._wakes.set)
        self._clients = _clients(traffic, root, executor.info.vocab_size)
        self._client_of: dict[RequestKey, _Client] = {}
        self._times: dict[RequestKey, list[float]] = {}
        self._arrived: dict[RequestKey, float] = {}
        self._num_requests = sum(group.num_requests for group in traffic.groups)
        self._has_probes = any(group.is_probe for group in traffic.groups)
        self._ended_s = 0.0
        self.record = Record()

    def run(self) -> Record:
        began_s = time.monotonic()
        self._compute.start()
        most_open = 2 if self._scheduler.config.overlap else 1
        num_left = self._num_requests
        while num_left:
            now = time.monotonic()
            for client in self._clients:
                for request in client.take(now - began_s):
                    self._client_of[request.key] = client
                    self._arrived[request.key] = now
                    self._scheduler.add(request, now)
            while self._compute.num_open < most_open and (plan := self._scheduler.schedule(now)):
                self._compute.submit(plan)
            self._wakes.wait(0.01)
            self._wakes.clear()
            while (step := self._compute.take()) is not None:
                num_left -= self._commit(step)
        self.record.wall_s = time.monotonic() - began_s
        self._compute.stop(_STOP_TIMEOUT_S)
        return self._finish()

    def _commit(self, step: Step) -> int:
        """Returns how many requests have ended."""
        record = self.record
        began_s = max(self._ended_s, step.began_s)
        record.steps.append((step.plan.num_tokens, step.ended_s - began_s))
        self._ended_s = step.ended_s
        num_ended = 0
        for request, item in self._scheduler.commit(step.result):
            self._times.setdefault(request.key, []).append(step.ended_s)
            if item.finish is not None:
                num_ended += 1
                self._client_of[request.key].num_open -= 1
                record.num_tokens += request.num_tokens
                record.num_output_tokens += request.num_output_tokens
        self._scheduler.cache.drain_events()
        return num_ended

    def _finish(self) -> Record:
        for key, times in self._times.items():
            if self._client_of[key].group.is_probe or not self._has_probes:
                self.record.ttft_s.append(times[0] - self._arrived[key])
            self.record.gaps_s += [after - before for before, after in pairwise(times)]
        return self.record


def _clients(traffic: Traffic, root: KeyRoot, vocab_size: int) -> list[_Client]:
    clients = []
    for number, group in enumerate(traffic.groups):
        rng = Random(f"{traffic.name}/{traffic.seed}/{number}")

        def draw(count: int, rng: Random = rng) -> list[int]:
            return [rng.randrange(_FIRST_PLAIN_ID, vocab_size) for _ in range(count)]

        prefixes = [draw(group.shared_tokens) for _ in range(group.num_prefixes)]
        due: deque[tuple[float, RequestState]] = deque()
        at_s = group.start_s
        for each in range(group.num_requests):
            token_ids = prefixes[each % len(prefixes)] + draw(rng.randint(*group.own_tokens))
            sampling = SamplingParams(max_tokens=rng.randint(*group.output_tokens), ignore_eos=True)
            request = RequestState(
                key=(str(number), str(each)),
                attempt=0,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                sampling=sampling,
                root=root,
                end_token_ids=frozenset(),
                service_class=ServiceClass.STANDARD,
            )
            due.append((at_s, request))
            if group.interval_s:
                at_s += rng.expovariate(1 / group.interval_s)
        clients.append(_Client(group, due))
    return clients


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]
