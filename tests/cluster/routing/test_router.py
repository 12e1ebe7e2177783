"""Where requests go: to their prefix while that is sooner, apart while nobody has it."""

import gc
import sys
from collections import Counter

import pytest

from cache.events import Tier
from cluster.routing.decision import Decision, NoReplica, Reason, RouteRequest
from cluster.routing.router import Router
from configs.shoal import RouterConfig
from tests.cluster.routing.rig import BLOCK, INGRESS, chain, hold, report, request, router

SHARED = chain("system", 31)
"""A prefix of 496 tokens: half a second of prefill."""


def place(router: Router, requests: list[RouteRequest]) -> Counter[str]:
    return Counter(router.route(item).replica_id for item in requests)


# ------------------------------------------------------------------ affinity against load


def test_requests_follow_their_prefix_until_waiting_costs_more() -> None:
    made = router(2)
    hold(made, "r1", SHARED)
    for number in range(50):
        decision = made.route(request(number, chain(number, 33, SHARED)))
        assert (decision.replica_id, decision.reason) == ("r1", Reason.CACHED)
        assert decision.chosen.cached_tokens == 496
        assert decision.uncached_tokens == 2 * BLOCK + 5
        assert decision.chosen.saved_s == pytest.approx(0.496, rel=0.01)
    made.on_load("r1", report(waiting=3, waiting_tokens=300))
    assert made.route(request("x", chain("x", 33, SHARED))).replica_id == "r1"
    made.on_load("r1", report(waiting=6, waiting_tokens=700))
    decision = made.route(request("x", chain("x", 33, SHARED)))
    assert (decision.replica_id, decision.reason) == ("r0", Reason.LOAD)
    made.on_load("r0", report(waiting=6, waiting_tokens=700))
    assert made.route(request("x", chain("x", 33, SHARED))).replica_id == "r1"


def test_our_own_requests_count_before_any_report_does() -> None:
    made = router(2)
    hold(made, "r1", SHARED)
    chosen = []
    for number in range(1, 41):
        decision = made.route(request(number, chain(number, 33, SHARED)))
        made.book(decision, number)
        chosen.append(decision.replica_id)
    first_away = chosen.index("r0")
    # Each brings 37 ms of prefill and slows the output of the others.
    assert 3 <= first_away <= 13
    for name in ("r0", "r1"):
        made.on_load(name, report(seen={INGRESS: 40}))
        assert made.load(name).backlog_tokens == 0
    assert made.route(request("x", chain("x", 33, SHARED))).replica_id == "r1"


def test_decoding_requests_weigh_against_a_short_prefix_more_than_a_long_one() -> None:
    made = router(2)
    hold(made, "r1", chain("long", 200))
    hold(made, "r1", chain("short", 8))
    made.on_load("r1", report(running=20, decode_tokens_per_s=400.0))
    assert made.route(request("a", chain("short", 8))).replica_id == "r0"
    assert made.route(request("b", chain("long", 200))).replica_id == "r1"


def test_a_replica_without_free_memory_is_left_even_by_its_own_prefix() -> None:
    made = router(2)
    hold(made, "r1", SHARED)
    full = report(running=9, waiting=9, waiting_tokens=360, used_blocks=1000)
    made.on_load("r1", full)
    assert made.route(request("x", chain("x", 33, SHARED))).replica_id == "r0"


def test_a_slower_replica_gets_less() -> None:
    made = router(2)
    made.on_load("r0", report(prefill_tokens_per_s=3000.0))
    short = [request(number, [], extra_tokens=15) for number in range(40)]
    assert place(made, short) == {"r0": 40}


# ------------------------------------------------------------------ cold prefixes


def test_cold_prefixes_spread_and_equal_ones_meet() -> None:
    made = router(8)
    where = {}
    for number in range(800):
        decision = made.route(request(number, chain(number, 20)))
        assert decision.reason is Reason.COLD
        where[number] = decision.replica_id
    counts = Counter(where.values())
    # Chi-square with 7 degrees of freedom: 24.3 is the 99.9th percentile.
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 24.3
    assert len(counts) == 8
    for number in range(800):
        same_start = chain(number, 4) + chain(("other end", number), 20)[4:]
        assert made.route(request(f"again {number}", same_start)).replica_id == where[number]


def test_a_chat_template_in_every_cache_is_no_reason_to_stay() -> None:
    made = router(4)
    template = chain("template", 2)
    hold(made, "r2", template)
    chosen = place(made, [request(n, chain(n, 20, template)) for n in range(200)])
    assert min(chosen[f"r{number}"] for number in range(4)) > 25


