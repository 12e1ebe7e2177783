"""What engine tests run on: a scheduler stepped by hand, or an EngineCore in a thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cache.events import BlockKey, Tier
from cache.keys import KeyRoot, key_root
from cache.prefix import PrefixCache
from cache.tiers import DiskJob, LowerTiers
from cache.wheel import Retention
from configs.engine import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SimulationConfig,
    TransportConfig,
)
from engine.core import EngineCore
from engine.executors import simulated
from engine.executors.simulated import SimulatedExecutor
from engine.plan import Executor, StepPlan
from engine.request import Output, RequestKey, RequestState
from engine.scheduler import Scheduler
from engine.wire import FinishReason, SamplingParams, ServiceClass

BLOCK = 4
SIMULATION = SimulationConfig(vocab_size=50, eos_period=40)


def reference_output(
    prompt: Sequence[int], sampling: SamplingParams, simulation: SimulationConfig = SIMULATION
) -> list[int]:
    """What the simulated model answers."""
    return simulated.reference_output(prompt, sampling, simulation)


def lengths(plan: StepPlan) -> list[int]:
    """Tokens that each run computes: decodes first, though a plan has no order of its own."""
    return [1] * len(plan.decodes) + [item.length for item in plan.slices]


class Rig:
    """A scheduler, its cache and an executor: by default the simulated one, checking every KV slot
    that it reads. The cache may have fewer blocks than the executor, to force preemption."""

    def __init__(
        self,
        num_blocks: int,
        *,
        executor: Executor | None = None,
        reuse: bool = True,
        num_slots: int = 0,
        disk: "MemoryDisk | None" = None,
        **limits: float,
    ) -> None:
        """With `num_slots` there is a host tier; the jobs of `disk` are left to the test."""
        cache_config = CacheConfig(
            block_size=BLOCK, num_blocks=num_blocks, host_memory_bytes=num_slots * BLOCK * 1024
        )
        config = EngineConfig(executor="simulated", cache=cache_config, simulation=SIMULATION)
        self.executor: Executor = executor or SimulatedExecutor(
            config, sleep=lambda _: None, verify=True
        )
        info = self.executor.info
        self.cache = PrefixCache(num_blocks, block_size=info.block_size)
        self.tiers: LowerTiers | None = None
        self.disk = disk
        if num_slots:
            self.tiers = LowerTiers(PrefixCache(num_slots, tier=Tier.HOST), disk)
        self.scheduler = Scheduler(
            SchedulerConfig.model_validate(limits),
            self.cache,
            info.block_size,
            reuse=reuse,
            tiers=self.tiers,
        )
        self.output: dict[RequestKey, list[int]] = {}
        self.finished: dict[RequestKey, FinishReason] = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        output: Sequence[int] = (),
        priority: int = 0,
        root: KeyRoot | None = None,
        retention: Retention = Retention.NORMAL,
        service_class: ServiceClass = ServiceClass.STANDARD,
        now: float = 0.0,
    ) -> RequestState:
        info = self.executor.info
        request = RequestState(
            key=("ingress", name),
            attempt=0,
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            root=root or key_root(b"k" * 32, info.fingerprint, "", info.block_size),
            end_token_ids=frozenset(() if sampling.ignore_eos else info.eos_token_ids),
            priority=priority,
            retention=retention,
            service_class=service_class,
            pin_steps=1000,
        )
        self.output[request.key] = list(output)
        self.take(self.scheduler.add(request, now))
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.take(self.scheduler.commit(self.executor.execute(plan)))
        return plan

    def take(self, outputs: list[Output]) -> None:
        for request, item in outputs:
            output = self.output[request.key]
            assert item.offset == len(output), "a hole or a repetition in the stream"
            output.extend(item.token_ids)
            if item.finish is not None:
                assert request.key not in self.finished
                self.finished[request.key] = item.finish.reason

    def drain(self) -> None:
        """Until nothing is left to do, on the disk neither."""
        while self.step() is not None or self.work_disk():
            self.scheduler.check_integrity()

    def drain_overlapped(self) -> int:
        """As `drain`, each step planned before the one before it is committed, and executed after.
        Returns the number of steps."""
        running, count = self.scheduler.schedule(), 0
        while running is not None:
            ahead = self.scheduler.schedule()
            self.scheduler.check_integrity()
            self.take(self.scheduler.commit(self.executor.execute(running)))
            self.scheduler.check_integrity()
            running = ahead or self.scheduler.schedule()
            count += 1
        return count

    def work_disk(self) -> bool:
        """Does what the disk is asked to. Returns whether there was anything."""
        if self.tiers is None or self.disk is None:
            return False
        jobs = self.tiers.take_jobs()
        for job in jobs:
            self.tiers.finish(job, self.disk.run(job, self.executor))
        return bool(jobs)


class MemoryDisk:
    """A disk's part of the tiers, in a dict that outlives engines."""

    def __init__(self) -> None:
        self.files: dict[BlockKey, bytes] = {}
        self.promised: set[BlockKey] = set()
        """Keys that the filter does not deny, beside those of files."""

    def __contains__(self, key: object) -> bool:
        return key in self.files or key in self.promised

    def run(self, job: DiskJob, executor: Executor, fails: bool = False) -> list[bool]:
        """Of a read that fails, something is in the slots all the same."""
        done = []
        for key, slot in job.items:
            memory = executor.slot_memory(slot)
            if job.is_read:
                is_there = key in self.files and not fails
                memory[:] = self.files[key] if is_there else b"\xff" * len(memory)
                done.append(is_there)
            else:
                if not fails:
                    self.files[key] = memory.tobytes()
                done.append(not fails)
        return done


def simulated_config(
    num_blocks: int = 256, lease_s: float = 5.0, step_s: float = 0.0, **transport: object
) -> EngineConfig:
    return EngineConfig(
        executor="simulated",
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        simulation=SimulationConfig(vocab_size=1000, step_s=step_s),
        transport=TransportConfig.model_validate({"lease_s": lease_s, **transport}),
    )


@contextlib.contextmanager
def running_engine(
    config: EngineConfig | None = None, executor: Executor | None = None
) -> Iterator[EngineCore]:
    """Yields a core that serves; checks its state when it has stopped."""
    config = config or simulated_config()
    core = EngineCore(config, executor or SimulatedExecutor(config, verify=True))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            core.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield core
        assert not errors, "the engine died"
    finally:
        core.stop()
        thread.join(10)
    core._scheduler.check_integrity()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    """Seconds until `condition` held. Fails when it does not within `timeout_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "it never came to that"
        time.sleep(0.005)
    return time.monotonic() - start
