"""One decision, and sequences of them whatever they are given."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.policy import (
    MAX_STEP_S,
    Decision,
    Fleet,
    Load,
    Sample,
    State,
    Thresholds,
    decide,
)

DEFAULTS = Thresholds()
MOST = 40
IDLE = Sample(ready=1.0, prefill_tokens_per_s=1000.0)


def busy(queued: float, *, tokens: float = 0.0, used: float = 1.0) -> Sample:
    return dataclasses.replace(IDLE, queued_requests=queued, queued_tokens=tokens, utilisation=used)


class Course:
    """Decisions one after the other, at equal steps; each is carried out at once."""

    step_s = 0.1

    def __init__(self, target: int, thresholds: Thresholds = DEFAULTS) -> None:
        self.target = target
        self.thresholds = thresholds
        self.state = State()
        self.now = 5000.0

    def run(self, samples: list[Sample], seconds: float, running: int | None = None) -> Decision:
        """The last decision; samples stay as they are, and stop at the first change."""
        before = self.target
        for _ in range(round(seconds / self.step_s)):
            self.now += self.step_s
            num_running = len(samples) if running is None else running
            fleet = Fleet(self.target, num_running, 1, MOST)
            decision, self.state = decide(samples, self.thresholds, fleet, self.state, self.now)
            self.target = decision.desired
            if self.target != before:
                break
        return decision


# ------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("queued", "tokens", "num_engines", "desired", "cause"),
    [
        (4, 0, 1, 1, "kept"),  # At the threshold, not above it.
        (5, 0, 1, 2, "queue"),
        (100, 0, 1, 2, "queue"),  # At most double.
        (5, 0, 4, 5, "queue"),  # 20 requests: enough for 5 with 4 each.
        (7, 0, 4, 7, "queue"),
        (9, 0, 4, 8, "queue"),
        (0, 5000, 2, 2, "kept"),  # 5 s at 1,000 tokens/s.
        (0, 6000, 2, 3, "backlog"),
        (3, 9000, 2, 4, "backlog"),
        (5, 1000, 4, 5, "queue"),
    ],
)
def test_as_many_as_bring_queue_and_backlog_under_the_thresholds(
    queued: int, tokens: int, num_engines: int, desired: int, cause: str
) -> None:
    course = Course(num_engines)
    course.run([IDLE] * num_engines, 20)
    # Backlogs rise with the queue: what waits counts in requests, too.
    sample = busy(max(queued, 2 if tokens else 0), tokens=tokens)
    decision = course.run([sample] * num_engines, 3)
    assert (decision.desired, decision.cause) == (desired, cause)


def test_the_reason_says_the_figures() -> None:
    course = Course(2)
    course.run([IDLE] * 2, 20)
    decision = course.run([busy(11, tokens=3000), busy(4, tokens=500)], 3)
    assert decision.reason == (
        "for each of 2 engines 7.5 requests, 1.8 s of work wait; 4 and 5 s are allowed"
    )
    assert decision.numbers == Load(2, 15, 3500, 1000.0, 2.0)
    assert decision.numbers.backlog_s == 1.75


def test_a_threshold_must_stay_exceeded() -> None:
    course = Course(1, Thresholds(up_delay_s=3.0))
    for _ in range(10):
        assert course.run([busy(9)], 2.9).desired == 1
        course.run([busy(1)], 0.1)
    assert course.run([busy(9)], 3.2).desired == 2


def test_a_queue_that_does_not_rise_asks_for_one_at_a_time() -> None:
    course = Course(4)
    # The first thing a new controller sees: nothing says that it rises.
    assert course.run([busy(100)] * 4, 3).desired == 5


# ------------------------------------------------------------ cold starts


def test_engines_that_load_are_waited_for() -> None:
    course = Course(2)
    course.run([IDLE] * 2, 20)
    assert course.run([busy(10)] * 2, 3).desired == 4
    # They are running processes, whose engines say nothing, or that they are not ready.
    loading = [busy(40)] * 2 + [Sample(), dataclasses.replace(busy(99), ready=0.0)]
    decision = course.run(loading, 119)
    assert (decision.desired, decision.reason) == (4, "2 more are on their way")
    assert decision.numbers.queued_requests == 80
    assert course.run(loading, 2).desired == 5


def test_those_on_their_way_may_be_enough() -> None:
    course = Course(2)
    course.run([IDLE] * 2, 20)
    course.run([busy(10)] * 2, 3)
    decision = course.run([busy(8)] * 2, 1000)
    assert (decision.desired, decision.reason) == (
        4,
        "2 more are on their way and will be enough",
    )


def test_a_rate_that_is_not_measured_yet_counts_for_nothing() -> None:
    fresh = dataclasses.replace(IDLE, prefill_tokens_per_s=0.0)
    assert Load.of([busy(1, tokens=6000), fresh]).backlog_s == 3.0
    assert Load.of([dataclasses.replace(fresh, queued_tokens=1e9)]).backlog_s == 0.0


def test_no_engine_is_used_more_than_wholly() -> None:
    assert Load.of([busy(0, used=7.0), busy(0, used=0.5)]).utilisation == 1.5


def test_fresh_engines_are_given_time_to_fill() -> None:
    course = Course(1)
    course.run([IDLE], 20)
    assert course.run([busy(60)], 3).desired == 2
    course.run([busy(60)], 30)
    half = [busy(60), busy(0, used=0.2)]
    decision = course.run(half, 29)
    assert (decision.desired, decision.reason) == (2, "the last ones have only just become ready")
    assert course.run(half, 3).desired == 3


def test_a_queue_that_falls_fast_enough_is_left_to_fall() -> None:
    """Two engines have come after 30 s, in which the queue rose; now it falls."""
    for fall, desired in ((1.2, 2), (0.2, 3)):
        course = Course(1)
        course.run([IDLE], 20)
        assert course.run([busy(9)], 3).desired == 2
        queued = 10.0
        for _ in range(30):
            queued += 1
            course.run([busy(queued)], 1)
        queued /= 2
        for _ in range(20):
            queued -= fall / 2
            decision = course.run([busy(queued)] * 2, 1)
        assert decision.desired == desired


def test_the_first_engines_ever_are_not_waited_for() -> None:
    course = Course(1)
    course.run([Sample()], 60)
    course.run([IDLE], 0.5)
    assert course.run([busy(9)], 1.5).desired == 2


def test_after_a_growth_the_up_delay_counts_afresh() -> None:
    course = Course(1, Thresholds(up_delay_s=30.0))
    course.run([IDLE], 20)
    assert course.run([busy(20)], 31).desired == 2
    course.run([busy(20)], 2)
    assert course.run([busy(20)] * 2, 27).desired == 2
    assert course.run([busy(20)] * 2, 3).desired == 3


def test_however_late_engines_come_those_after_are_expected_within_warmup_s() -> None:
    course = Course(1)
    course.run([IDLE], 20)
    course.run([busy(9)], 3)
    course.run([busy(8)], 1000)
    course.run([busy(1)] * 2, 1)
    assert course.state.start_s == 120.0


def test_an_engine_that_restarts_does_not_stand_in_the_way_of_others() -> None:
    course = Course(4)
    course.run([IDLE] * 4, 200)
    # One is gone for a while, long after the last growth.
    decision = course.run([busy(20)] * 3 + [Sample()], 3)
    assert decision.desired > 4


# ------------------------------------------------------------ removal


def test_no_removal_while_a_running_engine_is_silent() -> None:
    course = Course(3)
    assert course.run([IDLE] * 2, 600, running=3).desired == 3
    assert course.run([IDLE] * 2 + [Sample()], 600).desired == 3
    assert course.run([IDLE] * 3, 62).desired == 2


def test_replicas_that_cannot_be_placed_are_given_up() -> None:
    course = Course(4)
    assert course.run([IDLE] * 2, 62).desired == 3
    assert course.run([IDLE] * 2, 62).desired == 2


@pytest.mark.parametrize(
    ("sample", "desired"),
    [
        (busy(0, used=0.24), 1),
        (busy(0, used=0.26), 2),  # The other would be used 52%.
        (busy(0.9, used=0.1), 1),
        (busy(1.1, used=0.1), 2),  # More than half of 4 would wait at the other.
        (busy(0, tokens=1200, used=0.1), 1),
        (busy(0, tokens=1300, used=0.1), 2),
    ],
)
def test_a_removal_needs_short_queues_and_room(sample: Sample, desired: int) -> None:
    assert Course(2).run([sample] * 2, 62).desired == desired


def test_a_break_starts_the_clock_afresh() -> None:
    course = Course(2)
    course.run([IDLE] * 2, 59)
    course.run([busy(3)] * 2, 8)
    assert course.run([IDLE] * 2, 60).desired == 2
    assert course.run([IDLE] * 2, 30).desired == 1


def mistaken(course: Course) -> None:
    """A removal from two engines that are used a fifth each; then more is wanted."""
    assert course.run([busy(0, used=0.2)] * 2, 70).desired == 1
    assert course.run([busy(0, used=0.4)], 20).desired == 1
    assert course.run([busy(9)], 10).desired == 2
    course.run([busy(9)], 5)


def seconds_until_removal(course: Course, sample: Sample) -> float:
    start = course.now
    while course.target == 2 and course.now - start < 10_000:
        course.run([sample] * 2, 1)
    return course.now - start


def test_a_mistake_is_remembered_ever_longer() -> None:
    course = Course(2)
    course.step_s = 1.0
    waits_s = []
    for _ in range(6):
        mistaken(course)
        waits_s.append(seconds_until_removal(course, busy(0, used=0.2)))
        course.target, course.state = 2, dataclasses.replace(course.state, removal=None)
    # 6 delays of 60 s after the mistake, then the delay itself; doubled, to 64 at most.
    assert waits_s == pytest.approx([415, 775, 1495, 2935, 3895, 3895], abs=40)

    # After a long time without, it is one mistake again.
    course.run([busy(0, used=0.26)] * 2, 4000)
    mistaken(course)
    assert seconds_until_removal(course, busy(0, used=0.2)) == pytest.approx(415, abs=40)


def test_a_mistake_does_not_hold_what_less_load_does_not_need() -> None:
    course = Course(2)
    mistaken(course)
    # A quarter less than at the mistake; averages take seconds to come down.
    assert seconds_until_removal(course, busy(0, used=0.15)) < 100


def test_a_mistake_holds_no_more_engines_than_it_was_about() -> None:
    course = Course(2)
    mistaken(course)
    course.target = 4
    assert course.run([busy(0, used=0.1)] * 4, 75).desired == 3
    assert course.run([busy(0, used=0.13)] * 3, 65).desired == 2
    assert course.run([busy(0, used=0.2)] * 2, 120).desired == 2


def test_what_the_bounds_add_was_no_mistake() -> None:
    course = Course(2)
    course.run([IDLE] * 2, 62)
    assert course.target == 1
    _, state = decide([IDLE], DEFAULTS, Fleet(1, 1, 2, 4), course.state, course.now)
    assert (state.mistake, state.num_mistakes) == (None, 0)


def test_a_removal_that_stood_for_long_was_none() -> None:
    course = Course(2)
    course.run([busy(0, used=0.2)] * 2, 70)
    course.run([busy(0, used=0.4)], 200)
    course.run([busy(9)], 10)
    course.run([busy(9)], 5)
    assert seconds_until_removal(course, busy(0, used=0.2)) < 100


# ------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("target", "least", "most", "desired"),
    [(5, 1, 3, 3), (1, 2, 4, 2), (0, 0, 4, 0), (0, 1, 4, 1), (1, 0, 4, 1), (2, 0, 0, 0)],
)
def test_bounds(target: int, least: int, most: int, desired: int) -> None:
    fleet = Fleet(target, 0, least, most)
    decision, _ = decide([], DEFAULTS, fleet, State(), 1.0)
    assert decision.desired == desired
    assert decision.cause == ("kept" if target == desired else "bounds")


def test_a_model_at_its_most_is_left_there() -> None:
    course = Course(MOST)
    decision = course.run([busy(50)] * MOST, 30)
    assert (decision.desired, decision.cause) == (MOST, "kept")


def test_a_model_that_nobody_uses_keeps_one() -> None:
    assert Course(1).run([IDLE], 1000).desired == 1


# ------------------------------------------------------------ whatever it is given

amounts = st.floats(0.0, 1e6) | st.sampled_from([0.0, 1.0, 5.0, 1e12])
samples = st.builds(
    Sample,
    ready=st.sampled_from([0.0, 1.0, 1.0, 1.0]),
    queued_requests=amounts,
    queued_tokens=amounts,
    prefill_tokens_per_s=amounts | st.just(1e-300),
    utilisation=st.floats(0.0, 1.0),
)
thresholds = st.builds(
    Thresholds,
    up_queued_requests=st.floats(0.0, 100.0),
    up_backlog_s=st.floats(0.0, 100.0),
    up_delay_s=st.floats(0.0, 20.0),
    down_utilisation=st.floats(0.0, 1.0),
    down_delay_s=st.floats(0.0, 100.0),
    warmup_s=st.floats(0.0, 200.0),
)
steps_s = st.sampled_from([0.1, 1.0, 3.0, 60.0, -1.0, -1e9, 1e9, math.nan, math.inf, -math.inf])


@given(st.data())
def test_no_course_leaves_the_bounds_or_leaps(data: st.DataObject) -> None:
    least = data.draw(st.integers(0, 3))
    most = data.draw(st.integers(max(least, 1), 20))
    target = data.draw(st.integers(max(least, 1), most))
    state, now, given_thresholds = State(), 1000.0, data.draw(thresholds)
    for _ in range(data.draw(st.integers(1, 15))):
        reports = data.draw(st.lists(samples, max_size=target + 1))
        fleet = Fleet(target, len(reports), least, most)
        step_s = data.draw(steps_s)
        now = now + step_s if math.isfinite(now) else 1000.0
        if data.draw(st.integers(0, 9)) == 0:
            given_thresholds = data.draw(thresholds)
        before = state
        decision, state = decide(reports, given_thresholds, fleet, before, now)
        desired = decision.desired
        assert max(1, least) <= desired <= most
        assert target - 1 <= desired <= 2 * target
        assert decision.reason
        num_ready = sum(report.ready >= 0.5 for report in reports)
        waited_s = state.clock_s - before.grown_at_s
        if num_ready < target and waited_s < given_thresholds.warmup_s:
            assert desired <= target
        if num_ready == 0:
            assert desired == target
        assert 0.0 <= state.clock_s - before.clock_s <= MAX_STEP_S
        target = desired


@given(
    reports=st.lists(samples, min_size=1, max_size=6),
    more=st.integers(1, 1000),
    seconds=st.sampled_from([0.5, 2.0, 20.0]),
)
def test_more_work_never_means_fewer_engines(
    reports: list[Sample], more: int, seconds: float
) -> None:
    whole = [
        dataclasses.replace(s, queued_requests=float(round(s.queued_requests))) for s in reports
    ]
    course = Course(len(whole))
    course.step_s = 0.5
    course.run(whole, seconds)
    fleet = Fleet(course.target, len(whole), 1, MOST)
    worse = [dataclasses.replace(s, queued_requests=s.queued_requests + more) for s in whole]
    decisions = [
        decide(each, DEFAULTS, fleet, course.state, course.now + 0.1)[0].desired
        for each in (whole, worse)
    ]
    assert decisions[0] <= decisions[1]


@given(sample=samples, limits=thresholds, factor=st.floats(1.0, 10.0))
def test_lower_thresholds_never_need_fewer(
    sample: Sample, limits: Thresholds, factor: float
) -> None:
    load = Load.of([sample])
    higher = dataclasses.replace(
        limits,
        up_queued_requests=limits.up_queued_requests * factor,
        up_backlog_s=limits.up_backlog_s * factor,
    )
    assert load.needed(higher) <= load.needed(limits)


@pytest.mark.parametrize("jump_s", [-1e9, -60.0, 3600.0, 1e9])
def test_time_that_jumps_moves_nothing(jump_s: float) -> None:
    course = Course(2, Thresholds(up_delay_s=10.0))
    course.run([IDLE] * 2, 30)
    course.now += jump_s
    assert course.run([IDLE] * 2, 20).desired == 2
    course.run([busy(9)] * 2, 2)
    course.now += jump_s
    assert course.run([busy(9)] * 2, 2).desired == 2
    # Jumps or not, what holds on is acted on.
    assert course.run([busy(9)] * 2, 10).desired > 2