def test_equal_cold_prefixes_part_when_their_replica_has_more_than_its_share() -> None:
    made = router(4)
    decisions: list[Decision] = []
    for number in range(1, 41):
        decision = made.route(request(number, chain("same", 30)))
        made.book(decision, number)
        decisions.append(decision)
    assert decisions[0].replica_id == decisions[1].replica_id
    assert {item.reason for item in decisions} == {
        Reason.COLD,
        Reason.FOLLOWS,
        Reason.COLD_OVERFLOW,
    }
    counts = Counter(item.replica_id for item in decisions)
    assert len(counts) == 4
    assert max(counts.values()) < 25
    booked = [made.load(f"r{number}").booked_tokens for number in range(4)]
    assert sum(booked) < 40 * 485 / 5, "most follow, and compute little"


def test_a_prefix_that_is_on_its_way_into_a_cache_is_followed_there() -> None:
    made = router(4)
    made.book(first := made.route(request(1, chain(1, 33, SHARED))), 1)
    second = made.route(request(2, chain(2, 35, SHARED)))
    assert (second.replica_id, second.reason) == (first.replica_id, Reason.FOLLOWS)
    assert second.chosen.cached_tokens == len(SHARED) * BLOCK
    assert second.uncached_tokens == 4 * BLOCK + 5
    made.unbook(first.replica_id, 1)
    assert made.route(request(2, chain(2, 35, SHARED))).reason is Reason.COLD
    made.book(first, 2)
    made.on_load(first.replica_id, report(seen={INGRESS: 2}))
    hold(made, first.replica_id, SHARED)
    assert made.route(request(3, chain(3, 35, SHARED))).reason is Reason.CACHED
    made.index.view(first.replica_id).clear()
    assert made.route(request(4, chain(4, 35, SHARED))).reason is Reason.COLD, (
        "it has come and gone"
    )


def test_prompts_that_share_nothing_wait_no_longer_than_without_a_cache() -> None:
    """Each comes while those before it are still to be computed."""
    waits = []
    for policy in ("prefix", "least_backlog"):
        made = router(8, policy=policy)
        total_s = 0.0
        for number in range(1, 201):
            decision = made.route(request(number, chain(number, 120)))
            total_s += decision.chosen.wait_s
            made.book(decision, number)
        waits.append(total_s)
    assert waits[0] <= waits[1] * 1.05


def test_two_routers_agree_on_cold_prefixes_whatever_order_they_learned_of_replicas_in() -> None:
    one = router(0)
    two = router(0, ingress_id="ingress-2")
    for number in range(8):
        one.add_replica(f"r{number}", BLOCK)
        two.add_replica(f"r{7 - number}", BLOCK)
    requests = [request(number, chain(number, 6)) for number in range(300)]
    assert [one.route(item).replica_id for item in requests] == [
        two.route(item).replica_id for item in requests
    ]


def test_a_replica_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    made = router(9)
    requests = [request(number, chain(number, 6)) for number in range(1000)]
    before = [made.route(item).replica_id for item in requests]
    made.add_replica("new", BLOCK)
    after = [made.route(item).replica_id for item in requests]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {"new"}
    assert 60 <= len(moved) <= 140
    made.remove_replica("new")
    assert [made.route(item).replica_id for item in requests] == before


# ------------------------------------------------------------------ ties, policies, states


def test_equal_holders_share_the_requests_for_one_prompt() -> None:
    made = router(4)
    for name in ("r0", "r1", "r3"):
        hold(made, name, SHARED)
    decisions = [made.route(request(number, SHARED)) for number in range(300)]
    counts = Counter(item.replica_id for item in decisions)
    assert set(counts) == {"r0", "r1", "r3"}
    assert min(counts.values()) > 70
    assert {item.num_tied for item in decisions} == {3}


def test_prompts_too_short_to_cache_go_where_least_waits() -> None:
    made = router(3)
    for name, tokens in (("r0", 900), ("r1", 100), ("r2", 400)):
        made.on_load(name, report(waiting=1, waiting_tokens=tokens))
    decision = made.route(request("x", [], extra_tokens=9))
    assert (decision.replica_id, decision.reason) == ("r1", Reason.LEAST_WAIT)
    waits = {item.replica_id: item.wait_s for item in (decision.chosen, *decision.others)}
    assert waits["r0"] - waits["r1"] == pytest.approx(0.8, rel=0.02)
    assert [item.replica_id for item in decision.others] == ["r2", "r0"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("least_backlog", {"r0": 60}),
        ("round_robin", {"r0": 20, "r1": 20, "r2": 20}),
    ],
)
def test_policies_that_ignore_the_cache(policy: str, expected: dict[str, int]) -> None:
    made = router(3, policy=policy)
    hold(made, "r1", SHARED)
    made.on_load("r1", report(waiting=1, waiting_tokens=90))
    made.on_load("r2", report(waiting=1, waiting_tokens=900))
    assert place(made, [request(number, SHARED) for number in range(60)]) == expected
    assert made.route(request("x", SHARED)).num_replicas == 3


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    made = router(3, policy="power_of_two")
    made.on_load("r1", report(waiting=1, waiting_tokens=90))
    made.on_load("r2", report(waiting=1, waiting_tokens=900))
    counts = place(made, [request(number, SHARED) for number in range(300)])
    assert set(counts) == {"r0", "r1"}
    assert 160 <= counts["r0"] <= 240


