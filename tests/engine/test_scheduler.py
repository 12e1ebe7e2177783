"""The scheduler: examples of each rule, then a state machine against the simulated executor."""

from array import array
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.keys import key_root
from cache.wheel import Retention
from configs.engine import SchedulerConfig
from engine.errors import RequestRejected
from engine.plan import StepPlan, StepResult
from engine.request import RequestKey
from engine.wire import FinishReason, RejectCode, SamplingParams, ServiceClass
from tests.engine.rig import Rig, lengths, reference_output


def sampling(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, min_tokens=max_tokens)


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_on_beside_it() -> None:
    rig = Rig(64, max_num_batched_tokens=10, long_prefill_threshold=8)
    rig.add("short", [1, 2, 3], sampling(6))
    rig.add("long", list(range(1, 31)), sampling(2))
    steps = []
    while (plan := rig.step()) is not None:
        steps.append(lengths(plan))
    assert steps[0] == [3, 7]
    assert steps[1] == [1, 8]
    assert all(sum(step) <= 10 for step in steps)
    assert rig.output["ingress", "long"] == reference_output(range(1, 31), sampling(2))


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    rig = Rig(16)
    prompt = list(range(1, 9))
    rig.add("first", prompt, sampling(1))
    rig.drain()
    request = rig.add("second", prompt, sampling(1))
    plan = rig.step()
    assert plan is not None
    assert plan.slices[0].length == 1
    assert request.cached_tokens == 7
    assert rig.output["ingress", "first"] == rig.output["ingress", "second"]


def test_the_beginning_of_a_block_is_copied_from_its_nearest_sibling() -> None:
    rig = Rig(16)
    for name, prompt in {"far": [1, 2, 3, 4, 5, 9, 9, 9], "near": [1, 2, 3, 4, 5, 6, 9, 9]}.items():
        rig.add(name, prompt, sampling(1))
        rig.drain()
    (near,) = [
        block for (parent, tokens), block in _places(rig) if parent >= 0 and tokens[:2] == (5, 6)
    ]
    request = rig.add("new", [1, 2, 3, 4, 5, 6, 7, 8, 9], sampling(3))
    plan = rig.scheduler.schedule()
    assert plan is not None
    (copy,) = plan.copies
    assert copy == (near, plan.slices[0].new_block_ids[0])
    assert rig.cache.pool.references(near) == 1, "held while it is copied"
    assert (plan.slices[0].start, plan.slices[0].length) == (6, 3)
    rig.take(rig.scheduler.commit(rig.executor.execute(plan)))
    assert rig.cache.pool.references(near) == 0
    rig.drain()
    assert request.cached_tokens == 6
    expected = reference_output([1, 2, 3, 4, 5, 6, 7, 8, 9], sampling(3))
    assert rig.output["ingress", "new"] == expected
    assert rig.scheduler.counts.copied_tokens == 3


def test_another_domain_lends_nothing() -> None:
    rig = Rig(16)
    rig.add("one", [1, 2, 3, 4, 5, 6, 7, 8], sampling(1))
    rig.drain()
    info = rig.executor.info
    other = key_root(b"k" * 32, info.fingerprint, "tenant", info.block_size)
    request = rig.add("other", [1, 2, 3, 4, 5, 6, 7, 8], sampling(1), root=other)
    plan = rig.step()
    assert plan is not None
    assert plan.copies == ()
    assert request.cached_tokens == 0


@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [(Retention.LOW, Retention.NORMAL), (Retention.NORMAL, Retention.PINNED)],
)
def test_what_is_worth_more_stays_longer(weaker: Retention, stronger: Retention) -> None:
    """Three blocks each in a pool of eight: the next one of three makes one of them go."""
    rig = Rig(8)
    kept = rig.add("kept", [1] * 13, sampling(1), retention=stronger)
    rig.drain()
    gone = rig.add("gone", [2] * 13, sampling(1), retention=weaker)
    rig.drain()
    rig.add("newest", [3] * 13, sampling(1))
    rig.drain()
    assert rig.cache.match(kept.block_keys) == 3
    assert rig.cache.match(gone.block_keys) < 3


