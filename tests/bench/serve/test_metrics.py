"""Arithmetic on timelines made by hand."""

from array import array

import pytest

from bench.serve.metrics import Slo, figures, send_lag_p99_s
from bench.serve.records import INTERRUPTED, Record
from bench.serve.report import problems, progress, table
from bench.serve.watch import ClientLoad

_CLIENT = ClientLoad(wall_s=10.0, cpu_s=1.0, lag_p99_s=0.001, lag_max_s=0.002)


def _complete(
    due_s: float,
    chunks_s: list[float],
    end_s: float,
    usage: tuple[int, int] | None = None,
    cached: int | None = None,
) -> Record:
    record = Record(due_s, asked_input_tokens=100, asked_output_tokens=4, sent_s=due_s + 0.01)
    record.chunk_times_s = array("d", chunks_s)
    record.end_s = end_s
    if usage is not None:
        record.prompt_tokens, record.usage_output_tokens = usage
    record.cached_tokens = cached
    return record


def _failed(kind: str, reason: str = "") -> Record:
    record = Record(0.0, 100, 4)
    record.fail(kind, reason)
    return record


def test_figures_of_two_requests() -> None:
    records = [
        _complete(0.0, [0.1, 0.2, 0.4], 0.5, usage=(110, 4), cached=64),
        _complete(1.0, [1.3, 1.4, 1.5, 1.6], 2.0, usage=(90, 4), cached=0),
    ]
    got = figures(records, _CLIENT)
    assert got["duration_s"] == 2.0
    assert (got["requests_ok"], got["requests_failed"]) == (2, 0)
    assert got["requests_per_s"] == 1.0
    assert got["output_tokens_per_s"] == 4.0
    assert got["input_tokens_per_s"] == 100.0
    assert (got["input_tokens_by"], got["output_tokens_by"]) == ("usage", "usage")
    assert (got["cached_tokens"], got["cached_share"]) == (64, 0.32)
    assert got["ttft_ms_mean"] == 200.0
    assert got["ttft_ms_p50"] == 200.0
    assert got["ttft_ms_p90"] == pytest.approx(280.0)
    assert got["ttft_ms_p99"] == pytest.approx(298.0)
    assert got["ttft_ms_max"] == 300.0
    assert got["tpot_ms_mean"] == 100.0
    assert got["itl_ms_mean"] == pytest.approx((100 + 200 + 3 * 100) / 5)
    assert got["itl_ms_max"] == 200.0
    assert got["e2e_ms_mean"] == 750.0
    assert got["short_answers"] == 0
    assert got["client_cpu_share"] == 0.1
    assert got["client_cpu_us_per_chunk"] == pytest.approx(1e6 / 7, rel=1e-4)
    assert got["client_send_lag_ms_p99"] == 10.0
    assert "goodput_share" not in got


def test_without_usage_it_says_so() -> None:
    by_chunk = _complete(0.0, [0.1, 0.2], 1.0)
    got = figures([by_chunk], _CLIENT)
    assert (got["output_tokens"], got["output_tokens_by"]) == (2, "chunks")
    assert (got["input_tokens"], got["input_tokens_by"]) == (100, "workload")
    assert got["cached_tokens"] is None
    assert got["short_answers"] == 1
    mixed = figures([by_chunk, _complete(0.0, [0.1], 1.0, usage=(10, 1))], _CLIENT)
    assert mixed["output_tokens_by"] == "usage, chunks where absent"


def test_failures_are_counted_apart_and_miss_every_slo() -> None:
    records = [
        _complete(0.0, [0.1, 0.2], 1.0, usage=(10, 2)),
        _complete(0.0, [0.6, 0.7], 2.0, usage=(10, 2)),
        _failed("status_503", "overloaded"),
        _failed("status_503"),
        _failed("connection"),
        _failed(INTERRUPTED),
    ]
    got = figures(records, _CLIENT, Slo(ttft_s=0.5, tpot_s=0.15))
    assert (got["requests_ok"], got["requests_failed"], got["requests_interrupted"]) == (2, 3, 1)
    assert (got["failed_status_503"], got["failed_connection"]) == (2, 1)
    assert got["ttft_ms_max"] == 600.0
    assert (got["goodput_requests_per_s"], got["goodput_share"]) == (0.5, 0.2)
    assert problems(records, ["late"]) == (
        "failed: 2 × status_503, first: overloaded\nfailed: 1 × connection\nwarning: late"
    )


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.3), True),
        (Slo(ttft_s=0.29), False),
        (Slo(tpot_s=0.1), True),
        (Slo(tpot_s=0.09), False),
        (Slo(ttft_s=0.5, tpot_s=0.05), False),
    ],
)
def test_slo(slo: Slo, kept: bool) -> None:
    # Values that binary fractions hold exactly would prove less than a margin does.
    record = _complete(1.0, [1.2999, 1.3999], 2.0, usage=(10, 2))
    assert slo.is_kept(record) is kept
    assert not slo.is_kept(_failed("timeout"))


def test_a_single_token_has_no_tpot_and_keeps_its_limit() -> None:
    record = _complete(0.0, [0.1], 0.2, usage=(10, 1))
    got = figures([record], _CLIENT, Slo(tpot_s=0.001))
    assert got["tpot_ms_mean"] is None
    assert got["itl_ms_p99"] is None
    assert got["goodput_share"] == 1.0


def test_nothing_measured_is_nothing_shown() -> None:
    got = figures([], ClientLoad())
    assert got["requests_per_s"] is None
    assert got["ttft_ms_p50"] is None
    assert got["client_cpu_us_per_chunk"] is None
    assert "–" in table(got, ["title"])
    assert send_lag_p99_s([]) == 0.0


def test_table() -> None:
    records = [_complete(0.0, [0.1, 0.2], 1.0, usage=(10, 2), cached=5), _failed("timeout")]
    text = table(figures(records, _CLIENT, Slo(ttft_s=1)), ["first", "second"])
    assert text.startswith("first\nsecond\n")
    for words in ("1 complete, 1 failed", "50.0% of the input", "goodput", "50.0% of all"):
        assert words in text
    assert "1 shorter than asked" in text
    ttft = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert ttft.split() == ["TTFT", "100", "100", "100", "100", "100"]


def test_progress() -> None:
    assert progress(5, 1, 2, 12, 1234.5) == (
        "[████████████············] 6/12 done · 1 failed · 2 running · 1,234 tok/s"
    )
    assert progress(5, 0, 2, None, 0) == "5 done · 2 running · 0 tok/s"


def test_client_warnings() -> None:
    assert _CLIENT.warnings(0.001) == []
    busy = ClientLoad(wall_s=10.0, cpu_s=9.0, lag_p99_s=0.05, lag_max_s=0.1)
    warnings = busy.warnings(0.5)
    assert len(warnings) == 3
    assert "90%" in warnings[0]
    assert "50.0 ms" in warnings[1]
    assert "500.0 ms" in warnings[2]
