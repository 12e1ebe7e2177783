"""One scheduler and its caches over ten thousand random steps, checked after each: what a short
example cannot reach (wheels that have turned, filters and pools that have filled), and that nothing
is left or has grown at the end."""

import gc
import resource
import sys
from pathlib import Path
from random import Random

import pytest

from cache.wheel import Retention
from configs.engine import SchedulerConfig
from engine.plan import StepPlan, StepResult
from engine.request import RequestKey
from engine.wire import FinishReason, SamplingParams, ServiceClass
from tests.engine.rig import MemoryDisk, Rig, reference_output

_NUM_STEPS = 10_000
_STEMS = [[stem + 1] * 8 + list(range(1, 9)) for stem in range(6)]
"""Beginnings that prompts share."""


class _Fuzzer:
    """Adds, aborts, plans ahead, late commits, failures, time jumps, other settings, slow disks."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.rig = Rig(24, num_slots=40, disk=MemoryDisk(), max_num_seqs=6)
        self.expected: dict[RequestKey, list[int]] = {}
        self.flying: list[StepPlan] = []
        self.count = 0
        self.now = 0.0
        self.ends = dict.fromkeys(FinishReason, 0)

    def step(self) -> None:
        actions = (self.add, self.plan, self.plan, self.commit, self.commit, self.now_and_then)
        self.rng.choice(actions)()
        self.rig.scheduler.check_integrity()
        self.forget_ended()

    def add(self) -> None:
        if len(self.rig.scheduler.requests) > 20:
            return
        rng, self.count = self.rng, self.count + 1
        prompt = rng.choice(_STEMS)[: rng.randrange(1, 17)]
        prompt = prompt + [rng.randrange(1, 5) for _ in range(rng.randrange(6))]
        params = SamplingParams(max_tokens=rng.randrange(1, 30), seed=rng.randrange(3))
        expected = reference_output(prompt, params)
        given = expected[: rng.randrange(len(expected))] if rng.random() < 0.1 else []
        key = ("ingress", str(self.count))
        self.expected[key] = expected
        self.rig.add(
            key[1],
            prompt,
            params,
            given,
            priority=rng.choice((0, 0, 0, 1)),
            retention=rng.choice(tuple(Retention)),
            service_class=rng.choice(tuple(ServiceClass)),
            now=self.now,
        )

    def plan(self) -> None:
        if len(self.flying) < 3:
            plan = self.rig.scheduler.schedule(self.now, self.rng.choice((0.0, 50.0)))
            if plan is not None:
                self.flying.append(plan)

    def commit(self) -> None:
        if not self.flying:
            return
        plan = self.flying.pop(0)
        result = self.rig.executor.execute(plan)
        run_ids = [*(item.run_id for item in plan.slices), *plan.decodes]
        if run_ids and self.rng.random() < 0.02:
            victim = self.rng.choice(run_ids)
            sampled = {run: item for run, item in result.sampled.items() if run != victim}
            result = StepResult(plan.step, sampled, failures={victim: "made to fail"})
        self.rig.take(self.rig.scheduler.commit(result))

    def now_and_then(self) -> None:
        scheduler, rng = self.rig.scheduler, self.rng
        match rng.randrange(6):
            case 0 if scheduler.requests:
                scheduler.abort(rng.choice(sorted(scheduler.requests)))
            case 1:
                self.now += rng.choice((0.01, 1.0, 100.0))
                self.rig.take(scheduler.expire(self.now))
            case 2:
                scheduler.config = SchedulerConfig(
                    overlap=rng.random() < 0.8,
                    max_num_seqs=rng.randrange(1, 7),
                    max_num_batched_tokens=rng.randrange(8, 40),
                    long_prefill_threshold=rng.randrange(3, 40),
                    queue_timeout_s=rng.choice((None, 50.0)),
                )
            case 3 | 4:
                self.work_the_disk(fails=rng.random() < 0.2)
            case _ if rng.random() < 0.01:
                for key in list(scheduler.requests):
                    scheduler.abort(key)
            case _:
                pass

    def work_the_disk(self, *, fails: bool) -> None:
        assert self.rig.tiers is not None
        assert self.rig.disk is not None
        jobs = self.rig.tiers.take_jobs()
        self.rng.shuffle(jobs)
        for job in jobs:
            self.rig.tiers.finish(job, self.rig.disk.run(job, self.rig.executor, fails))
        while len(self.rig.disk.files) > 100:
            del self.rig.disk.files[next(iter(self.rig.disk.files))]

    def forget_ended(self) -> None:
        """Of every output, what has come so far is the model's own."""
        rig = self.rig
        for key in [key for key in rig.output if key not in rig.scheduler.requests]:
            output, reason = rig.output.pop(key), rig.finished.pop(key, None)
            expected = self.expected.pop(key)
            assert output == expected[: len(output)]
            if reason is not None:
                self.ends[reason] += 1
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
        rig.cache.drain_events()
        assert rig.tiers is not None
        rig.tiers.host.drain_events()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
)
def test_ten_thousand_random_steps(seed: int) -> None:
    fuzzer = _Fuzzer(seed)
    for _ in range(_NUM_STEPS):
        fuzzer.step()
    while fuzzer.flying:
        fuzzer.commit()
    fuzzer.rig.drain()
    scheduler, counts = fuzzer.rig.scheduler, fuzzer.rig.scheduler.counts
    assert scheduler.requests == {}
    assert fuzzer.rig.cache.pool.num_held == 0
    assert counts.preempted > 100
    assert counts.displaced > 10
    assert counts.restored_tokens > 100
    assert fuzzer.rig.cache.num_holes == 0
    assert fuzzer.rig.cache.num_evicted > 500
    assert min(fuzzer.ends[each] for each in FinishReason if each is not FinishReason.ABORT) > 0


@pytest.mark.parametrize("num_requests", [25_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_short_requests_leave_nothing_behind(num_requests: int) -> None:
    rig = Rig(256, num_slots=512, max_num_seqs=256, max_num_batched_tokens=4096)
    params, rng = SamplingParams(max_tokens=1), Random(5)
    sizes = []
    for number in range(num_requests):
        rig.add(str(number), [rng.randrange(1, 50) for _ in range(5)], params)
        if number % 7 == 0:
            rig.scheduler.abort(("ingress", str(number)))
        if number % 250 == 249:
            while rig.step() is not None:
                pass
            rig.output.clear()
            rig.finished.clear()
            rig.cache.drain_events()
            assert rig.tiers is not None
            rig.tiers.host.drain_events()
        if number % (num_requests // 5) == num_requests // 5 - 1:
            gc.collect()
            sizes.append((len(gc.get_objects()), sys.getallocatedblocks(), _resident_bytes()))
    rig.scheduler.check_integrity()
    assert rig.cache.pool.num_held == 0
    # The first fills the caches.
    assert max(objects for objects, _, _ in sizes[1:]) < sizes[0][0] + 1000
    # Bytes and numbers as well, of which the garbage collector knows nothing.
    assert max(blocks for _, blocks, _ in sizes[1:]) < sizes[0][1] + 2000
    assert sizes[-1][2] - sizes[0][2] < 4 << 20


def _resident_bytes() -> int:
    """Now; the most so far depends on when memory was last given back."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