def _places(rig: Rig) -> list[tuple[tuple[int, tuple[int, ...]], int]]:
    assert rig.cache._siblings is not None
    return [
        ((parent if isinstance(parent, int) else -1, tuple(array("i", tokens))), block)
        for parent, tokens, block in rig.cache._siblings.entries()
    ]


def test_without_reuse_nothing_is_shared() -> None:
    rig = Rig(16, reuse=False)
    for name in ("first", "second"):
        rig.add(name, list(range(1, 9)), sampling(1))
        rig.drain()
    assert rig.cache.drain_events() == []


def test_the_newest_is_preempted_and_comes_back_to_the_same_output() -> None:
    rig = Rig(6)
    prompts = {"old": [1, 2, 3, 4, 5, 6], "new": [7, 8, 9, 10, 11, 12]}
    for name, prompt in prompts.items():
        rig.add(name, prompt, sampling(12))
    rig.drain()
    assert rig.scheduler.counts.preempted > 0
    assert rig.scheduler.requests == {}
    for name, prompt in prompts.items():
        assert rig.output["ingress", name] == reference_output(prompt, sampling(12))
    assert rig.cache.num_available == 6


def test_the_lower_class_is_preempted_before_the_newer_request() -> None:
    rig = Rig(6)
    low = rig.add("low", [1, 2, 3, 4, 5, 6], sampling(12), priority=1)
    high = rig.add("high", [7, 8, 9, 10, 11, 12], sampling(12))
    rig.drain()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0


def test_a_victim_planned_in_the_same_step_gives_its_budget_back() -> None:
    rig = Rig(7, max_num_batched_tokens=9, long_prefill_threshold=6)
    low = rig.add("low", list(range(1, 11)), sampling(9), priority=1)
    rig.step()
    high = rig.add("high", list(range(11, 25)), sampling(9))
    rig.step()
    third = rig.add("third", [30] * 6, sampling(2))
    rig.step()
    assert rig.cache.num_available == 0
    # 'low' decodes within its last block and is planned first; 'high' then needs one more block
    # and takes all the rest of the budget; 'third' can only run on what 'low' gives back.
    rig.scheduler.config = SchedulerConfig(max_num_batched_tokens=5)
    plan = rig.step()
    assert plan is not None
    assert low.run_id is None
    assert plan.decodes == ()
    assert [(item.run_id, item.length) for item in plan.slices] == [(high.run_id, 4), (3, 1)]
    assert third.num_computed_tokens == 5
    rig.drain()
    assert rig.output[low.key] == reference_output(range(1, 11), sampling(9))


def test_a_request_with_output_goes_on_where_it_was() -> None:
    prompt, params = [1, 2, 3], sampling(10)
    expected = reference_output(prompt, params)
    rig = Rig(16)
    rig.add("resumed", prompt, params, output=expected[:4])
    rig.drain()
    assert rig.output["ingress", "resumed"] == expected


def test_a_request_whose_output_is_complete_ends_at_once() -> None:
    rig = Rig(16)
    rig.add("full", [1, 2], sampling(2), output=[5, 6])
    assert rig.finished == {("ingress", "full"): FinishReason.LENGTH}
    assert rig.scheduler.requests == {}


def test_the_queue_is_bounded() -> None:
    rig = Rig(16, max_waiting=1)
    rig.add("one", [1], sampling(1))
    with pytest.raises(RequestRejected, match="1 requests are waiting") as caught:
        rig.add("two", [1], sampling(1))
    assert caught.value.code is RejectCode.OVERLOADED


def test_the_queue_is_bounded_in_tokens_too() -> None:
    rig = Rig(16, max_waiting_tokens=10)
    rig.add("alone, it may be longer", [1] * 20, sampling(1))
    with pytest.raises(RequestRejected, match="25 tokens would be waiting; 10 may") as caught:
        rig.add("two", [1] * 5, sampling(1))
    assert caught.value.code is RejectCode.OVERLOADED
    rig.step()
    rig.add("two", [1] * 5, sampling(1))


