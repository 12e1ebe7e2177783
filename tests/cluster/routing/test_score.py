"""Seconds: what is known of a replica's work is counted once, neither twice nor never."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.routing.score import CostTable, Fleet, Rates, ReplicaLoad
from tests.cluster.routing.rig import BLOCK, INGRESS, report


def new_load(fleet: Fleet | None = None) -> tuple[ReplicaLoad, CostTable]:
    table = CostTable()
    table.reserve(0)
    return ReplicaLoad(fleet or Fleet(Rates(2000.0, 50.0)), table, 0, BLOCK), table


def test_rates_are_the_defaults_until_measured_and_then_the_peak() -> None:
    load, table = new_load()
    assert table.compute_s[0] == pytest.approx(1 / 2000)
    load.on_report(report(prefill_tokens_per_s=0.0, running=4), INGRESS)
    assert table.step_s[0] == pytest.approx(4 / (8 * 50))
    load.on_report(report(prefill_tokens_per_s=9000.0), INGRESS)
    load.on_report(report(prefill_tokens_per_s=100.0), INGRESS)
    assert table.compute_s[0] == pytest.approx(1 / 9000, rel=1e-3)
    load.on_report(report(decode_tokens_per_s=100.0, running=2), INGRESS)
    assert table.step_s[0] == pytest.approx(2 / 400), "two requests do not show what it can do"
    load.on_report(report(decode_tokens_per_s=900.0, running=30), INGRESS)
    assert table.step_s[0] == pytest.approx(30 / 900)


def test_one_that_has_measured_nothing_is_like_the_others_and_none_is_hopeless() -> None:
    fleet = Fleet(Rates(2000.0, 50.0))
    fast, _ = new_load(fleet)
    fast.on_report(report(prefill_tokens_per_s=10_000.0), INGRESS)
    fresh, table = new_load(fleet)
    assert table.compute_s[0] == pytest.approx(1 / 10_000)
    fresh.on_report(report(prefill_tokens_per_s=20.0, running=1), INGRESS)
    assert table.compute_s[0] == pytest.approx(4 / 10_000, rel=1e-3)


def test_the_queue_the_decodes_and_lack_of_memory_all_take_seconds() -> None:
    load, table = new_load()
    load.on_report(report(waiting=1, waiting_tokens=300), INGRESS)
    assert table.base_s[0] == pytest.approx(0.3, rel=0.01)
    load.on_report(report(running=40, decode_tokens_per_s=400.0), INGRESS)
    assert table.step_s[0] == pytest.approx(0.1)
    assert table.token_s[0] == pytest.approx(0.001 + 0.1 / 2048, rel=1e-3)
    full = report(running=40, waiting=2, waiting_tokens=160, used_blocks=1000)
    load.on_report(full, INGRESS)
    # Ten blocks short of a thousand that 42 requests at 400 tokens/s turn over in 256 steps.
    assert table.base_s[0] == pytest.approx(0.168 + 10 / 1000 * 256 * 42 / 400, rel=0.01)


def test_who_has_to_wait_for_a_slot_waits_for_others_to_end() -> None:
    load, table = new_load()
    load.on_report(report(running=2, waiting=1, decode_tokens_per_s=500.0, max_num_seqs=4), INGRESS)
    assert table.base_s[0] == 0, "one slot is left"
    load.book(1, 0)
    assert table.base_s[0] == pytest.approx(256 / 500, rel=1e-3)
    load.book(2, 0)
    assert table.base_s[0] == pytest.approx(2 * 256 / 500, rel=1e-3)
    assert table.step_s[0] == pytest.approx(4 / 500, rel=1e-3), "only four decode at a time"


def test_an_idle_replica_that_was_slow_is_soon_tried_again() -> None:
    fleet = Fleet(Rates(2000.0, 50.0))
    fast, _ = new_load(fleet)
    fast.on_report(report(prefill_tokens_per_s=1000.0), INGRESS)
    slow, table = new_load(fleet)
    slow.on_report(report(prefill_tokens_per_s=500.0, running=1), INGRESS)
    assert table.compute_s[0] == pytest.approx(1 / 500, rel=1e-3)
    for _ in range(30):
        slow.on_report(report(prefill_tokens_per_s=500.0), INGRESS)
    assert table.compute_s[0] == pytest.approx(1 / 750, rel=1e-2)
    slow.on_report(report(prefill_tokens_per_s=500.0, seen={INGRESS: 1}), INGRESS)
    assert table.compute_s[0] == pytest.approx(1 / 500, rel=1e-3), "it has shown it once more"


def test_a_token_batch_alone_does_not_hide_a_request_from_the_backlog() -> None:
    load, _ = new_load()
    load.book(1, 500)
    load.on_seen(1)
    assert load.backlog_tokens == 500, "no report counts it yet"
    load.on_report(report(waiting_tokens=500, waiting=1, seen={INGRESS: 1}), INGRESS)
    assert load.backlog_tokens == 500, "the report counts it, the booking no more"
    load.on_report(report(seen={INGRESS: 1}), INGRESS)
    assert load.backlog_tokens == 0


def test_a_stale_report_does_not_drop_newer_bookings() -> None:
    load, _ = new_load()
    for number in (1, 2, 3):
        load.book(number, 100)
    load.on_report(report(seen={INGRESS: 1, "another": 99}), INGRESS)
    assert (load.num_booked, load.booked_tokens) == (2, 200)
    load.on_report(report(seen={"another": 100}), INGRESS)
    assert load.num_booked == 2


def test_a_booking_does_not_outlive_an_engines_memory_of_us() -> None:
    load, _ = new_load()
    load.book(1, 100)
    load.on_seen(1)
    for _ in range(2):
        load.on_report(report(seen={}), INGRESS)
    assert load.num_booked == 0


def test_a_number_is_booked_once_and_not_after_a_report_has_counted_it() -> None:
    load, _ = new_load()
    load.book(2, 100)
    with pytest.raises(ValueError, match="2 is already booked"):
        load.book(2, 100)
    load.on_report(report(seen={INGRESS: 5}), INGRESS)
    load.book(4, 100)
    assert load.backlog_tokens == 0


class BookingMachine(RuleBasedStateMachine):
    """One ingress sends, an engine receives, and reports are as late as they like, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.load, self.table = new_load()
        self.sent: dict[int, int] = {}
        self.arrived = 0
        self.reported = 0
        self.gone: set[int] = set()
        self.late_reports: list[int] = []

    @rule(num_tokens=st.integers(1, 1000))
    def send(self, num_tokens: int) -> None:
        number = len(self.sent) + 1
        self.sent[number] = num_tokens
        self.load.book(number, num_tokens)

    @precondition(lambda self: self.arrived < len(self.sent))
    @rule()
    def arrive(self) -> None:
        self.arrived += 1

    @rule()
    def publish(self) -> None:
        self.late_reports.append(self.arrived)

    @precondition(lambda self: self.late_reports)
    @rule()
    def hear_a_report(self) -> None:
        self.reported = self.late_reports.pop(0)
        self.load.on_report(report(seen={INGRESS: self.reported}), INGRESS)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def first_token_or_refusal(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, len(self.sent)))
        self.gone.add(number)
        self.load.unbook(number)

    @invariant()
    def counts_exactly_what_no_report_counts(self) -> None:
        self.load.check_integrity()
        open_tokens = [
            tokens
            for number, tokens in self.sent.items()
            if number > self.reported and number not in self.gone
        ]
        assert self.load.num_booked == len(open_tokens)
        assert self.load.backlog_tokens == sum(open_tokens)

    def teardown(self) -> None:
        self.load.on_report(report(seen={INGRESS: len(self.sent)}), INGRESS)
        assert (self.load.num_booked, self.load.backlog_tokens) == (0, 0)
        assert (self.table.base_s[0], self.table.step_s[0]) == (0.0, 0.0)


BookingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBookingMachine = BookingMachine.TestCase
