"""What operators see: how soon engines come, how many, when they go, and that they stay put."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.policy import State, Thresholds
from tests.autoscaler.simulation import Change, Simulation

COARSE_S = 0.5
"""A step for long courses."""


def counts(simulation: Simulation) -> list[int]:
    return [change.after for change in simulation.changes]


def wrong_removals(changes: list[Change], within_s: float) -> list[float]:
    """When a removal was taken back."""
    return [
        up.at_s
        for down, up in pairwise(changes)
        if down.after < down.before and up.after > up.before and up.at_s - down.at_s < within_s
    ]


# ------------------------------------------------------------ more


@pytest.mark.parametrize("seed", range(5))
def test_overload_is_answered_within_seconds_of_the_crossing(seed: int) -> None:
    simulation = Simulation(seed=seed).run(60, rate=0.4)
    simulation.run(60, rate=4.0, until=lambda s: s.num_waiting > 4)
    crossed_at_s = simulation.now_s
    simulation.run(10, rate=4.0, until=lambda s: bool(s.changes))
    assert simulation.changes[0].before == 1
    assert simulation.changes[0].after == 2
    assert 0.8 <= simulation.changes[0].at_s - crossed_at_s <= 2.0


def test_a_burst_at_once_is_answered_within_seconds() -> None:
    simulation = Simulation(num_engines=2).run(60, rate=0.4)
    for _ in range(60):
        simulation.arrive()
    simulation.run(5)
    assert counts(simulation) == [4]
    assert simulation.changes[0].at_s - 60 <= 2.0
    assert simulation.changes[0].reason.startswith("for each of 2 engines 2")


def test_a_short_peak_asks_for_none() -> None:
    simulation = Simulation().run(10)
    for _ in range(13):
        simulation.arrive(service_s=20.0)
    simulation.run(0.9)
    assert simulation.num_waiting == 5
    # Their clients leave.
    simulation.engines[0].waiting.clear()
    assert not simulation.run(30).changes


# ------------------------------------------------------------ but not too many


def test_a_cold_start_brings_what_the_burst_needs_and_no_more() -> None:
    simulation = Simulation(num_engines=1, cold_start_s=30.0).run(30, rate=0.2)
    for _ in range(20):
        simulation.arrive()
    simulation.run(300, rate=0.2)
    assert counts(simulation) == [2, 1]


@pytest.mark.parametrize("needed", [2, 3, 5, 7])
def test_nothing_more_is_asked_for_while_engines_load(needed: int) -> None:
    simulation = Simulation(cold_start_s=30.0, most=40, step_s=0.25).run(60, rate=0.4)
    simulation.run(600, rate=needed - 0.5)
    growths = simulation.changes
    assert all(change.after > change.before for change in growths)
    assert all(change.after <= 2 * change.before for change in growths)
    waits_s = [b.at_s - a.at_s for a, b in pairwise(growths)]
    assert min(waits_s, default=math.inf) > 30.0
    assert needed <= simulation.target <= 2 * needed
    assert simulation.num_waiting < 4 * simulation.target


def test_a_backlog_that_shrinks_fast_enough_asks_for_none() -> None:
    """What gathers while the second engine loads has gone when a third would be ready."""
    simulation = Simulation().run(10)
    while len(simulation.ready) < 2:
        simulation.arrive(service_s=8.0)
        simulation.arrive(service_s=8.0)
        simulation.run(1)
    assert simulation.num_waiting > 8 * len(simulation.ready)
    simulation.run(60)
    assert counts(simulation) == [2]
    assert simulation.num_waiting == 0


def test_engines_that_never_come_are_asked_for_once_in_warmup_s() -> None:
    simulation = Simulation(cold_start_s=math.inf, most=16).run(10, rate=0.4)
    simulation.run(280, rate=3.0)
    assert counts(simulation) == [2, 4, 8]
    waits_s = [b.at_s - a.at_s for a, b in pairwise(simulation.changes)]
    assert waits_s == pytest.approx([120.0, 120.0], abs=0.2)


# ------------------------------------------------------------ and fewer again


def test_after_the_burst_one_engine_goes_every_down_delay() -> None:
    simulation = Simulation(num_engines=4).run(400)
    assert counts(simulation) == [3, 2, 1]
    assert [change.at_s for change in simulation.changes] == pytest.approx([60, 120, 180], abs=1)
    assert simulation.changes[0].reason == (
        "hardly anything waits, and the load is 0% of each of 3, below 50% for 60 s"
    )


def test_one_long_stream_holds_no_more_than_one_engine() -> None:
    simulation = Simulation(num_engines=4)
    simulation.arrive(service_s=1e6)
    simulation.run(250)
    assert counts(simulation) == [3, 2, 1]


def test_streams_that_ended_hold_none() -> None:
    simulation = Simulation(num_engines=4)
    for _ in range(32):
        simulation.arrive(service_s=100.0)
    simulation.run(100)
    assert not simulation.changes
    simulation.run(200)
    assert counts(simulation) == [3, 2, 1]
    # The averages have to come down first, for seconds.
    assert 0.8 <= simulation.changes[0].at_s <= 175


def test_work_that_the_others_could_not_take_over_keeps_an_engine() -> None:
    simulation = Simulation(num_engines=2)
    for _ in range(9):
        simulation.arrive(service_s=1e6)
    simulation.run(600)
    assert not simulation.changes


# ------------------------------------------------------------ and steadily


@settings(max_examples=12)
@given(
    rate=st.floats(0.02, 10.0),
    num_engines=st.integers(1, 12),
    seed=st.integers(0, 999),
    kind=st.sampled_from([(8, 8.0), (4, 1.0), (32, 10.0)]),
)
def test_steady_load_settles(
    rate: float, num_engines: int, seed: int, kind: tuple[int, float]
) -> None:
    slots, service_s = kind
    simulation = Simulation(num_engines, seed, slots=slots, service_s=service_s, step_s=COARSE_S)
    rate *= slots / service_s
    simulation.run(600, rate)
    settled = len(simulation.changes)
    simulation.run(300, rate)
    later = simulation.changes[settled:]
    assert len(wrong_removals(later, 300)) <= 1
    directions = [change.after > change.before for change in later]
    assert sum(a != b for a, b in pairwise(directions)) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_a_mistake_is_not_repeated_soon(seed: int) -> None:
    """Thresholds that invite mistakes: removals at loads that the others can hardly bear."""
    invites = Thresholds(up_queued_requests=1.0, down_utilisation=0.95)
    simulation = Simulation(2, seed, thresholds=invites, step_s=COARSE_S)
    simulation.run(3600, rate=0.85)
    mistakes_s = wrong_removals(simulation.changes, 180)
    assert mistakes_s
    waits_s = [b - a for a, b in pairwise(mistakes_s)]
    assert min(waits_s, default=math.inf) > 300
    assert len(mistakes_s) <= 6


def test_bursts_that_come_again_and_again_keep_their_engine() -> None:
    simulation = Simulation(cold_start_s=10.0, step_s=COARSE_S)
    for _ in range(30):
        for _ in range(20):
            simulation.arrive(service_s=8.0)
        simulation.run(120)
    # Without a memory it would go and come back thirty times.
    assert 3 <= len(simulation.changes) <= 10


# ------------------------------------------------------------ whatever happens


def test_changed_thresholds_take_effect_at_once() -> None:
    simulation = Simulation(thresholds=Thresholds(up_queued_requests=1000.0, up_backlog_s=1000.0))
    simulation.run(60, rate=2.0)
    assert not simulation.changes
    simulation.set(up_queued_requests=4.0)
    simulation.run(2)
    assert counts(simulation) == [2]

    simulation = Simulation(num_engines=3, thresholds=Thresholds(down_delay_s=3600.0)).run(120)
    assert not simulation.changes
    simulation.set(down_delay_s=30.0)
    simulation.run(1)
    assert counts(simulation) == [2]
    simulation.run(31)
    assert counts(simulation) == [2, 1]


@pytest.mark.parametrize("rate", [0.4, 1.6, 3.5])
def test_controllers_that_restart_do_no_harm(rate: float) -> None:
    undisturbed = Simulation(step_s=COARSE_S).run(60, rate=0.4).run(400, rate)
    simulation = Simulation(step_s=COARSE_S).run(60, rate=0.4)
    for _ in range(20):
        simulation.state = State()
        simulation.run(20, rate)
    assert max(counts(simulation), default=1) <= 2 * max(counts(undisturbed), default=1)
    assert all(change.after > change.before for change in simulation.changes)
    starts_s = [change.at_s for change in simulation.changes]
    assert all(b - a > 30 for a, b in pairwise(starts_s))


def test_every_change_says_why() -> None:
    simulation = Simulation(seed=1).run(60, rate=0.4).run(120, rate=3.0).run(300)
    assert simulation.changes
    assert all(any(map(str.isdigit, change.reason)) for change in simulation.changes)
    assert all(decision.reason for _, decision in simulation.decisions)
