"""From records to figures.

Invariant: pure arithmetic on records. Latencies and rates are those of complete answers only;
requests that failed are counted by kind and miss every SLO, those that were interrupted by whoever
runs the benchmark are counted and nothing else. A figure that can't be had is None, never 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.serve.records import INTERRUPTED, Record
from bench.serve.watch import ClientLoad

Figure = float | int | str | None
PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps; None: any value is good."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def is_given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def is_kept(self, record: Record) -> bool:
        if record.failure is not None:
            return False
        return _within(record.ttft_s, self.ttft_s) and _within(record.tpot_s, self.tpot_s)


def _within(value_s: float | None, limit_s: float | None) -> bool:
    return limit_s is None or value_s is None or value_s <= limit_s


def figures(
    records: Sequence[Record], client: ClientLoad, slo: Slo | None = None
) -> dict[str, Figure]:
    """One figure a key, its unit in its name. All rates are over `duration_s`, from the start of
    the load until its last answer ended."""
    complete = [record for record in records if record.failure is None]
    failed = [record for record in records if record.failure not in (None, INTERRUPTED)]
    interrupted = len(records) - len(complete) - len(failed)
    duration_s = max((record.end_s or 0.0 for record in complete), default=0.0)
    return {
        "duration_s": _rounded(duration_s),
        "requests_ok": len(complete),
        "requests_failed": len(failed),
        "requests_interrupted": interrupted,
        **{f"failed_{kind}": count for kind, count in failures(records).items()},
        **_throughput(complete, duration_s),
        **_goodput(complete, failed, duration_s, slo or Slo()),
        **_latencies(complete),
        **_client_figures(records, client),
    }


def failures(records: Iterable[Record]) -> Counter[str]:
    """How many of each kind."""
    return Counter(
        record.failure for record in records if record.failure not in (None, INTERRUPTED)
    )


def itl_s(record: Record) -> list[float]:
    """Gaps between the chunks of one answer; 0 between chunks that came in one read."""
    return [after - before for before, after in pairwise(record.chunk_times_s)]


def _throughput(complete: Sequence[Record], duration_s: float) -> dict[str, Figure]:
    input_tokens = sum(
        record.asked_input_tokens if record.prompt_tokens is None else record.prompt_tokens
        for record in complete
    )
    output_tokens = sum(record.output_tokens for record in complete)
    cached = [record.cached_tokens for record in complete if record.cached_tokens is not None]
    cached_tokens = sum(cached) if cached else None
    return {
        "requests_per_s": _ratio(len(complete), duration_s),
        "output_tokens_per_s": _ratio(output_tokens, duration_s),
        "input_tokens_per_s": _ratio(input_tokens, duration_s),
        "input_tokens": input_tokens,
        "input_tokens_by": _source(record.prompt_tokens is not None for record in complete),
        "output_tokens": output_tokens,
        "output_tokens_by": _source(
            (record.usage_output_tokens is not None for record in complete), otherwise="chunks"
        ),
        "chunks": sum(len(record.chunk_times_s) for record in complete),
        "short_answers": sum(
            record.output_tokens < record.asked_output_tokens for record in complete
        ),
        "cached_tokens": cached_tokens,
        "cached_tokens_reported_by": len(cached),
        "cached_share": None if cached_tokens is None else _ratio(cached_tokens, input_tokens),
    }


def _source(from_usage: Iterable[bool], otherwise: str = "workload") -> str | None:
    kinds = set(from_usage)
    if len(kinds) > 1:
        return f"usage, {otherwise} where absent"
    return {True: "usage", False: otherwise}[kinds.pop()] if kinds else None


def _goodput(
    complete: Sequence[Record], failed: Sequence[Record], duration_s: float, slo: Slo
) -> dict[str, Figure]:
    """Empty without limits."""
    if not slo.is_given:
        return {}
    good = sum(slo.is_kept(record) for record in complete)
    return {
        "goodput_requests_per_s": _ratio(good, duration_s),
        "goodput_share": _ratio(good, len(complete) + len(failed)),
    }


def _latencies(complete: Sequence[Record]) -> dict[str, Figure]:
    samples_s: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in complete if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in complete if record.tpot_s is not None],
        "itl": [gap_s for record in complete for gap_s in itl_s(record)],
        "e2e": [record.e2e_s for record in complete if record.e2e_s is not None],
    }
    result: dict[str, Figure] = {}
    for name in LATENCIES:
        values_ms = np.asarray(samples_s[name]) * 1000
        has_any = values_ms.size > 0
        result[f"{name}_ms_mean"] = _rounded(values_ms.mean()) if has_any else None
        for percentile in PERCENTILES:
            value = np.percentile(values_ms, percentile) if has_any else None
            result[f"{name}_ms_p{percentile}"] = _rounded(value)
        result[f"{name}_ms_max"] = _rounded(values_ms.max()) if has_any else None
    return result


def send_lag_p99_s(records: Sequence[Record]) -> float:
    """By how much requests were sent after they were due; the latencies include it."""
    lags_s = [record.sent_s - record.scheduled_s for record in records]
    return float(np.percentile(lags_s, 99)) if lags_s else 0.0


def _client_figures(records: Sequence[Record], client: ClientLoad) -> dict[str, Figure]:
    chunks = sum(len(record.chunk_times_s) for record in records)
    return {
        "client_cpu_share": _rounded(client.cpu_share),
        "client_cpu_us_per_chunk": _rounded(client.cpu_s * 1e6 / chunks) if chunks else None,
        "client_loop_lag_ms_p99": _rounded(client.lag_p99_s * 1000),
        "client_loop_lag_ms_max": _rounded(client.lag_max_s * 1000),
        "client_send_lag_ms_p99": _rounded(send_lag_p99_s(records) * 1000),
    }


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)
