"""Requests that wait for a prefix which another is computing."""

from configs.engine import SchedulerConfig
from engine.wire import SamplingParams, ServiceClass
from tests.engine.rig import BLOCK, Rig, lengths, reference_output

SHARED = list(range(1, 3 * BLOCK + 1))


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens)


def test_a_prefix_asked_for_by_many_at_once_is_computed_once() -> None:
    rig = Rig(64)
    prompts = {f"{number}": [*SHARED, 20 + number, 30] for number in range(4)}
    requests = [rig.add(name, prompt, sampling(3)) for name, prompt in prompts.items()]
    rig.add("other", [40, 41, 42], sampling(3))
    steps = []
    while (plan := rig.step()) is not None:
        steps.append(lengths(plan))
    # The first one whole, and who shares nothing; then what the others have of their own.
    assert steps[0] == [len(SHARED) + 2, 3]
    assert sorted(steps[1]) == [1, 1, 2, 2, 2]
    assert [request.cached_tokens for request in requests] == [0, *[len(SHARED)] * 3]
    for name, prompt in prompts.items():
        assert rig.output["ingress", name] == reference_output(prompt, sampling(3))


def test_a_follower_goes_on_where_the_two_part() -> None:
    rig = Rig(64, max_num_batched_tokens=BLOCK, long_prefill_threshold=BLOCK)
    rig.add("leader", [*SHARED, *range(30, 30 + 4 * BLOCK)], sampling(1))
    follower = rig.add("follower", [*SHARED, 29], sampling(1), now=1.0)
    while follower.cached_tokens is None:
        assert rig.step() is not None
    assert follower.cached_tokens == len(SHARED)
    rig.drain()


def test_nobody_waits_for_a_leader_that_has_gone() -> None:
    rig = Rig(64, max_num_batched_tokens=2 * BLOCK)
    leader = rig.add("leader", [*SHARED, 20], sampling(1))
    follower = rig.add("follower", [*SHARED, 21], sampling(1))
    rig.step()
    assert follower.run_id is None
    rig.scheduler.abort(leader.key)
    plan = rig.step()
    assert plan is not None
    # What the leader had published by then is not lost.
    assert follower.cached_tokens == 2 * BLOCK
    assert lengths(plan) == [BLOCK + 1]


def test_the_stronger_waits_for_no_weaker_one() -> None:
    rig = Rig(64, max_num_batched_tokens=BLOCK)
    rig.add("batch", [*SHARED, 20], sampling(1), service_class=ServiceClass.BATCH)
    rig.step()
    strong = rig.add("strong", [*SHARED, 21], sampling(1), service_class=ServiceClass.INTERACTIVE)
    rig.scheduler.config = SchedulerConfig(max_num_batched_tokens=64)
    rig.step()
    assert strong.cached_tokens == BLOCK
