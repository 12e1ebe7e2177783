"""Requests of one session meet on one replica, while that is as good as any."""

from collections import Counter
from dataclasses import replace

import pytest

from cluster.routing.decision import Reason, RouteRequest
from tests.cluster.routing.rig import chain, hold, report, request, router


def of_session(name: str, number: int, num_blocks: int = 20) -> RouteRequest:
    """Every one with another prompt."""
    return replace(request(number, chain((name, number), num_blocks)), session=name.encode())


def test_cold_prompts_of_a_session_go_to_one_replica_and_sessions_spread() -> None:
    made = router(8)
    where: dict[str, set[str]] = {}
    for session in range(400):
        name = f"session {session}"
        decisions = [made.route(of_session(name, number)) for number in range(5)]
        assert {each.reason for each in decisions} == {Reason.COLD}
        where[name] = {each.replica_id for each in decisions}
    assert {len(replicas) for replicas in where.values()} == {1}
    counts = Counter(min(replicas) for replicas in where.values())
    # Chi-square with 7 degrees of freedom: 24.3 is the 99.9th percentile.
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 24.3


def test_a_session_leaves_its_replica_while_that_has_too_much_to_do() -> None:
    made = router(4)
    usual = made.route(of_session("s", 0)).replica_id
    made.on_load(usual, report(waiting=9, waiting_tokens=3000))
    elsewhere = {made.route(of_session("s", number)).replica_id for number in range(20)}
    assert len(elsewhere) == 1, "and has one second choice"
    assert usual not in elsewhere
    decision = made.route(of_session("s", 1))
    assert decision.reason is Reason.COLD_OVERFLOW
    made.on_load(usual, report())
    assert made.route(of_session("s", 2)).replica_id == usual


def test_among_equal_holders_of_a_prefix_the_session_decides() -> None:
    made, prefix = router(4), chain("system", 31)
    for name in ("r0", "r1", "r3"):
        hold(made, name, prefix)
    where = {
        session: {
            made.route(
                replace(request(number, chain(number, 33, prefix)), session=session)
            ).replica_id
            for number in range(10)
        }
        for session in (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h")
    }
    assert {len(replicas) for replicas in where.values()} == {1}
    assert set().union(*where.values()) == {"r0", "r1", "r3"}


def test_what_is_cached_counts_more_than_the_session() -> None:
    made = router(4)
    usual = made.route(of_session("s", 0)).replica_id
    other = next(name for name in ("r0", "r1") if name != usual)
    held = of_session("s", 7, num_blocks=60)
    hold(made, other, list(held.keys))
    assert made.route(held).replica_id == other


@pytest.mark.parametrize("policy", ["prefix", "least_backlog"])
def test_requests_without_a_session_go_where_they_went(policy: str) -> None:
    """And one with a prompt too short to cache has a session all the same."""
    made = router(4, policy=policy)
    short = [request(number, [], extra_tokens=9) for number in range(200)]
    assert len({made.route(each).replica_id for each in short}) == 4
    assert len({made.route(replace(each, session=b"s")).replica_id for each in short}) == 1
    long = [request(number, chain(number, 8)) for number in range(200)]
    assert len({made.route(each).replica_id for each in long}) == 4
