"""What is decided without a socket: retries, capacity, progress."""

import json
from datetime import UTC, datetime

import pytest

from cluster.batch.capacity import concurrency, parse_report, why_not_ready
from cluster.batch.records import Answer, NoAnswer, Outcome
from cluster.batch.report import Rates, Tally, duration, fitted, progress
from cluster.batch.retry import RetryPolicy, is_retryable, may_be_away, parse_retry_after
from cluster.batch.server import base_url
from tests.cluster.batch.conftest import ready_model


def _answer(status: int, retry_after_s: float | None = None) -> Answer:
    return Answer(status, "", b"{}", retry_after_s)


@pytest.mark.parametrize(
    ("outcome", "retryable", "away"),
    [
        (_answer(200), False, False),
        (_answer(400), False, False),
        (_answer(404), False, False),
        (_answer(413), False, False),
        (_answer(408), True, False),
        (_answer(429), True, False),
        (_answer(500), True, False),
        (_answer(503), True, True),
        (NoAnswer("timeout", ""), True, True),
    ],
)
def test_only_what_another_attempt_can_change_is_retried(
    outcome: Outcome, retryable: bool, away: bool
) -> None:
    assert (is_retryable(outcome), may_be_away(outcome)) == (retryable, away)


def test_delays_double_up_to_a_bound_and_honour_retry_after() -> None:
    policy = RetryPolicy(first_delay_s=1, max_delay_s=60)
    without = [policy.delay_s(count, _answer(500), 0.0) for count in (0, 1, 2, 3, 7, 1000)]
    assert without == [1, 1, 2, 4, 60, 60]
    assert policy.delay_s(3, _answer(500), 0.999) == pytest.approx(2, abs=0.01)
    assert policy.delay_s(1, _answer(429, 30.0), 0.5) == 30
    assert policy.delay_s(7, _answer(429, 1.0), 0.0) == 60


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        ("99999999", 600.0),
        ("-1", None),
        ("soon", None),
        ("²", None),
        ("Mon, 01 Jan 2024 00:00:30 GMT", 30.0),
        ("Mon, 01 Jan 2024 00:00:30 -0000", 30.0),
        ("Sun, 31 Dec 2023 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_in_both_forms(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, datetime(2024, 1, 1, tzinfo=UTC)) == seconds


def test_concurrency_is_a_quarter_more_than_the_ready_engines_take() -> None:
    models = {"a": ready_model(8, 16), "b": ready_model(100), "c": ready_model(7, state="loading")}
    del models["b"]["engines"][0]["max_num_seqs"]
    report = parse_report(json.dumps({"models": models, "status": "ready"}).encode())
    assert report is not None
    assert concurrency(report, {"a"}, 4096) == 30
    assert concurrency(report, {"a", "b"}, 4096) == 110
    assert concurrency(report, {"an alias"}, 4096) == 110
    assert concurrency(report, {"c"}, 4096) == 1
    assert concurrency(report, {"a"}, 12) == 12
    assert concurrency(None, {"a"}, 4096) == 80
    assert why_not_ready(report, {"a", "c"}) is None
    assert why_not_ready(report, {"c"}) == "a is ready, b is ready, c is loading"
    assert parse_report(b"<html>") is None
    assert parse_report(b'{"detail": "Not Found"}') is None


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://x:8000", "http://x:8000"),
        ("x:8000/", "http://x:8000"),
        ("https://x/prefix/v1/", "https://x/prefix"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
    ],
)
def test_urls_as_users_give_them(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x/?a=1"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        base_url(url)


def test_progress_says_how_far_how_fast_and_how_long() -> None:
    tally, rates = Tally(skipped=100), Rates(window_s=10)
    rates.see(0.0, tally)
    tally.succeeded, tally.completion_tokens, tally.in_flight = 150, 3000, 40
    rates.see(5.0, tally)
    assert progress(tally, rates, 1000) == (
        "[██████··················] 250/1,000 rows · 30.0 rows/s · 600 tok/s · 40 in flight"
        " · 25.0 s left"
    )
    tally.failed = 2
    assert "252 rows · " in progress(tally, rates, None)
    assert "2 failed" in progress(tally, rates, None)
    # A pause: what was long ago no longer counts.
    rates.see(20.0, tally)
    rates.see(40.0, tally)
    assert rates.rows_per_s == 0
    assert "left" not in progress(tally, rates, 1000)
    assert (duration(3.21), duration(125), duration(7265)) == ("3.2 s", "2:05", "2:01:05")
    assert fitted("x" * 100, columns=20) == "x" * 18 + "…"