@pytest.mark.parametrize("policy", ["prefix", "least_backlog", "round_robin", "power_of_two"])
def test_unroutable_excluded_and_removed_replicas_are_never_chosen(policy: str) -> None:
    made = router(4, policy=policy)
    for name in ("r0", "r1", "r2"):
        hold(made, name, SHARED)
    made.set_routable("r0", False)
    made.remove_replica("r1")
    keys = [SHARED, chain("cold", 10), []]
    for number in range(90):
        wanted = request(number, keys[number % 3])
        decision = made.route(wanted, exclude={"r2", "unknown"})
        assert (decision.replica_id, decision.num_replicas) == ("r3", 1)
        assert all(item.replica_id == "r3" for item in decision.others)
    with pytest.raises(NoReplica, match="3 known, 2 routable, 2 of them excluded"):
        made.route(request("x", SHARED), exclude={"r2", "r3"})
    made.set_routable("r0", True)
    assert made.route(request("x", SHARED), exclude={"r2", "r3"}).replica_id == "r0"
    made.check_integrity()


def test_a_new_policy_and_new_defaults_take_effect_at_once() -> None:
    made = router(0)
    for name in ("r0", "r1"):
        made.add_replica(name, BLOCK)
    hold(made, "r1", SHARED)
    assert made.route(request("x", SHARED)).chosen.saved_s == pytest.approx(0.248, rel=0.01)
    made.configure(RouterConfig(policy="round_robin", default_prefill_tokens_per_s=500.0))
    assert place(made, [request(number, SHARED) for number in range(10)]) == {"r0": 5, "r1": 5}
    for name in ("r0", "r1"):
        made.on_load(name, report(prefill_tokens_per_s=0.0))
    decisions = [made.route(request(number, SHARED)) for number in range(2)]
    assert max(item.chosen.saved_s for item in decisions) == pytest.approx(0.992, rel=0.01)


def test_no_replica_at_all_is_a_typed_error() -> None:
    with pytest.raises(NoReplica, match="0 known"):
        Router(RouterConfig(), INGRESS).route(request("x", SHARED))


def test_a_restarted_replica_starts_with_nothing() -> None:
    made = router(2)
    hold(made, "r1", SHARED)
    made.book(made.route(request("x", SHARED)), 1)
    made.remove_replica("r1")
    made.on_load("r1", report(waiting_tokens=9999))
    made.on_seen("r1", 1)
    made.unbook("r1", 1)
    view = made.add_replica("r1", BLOCK)
    assert (len(view), made.load("r1").backlog_tokens, made.index.match(SHARED)) == (0, 0, {})
    with pytest.raises(ValueError, match="known already"):
        made.add_replica("r1", BLOCK)
    made.check_integrity()


def test_one_token_of_a_fully_cached_prompt_is_still_to_compute() -> None:
    made = router(1)
    hold(made, "r0", SHARED)
    decision = made.route(request("x", SHARED, extra_tokens=0))
    assert decision.chosen.cached_tokens == 30 * BLOCK
    assert decision.uncached_tokens == BLOCK


def test_a_decision_explains_itself() -> None:
    made = router(10)
    hold(made, "r7", SHARED)
    made.on_load("r7", report(waiting=9, waiting_tokens=5000))
    decision = made.route(request("x", chain("x", 33, SHARED)))
    seen = (decision.chosen, *decision.others)
    assert len(seen) <= 6, "the best few, not all ten"
    assert [item.score_s for item in seen[:4]] == sorted(
        (item.score_s for item in seen[:4]), reverse=True
    )
    holder = seen[-1]
    assert (holder.replica_id, holder.cached_tokens) == ("r7", 496)
    assert holder.wait_s > holder.saved_s > 0.49
    assert holder.score_s < decision.chosen.score_s


@pytest.mark.slow
def test_memory_stays_bounded_over_many_requests_and_replicas() -> None:
    made = router(4)

    def serve(start: int, count: int) -> None:
        """Each request is booked, cached in place of an old one, and reported."""
        for number in range(start, start + count):
            keys = chain(number, 5)
            decision = made.route(request(number, keys))
            made.book(decision, number)
            view = made.index.view(decision.replica_id)
            if len(view) >= 500:
                view.clear()
            for item in keys:
                view.add(item, Tier.DEVICE)
            if number % 50 == 0:
                for name in ("r0", "r1", "r2", "r3"):
                    made.on_load(name, report(seen={INGRESS: number}))
            if number % 1000 == 0:
                made.remove_replica("r3")
                made.add_replica("r3", BLOCK)

    serve(1, 10_000)
    gc.collect()
    settled = sys.getallocatedblocks()
    serve(10_001, 20_000)
    gc.collect()
    # One object that each request leaves would be four times as many.
    assert sys.getallocatedblocks() < settled + 5_000
    assert len(made.index) <= 4 * 505
    assert sum(made.load(f"r{number}").num_booked for number in range(4)) == 0
    made.check_integrity()
