"""One engine on the simulated clock: the real scheduler, cache, meter and stream.

Invariant: what `engine.core` does in a turn happens here in the same order and at the same times,
but that planning takes no time and a step is planned when the one before it has ended: commit,
plan, publish cache events and a load report if one is due, all in one message to each ingress.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.cluster.clock import Clock
from bench.cluster.executor import CostExecutor
from bench.cluster.shape import BLOCK_SIZE, Shape
from cache.prefix import PrefixCache
from configs.engine import CacheConfig, SchedulerConfig, TransportConfig
from engine.load import LoadMeter
from engine.load_reporter import LoadReporter
from engine.plan import StepPlan, StepResult
from engine.request import Output, RequestState
from engine.scheduler import Scheduler
from engine.stream import StreamLog, to_delta
from engine.wire import StreamFrame, TokenItem


@dataclass(frozen=True, slots=True)
class Delivery:
    """What an engine has to say after a turn."""

    frames: tuple[StreamFrame, ...]
    items: dict[str, list[TokenItem]]
    """By ingress."""
    seen: dict[str, int]
    """Highest request number from each ingress."""


class SimulatedEngine:
    """`add` requests when they arrive; `deliver` is called with what goes out."""

    def __init__(
        self, name: str, shape: Shape, clock: Clock, deliver: Callable[[str, Delivery], None]
    ) -> None:
        self.name = name
        self.meter = LoadMeter()
        config = CacheConfig()
        cache = PrefixCache(
            shape.num_blocks, config.wheel_slots, config.wheel_slot_width, BLOCK_SIZE
        )
        self.scheduler = Scheduler(SchedulerConfig(overlap=False), cache, BLOCK_SIZE)
        self.stream = StreamLog(1, replay_frames=16)
        self._executor = CostExecutor(shape)
        self._clock = clock
        self._deliver = deliver
        self._seen: dict[str, int] = {}
        self._step: tuple[StepPlan, StepResult, float] | None = None
        interval_s = TransportConfig().load_report_interval_s
        self._reporter = LoadReporter(self.scheduler, self.meter, interval_s)
        self._armed_s = 0.0
        self._turn([])

    def add(self, ingress_id: str, number: int, request: RequestState) -> None:
        """A request arrives. Raises `RequestRejected` when the queue is full."""
        self._seen[ingress_id] = number
        self._turn(self.scheduler.add(request, self._clock.now_s))

    @property
    def _is_idle(self) -> bool:
        return self._step is None and not self.scheduler.requests

    def _end_step(self) -> None:
        assert self._step is not None
        plan, result, began_s = self._step
        self._step = None
        self.meter.add(plan, result, began_s, self._clock.now_s)
        outputs = self.scheduler.commit(result)
        if not self.scheduler.requests:
            self.meter.rest()
        self._turn(outputs)

    def _turn(self, outputs: list[Output]) -> None:
        now_s = self._clock.now_s
        if self._step is None:
            plan = self.scheduler.schedule(now_s, self.meter.prefill_tokens_per_s)
            if plan is not None:
                result = self._executor.execute(plan)
                self._step = plan, result, now_s
                self._clock.after(result.compute_s, self._end_step)
        frames = []
        if events := self.scheduler.cache.drain_events():
            frames.append(self.stream.append(to_delta(events)))
        if now_s >= self._due_s:
            age_s = now_s - self._step[2] if self._step is not None else 0.0
            report = self._reporter.report(now_s, self._is_idle, age_s, dict(self._seen))
            frames.append(self.stream.append(report))
        items: dict[str, list[TokenItem]] = {}
        for request, item in outputs:
            items.setdefault(request.key[0], []).append(item)
        if frames or items:
            self._deliver(self.name, Delivery(tuple(frames), items, dict(self._seen)))
        if not now_s < self._armed_s <= self._due_s:
            self._armed_s = self._due_s
            self._clock.after(self._due_s - now_s, self._wake)

    def _wake(self) -> None:
        if self._clock.now_s >= self._due_s:
            self._turn([])

    @property
    def _due_s(self) -> float:
        return self._reporter.due_s(self._is_idle)