def test_an_abort_while_its_step_runs_frees_the_blocks_when_it_is_committed() -> None:
    rig = Rig(4)
    request = rig.add("gone", list(range(1, 9)), sampling(4))
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.scheduler.abort(request.key)
    assert rig.cache.num_available == 2
    rig.take(rig.scheduler.commit(rig.executor.execute(plan)))
    assert rig.cache.num_available == 4
    assert rig.output["ingress", "gone"] == []


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    rig = Rig(64, long_prefill_threshold=8, overlap=True)
    rig.add("one", list(range(1, 14)), sampling(4))
    plans = [rig.scheduler.schedule() for _ in range(3)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[2] is None, "one that runs, and the next"
    assert [(p.slices[0].start, p.slices[0].length) for p in plans[:2] if p] == [(0, 8), (8, 5)]
    rig.take(rig.scheduler.commit(rig.executor.execute(plans[0])))
    ahead = rig.scheduler.schedule()
    assert ahead is not None
    assert len(ahead.decodes) == 1, "of a token not drawn yet"


def test_a_short_prompt_waits_for_no_long_one() -> None:
    """Four long ones would fill every step for a long time; the short one is done in the next."""
    rig = Rig(400, max_num_batched_tokens=32, long_prefill_threshold=16)
    for number in range(4):
        rig.add(f"long {number}", [number + 1] * 200, sampling(1))
    rig.step()
    rig.step()
    short = rig.add("short", [9] * 14, sampling(1))
    rig.step()
    assert len(rig.output[short.key]) == 1


def test_each_step_has_half_for_the_short_ones_in_order_and_half_for_the_long_ones() -> None:
    rig = Rig(400, max_num_batched_tokens=32, long_prefill_threshold=16)
    long = [rig.add(f"long {number}", [number + 1] * 300, sampling(1)) for number in range(3)]
    rig.step()
    computed, done = [], []
    for number in range(20):
        rig.add(f"short {number}", [number + 5] * 12, sampling(1))
    for _ in range(14):
        rig.step()
        rig.scheduler.check_integrity()
        computed.append(sum(request.num_computed_tokens for request in long))
        done.append(sum(len(rig.output["ingress", f"short {n}"]) for n in range(20)))
    assert all(after - before == 16 for before, after in pairwise(computed)), "half a step"
    assert done == [16 * step // 12 for step in range(1, 15)], "and the other half"
    rig.drain()
    assert rig.finished.keys() == rig.output.keys()


def test_overlap_changes_no_token_and_takes_no_more_steps() -> None:
    steps, outputs = [], []
    for overlap in (False, True):
        rig = Rig(64, max_num_batched_tokens=16, overlap=overlap)
        for number in range(6):
            rig.add(str(number), [number + 1] * (3 * number + 2), sampling(10, seed=number))
        steps.append(rig.drain_overlapped())
        outputs.append(rig.output)
    assert outputs[0] == outputs[1]
    for number in range(6):
        expected = reference_output([number + 1] * (3 * number + 2), sampling(10, seed=number))
        assert outputs[0]["ingress", str(number)] == expected
    # Without, every other step of a request waits for the one before it.
    assert steps[1] < steps[0] * 0.7


def test_a_request_that_ends_is_dropped_from_the_step_that_was_planned_ahead() -> None:
    rig = Rig(64, overlap=True)
    params = SamplingParams(max_tokens=100, seed=0)
    prompt = next(
        [first, 2, 3]
        for first in range(1, 50)
        if 3 < len(reference_output([first, 2, 3], params)) < 100
    )
    rig.add("ends", prompt, params)
    rig.drain_overlapped()
    assert rig.finished == {("ingress", "ends"): FinishReason.STOP}
    assert rig.output["ingress", "ends"] == reference_output(prompt, params)
    assert rig.cache.pool.num_held == 0


def test_a_victim_that_is_always_in_flight_is_held_back_until_it_can_go() -> None:
    """Both decode; the old one needs a block when the new one has just been given the last."""
    rig = Rig(6, overlap=True)
    old = rig.add("old", [1] * 11, sampling(9))
    new = rig.add("new", [2] * 9, sampling(9))
    running = rig.scheduler.schedule()
    waited = 0
    while new.num_preemptions == 0:
        assert running is not None
        ahead = rig.scheduler.schedule()
        waited = waited + 1 if ahead is None or len(lengths(ahead)) < 2 else 0
        rig.take(rig.scheduler.commit(rig.executor.execute(running)))
        running = ahead or rig.scheduler.schedule()
        assert waited < 4, "the old one starves"
    while running is not None:
        rig.take(rig.scheduler.commit(rig.executor.execute(running)))
        running = rig.scheduler.schedule()
    assert old.num_preemptions == 0
    for request, prompt in ((old, [1] * 11), (new, [2] * 9)):
        assert rig.output[request.key] == reference_output(prompt, sampling(9))


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts, late commits, preemption, failures and lost ingresses, in a pool too small for
    what is asked. Every token that comes out must be the model's own."""

    LIMITS: ClassVar[dict[str, int]] = {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 5,
        "long_prefill_threshold": 7,
        "overlap": True,
    }

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(10, **self.LIMITS)
        self.expected: dict[RequestKey, list[int]] = {}
        self.flying: list[StepPlan] = []
        self.blocks: dict[int, set[int]] = {}
        """By plan: every block it reads or writes."""
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        resumed=st.floats(0, 1),
        priority=st.integers(-1, 1),
        service_class=st.sampled_from(ServiceClass),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        resumed: float,
        priority: int,
        service_class: ServiceClass,
    ) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=max_tokens, seed=self.count % 3)
        expected = reference_output(prompt, params)
        output = expected[: int(resumed * len(expected))] if resumed > 0.7 else []
        key = ("ingress", str(self.count))
        self.expected[key] = expected
        self.rig.add(key[1], prompt, params, output, priority, service_class=service_class)

    @precondition(lambda self: self.rig.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        keys = sorted(self.rig.scheduler.requests)
        key = data.draw(st.sampled_from(keys))
        self.rig.scheduler.abort(key)
        assert self.rig.scheduler.abort(key) is None

    @rule()
    def lose_the_ingress(self) -> None:
        if self.count % 7 == 0:
            for key in list(self.rig.scheduler.requests):
                self.rig.scheduler.abort(key)

    @rule()
    def plan(self) -> None:
        if len(self.flying) < 3 and (plan := self.rig.scheduler.schedule()) is not None:
            self.flying.append(plan)
            tables = self.rig.scheduler._in_flight[plan.step].tables
            self.blocks[plan.step] = {block for table in tables for block in table.block_ids}

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fails=st.booleans())
    def commit(self, data: st.DataObject, fails: bool) -> None:
        plan = self.flying.pop(0)
        result = self.rig.executor.execute(plan)
        run_ids = [*(item.run_id for item in plan.slices), *plan.decodes]
        if fails and run_ids and data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(run_ids))
            sampled = {run: item for run, item in result.sampled.items() if run != victim}
            result = StepResult(plan.step, sampled, failures={victim: "made to fail"})
        self.rig.take(self.rig.scheduler.commit(result))

    @rule()
    def step(self) -> None:
        if not self.flying:
            self.rig.step()

    @rule(overlap=st.booleans())
    def configure(self, overlap: bool) -> None:
        limits = {**self.LIMITS, "overlap": overlap}
        self.rig.scheduler.config = SchedulerConfig.model_validate(limits)

    @invariant()
    def every_token_is_the_models(self) -> None:
        self.rig.scheduler.check_integrity()
        for plan in self.flying:
            for block in self.blocks[plan.step]:
                assert self.rig.cache.pool.references(block) > 0, "in flight, yet not held"
        for key, output in self.rig.output.items():
            assert output == self.expected[key][: len(output)]
        for key, reason in self.rig.finished.items():
            if reason is not FinishReason.ERROR:
                assert self.rig.output[key] == self.expected[key]

    def teardown(self) -> None:
        while self.flying:
            plan = self.flying.pop(0)
            self.rig.take(self.rig.scheduler.commit(self.rig.executor.execute(plan)))
        self.rig.drain()
        self.every_token_is_the_models()
        assert self.rig.scheduler.requests == {}
        assert self.rig.cache.pool.num_held == 0


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
