"""Classes of service: who starts first, who makes room, and that nobody starves."""

import pytest

from engine.request import RequestState
from engine.wire import FinishReason, SamplingParams, ServiceClass
from tests.engine.rig import Rig, lengths, reference_output

INTERACTIVE, STANDARD, BATCH = ServiceClass


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens)


def order_of_starts(rig: Rig, requests: list[RequestState]) -> list[str]:
    started: list[str] = []
    while rig.scheduler.requests:
        rig.step()
        for request in requests:
            name = request.key[1]
            if rig.output[request.key] and name not in started:
                started.append(name)
    return started


def test_the_stronger_start_first_and_every_fourth_start_goes_by_deadline() -> None:
    rig = Rig(64, max_num_seqs=1, batch_ttft_s=5.0)
    requests = [
        rig.add(f"b{number}", [number + 1], params(1), service_class=BATCH, now=0.0)
        for number in range(2)
    ]
    requests += [
        rig.add(f"i{number}", [number + 9], params(1), service_class=INTERACTIVE, now=10.0)
        for number in range(8)
    ]
    started = order_of_starts(rig, requests)
    assert started == ["i0", "i1", "i2", "b0", "i3", "i4", "i5", "b1", "i6", "i7"]


def test_those_whose_deadline_is_far_do_not_get_that_start() -> None:
    rig = Rig(64, max_num_seqs=1)
    requests = [rig.add("b", [1], params(1), service_class=BATCH)]
    requests += [
        rig.add(f"i{number}", [number + 9], params(1), service_class=INTERACTIVE)
        for number in range(6)
    ]
    assert order_of_starts(rig, requests)[-1] == "b"


def test_within_a_class_the_first_to_come_is_the_first_to_start() -> None:
    rig = Rig(64, max_num_seqs=1)
    requests = [rig.add(str(n), [n + 1], params(1), now=float(n)) for n in range(5)]
    assert order_of_starts(rig, requests) == ["0", "1", "2", "3", "4"]


def test_a_stronger_class_takes_the_place_of_a_weaker_one() -> None:
    rig = Rig(64, max_num_seqs=2)
    weak = [
        rig.add(name, [number + 1] * 5, params(12), service_class=BATCH)
        for number, name in enumerate("ab")
    ]
    rig.step()
    strong = rig.add("c", [9] * 5, params(3), service_class=INTERACTIVE)
    rig.step()
    assert len(rig.output[strong.key]) == 1
    assert [request.num_displaced for request in weak] == [0, 1]
    rig.drain()
    for number, request in enumerate(weak):
        assert rig.output[request.key] == reference_output([number + 1] * 5, params(12))


def test_a_place_that_is_taken_goes_to_the_strongest_whoever_has_the_turn() -> None:
    rig = Rig(64, max_num_seqs=1, batch_ttft_s=0.1)
    for name, max_tokens in (("first", 1), ("second", 1), ("runs", 9)):
        runs = rig.add(name, [1, 2, 3], params(max_tokens))
        rig.step()
    due = rig.add("due", [8] * 5, params(1), service_class=BATCH)
    strong = rig.add("strong", [9] * 5, params(2), service_class=INTERACTIVE, now=1.0)
    rig.step()
    assert runs.num_displaced == 1
    assert (len(rig.output[strong.key]), len(rig.output[due.key])) == (1, 0)


def test_one_of_the_same_class_takes_nobodys_place() -> None:
    rig = Rig(64, max_num_seqs=1)
    first = rig.add("first", [1] * 5, params(9))
    rig.step()
    rig.add("second", [2] * 5, params(9))
    rig.drain()
    assert first.num_displaced == first.num_preemptions == 0


def test_nobody_is_displaced_for_ever() -> None:
    rig = Rig(64, max_num_seqs=1, batch_ttft_s=0.5)
    weak = rig.add("weak", [1] * 5, params(20), service_class=BATCH)
    rig.step()
    for number in range(40):
        rig.add(f"i{number}", [number + 2], params(2), service_class=INTERACTIVE)
        rig.step()
    rig.drain()
    assert weak.num_displaced == 3
    assert rig.output[weak.key] == reference_output([1] * 5, params(20))


@pytest.mark.parametrize(("service_class", "chunk"), [(INTERACTIVE, 20), (STANDARD, 147)])
def test_prompts_get_no_more_of_a_step_than_an_interactive_stream_bears(
    service_class: ServiceClass, chunk: int
) -> None:
    rig = Rig(64, interactive_tpot_s=0.2)
    rig.add("stream", [1, 2, 3], params(9), service_class=service_class)
    rig.step()
    rig.add("long", list(range(1, 50)) * 3, params(1), service_class=BATCH)
    plan = rig.scheduler.schedule(prefill_tokens_per_s=100.0)
    assert plan is not None
    assert lengths(plan) == [1, chunk]


def test_who_has_waited_too_long_is_told_so_unless_it_is_batch_work_or_has_begun() -> None:
    rig = Rig(64, max_num_seqs=1, queue_timeout_s=5.0)
    runs = rig.add("runs", [1], params(3), service_class=STANDARD, now=0.0)
    rig.step()
    for name, service_class, now in (
        ("late", STANDARD, 1.0),
        ("batch", BATCH, 1.0),
        ("in time", INTERACTIVE, 4.0),
    ):
        rig.add(name, [2], params(1), service_class=service_class, now=now)
    rig.scheduler.abort(runs.key)
    preempted = rig.add("preempted", [3] * 5, params(3), service_class=STANDARD, now=0.0)
    preempted.cached_tokens = 0  # As one that has run.
    assert rig.scheduler.expire(now=5.9) == []
    (output,) = rig.scheduler.expire(now=6.1)
    request, item = output
    assert request.key[1] == "late"
    assert item.finish is not None
    assert item.finish.reason is FinishReason.QUEUE_TIMEOUT
    assert "for 5 s" in item.finish.message
    assert rig.scheduler.counts.timed_out == 1
    rig.scheduler.check_integrity()
    rig.drain()
    assert [len(rig.output["ingress", name]) for name in ("late", "batch", "in time")] == [0, 1, 1]


def test_the_time_in_the_queue_is_counted_once_by_class() -> None:
    rig = Rig(64, max_num_seqs=1)
    rig.add("first", [1], params(1), service_class=BATCH, now=10.0)
    rig.add("second", [2], params(1), service_class=BATCH, now=11.0)
    for now in (12.0, 15.0):
        plan = rig.scheduler.schedule(now)
        assert plan is not None
        rig.take(rig.scheduler.commit(rig.executor.execute(plan)))
    counts = rig.scheduler.counts
    assert (counts.started[BATCH], counts.queued_s[BATCH]) == (2, 6.0)
    assert (counts.started[INTERACTIVE], counts.queued_s[INTERACTIVE]) == (0, 0.0)
