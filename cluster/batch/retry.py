"""Which outcomes are tried again, and when.

Invariant: pure; chance is passed in. What another attempt cannot change is final at once: every
answer but 408, 429 and 5xx. Of the rest each attempt is counted, up to the limit.
"""

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from cluster.batch.records import Answer, Outcome

_CLIENT_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_AWAY_STATUSES = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_MAX_RETRY_AFTER_S = 600.0
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """After the nth failed attempt `first_delay_s * 2 ** (n - 1)` passes, at most `max_delay_s`,
    less up to half of it by chance; never less than the server's `Retry-After`."""

    num_retries: int = 5
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0

    def delay_s(self, num_failed: int, outcome: Outcome, chance: float) -> float:
        """`num_failed` attempts, the last with `outcome`; `chance` is in [0, 1)."""
        exponent = min(max(num_failed, 1) - 1, 32)
        backoff_s = min(self.first_delay_s * (1 << exponent), self.max_delay_s)
        jittered_s = backoff_s * (1 - _JITTER * chance)
        asked_s = outcome.retry_after_s if isinstance(outcome, Answer) else None
        return max(jittered_s, asked_s or 0.0)


def is_retryable(outcome: Outcome) -> bool:
    if not isinstance(outcome, Answer):
        return True
    return outcome.status >= HTTPStatus.INTERNAL_SERVER_ERROR or outcome.status in _CLIENT_STATUSES


def may_be_away(outcome: Outcome) -> bool:
    """Whether it is what comes from a server, or a proxy before it, that serves nobody."""
    return not isinstance(outcome, Answer) or outcome.status in _AWAY_STATUSES


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Seconds from `now`, at most ten minutes; either form of RFC 9110, section 10.2.3. None for
    anything else."""
    if text is None:
        return None
    seconds = None
    text = text.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        with contextlib.suppress(ValueError):
            date = parsedate_to_datetime(text)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds()
    return None if seconds is None else min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)
