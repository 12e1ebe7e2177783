"""What a run has done so far, and how it is told.

Invariant: pure; counts and the time in, text out.
"""

import shutil
from collections import deque
from dataclasses import dataclass, field

import msgspec

from cluster.batch.records import Answer, Outcome

_BAR_WIDTH = 24
_MAX_KINDS = 100
_MAX_MESSAGE_CHARS = 200


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _ErrorText(msgspec.Struct, frozen=True):
    message: str = ""


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    error: _ErrorText | None = None


@dataclass
class Failures:
    """Rows that failed in one way."""

    first: str
    count: int = 0


@dataclass
class Tally:
    """Counts of one run."""

    rows: int = 0
    """Met in the input."""
    skipped: int = 0
    """Of these, recorded by earlier runs."""
    failed_before: int = 0
    """Of the skipped, recorded as errors."""
    succeeded: int = 0
    failed: int = 0
    in_flight: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    failures: dict[str, Failures] = field(default_factory=dict)
    """By status or code."""

    @property
    def ended(self) -> int:
        """In this run."""
        return self.succeeded + self.failed

    def end(self, line: int, outcome: Outcome) -> None:
        """Takes in the outcome of the row in this line."""
        body = _parsed(outcome)
        if usage := body.usage:
            details = usage.prompt_tokens_details
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
            self.cached_tokens += (details.cached_tokens or 0) if details else 0
        if isinstance(outcome, Answer) and outcome.is_success:
            self.succeeded += 1
            return
        self.failed += 1
        if isinstance(outcome, Answer):
            kind, message = f"status {outcome.status}", body.error.message if body.error else ""
            message = f"line {line}: {message}"
        else:
            kind, message = outcome.code, outcome.message
            message = message if message.startswith("line ") else f"line {line}: {message}"
        if kind in self.failures or len(self.failures) < _MAX_KINDS:
            failures = self.failures.setdefault(kind, Failures(message[:_MAX_MESSAGE_CHARS]))
            failures.count += 1

    def figures(self, seconds: float) -> dict[str, float]:
        """Flat, for JSON. Rates are of this run; tokens per second are those of the answers."""
        per_s = 1 / seconds if seconds > 0 else 0.0
        return {
            "rows": self.rows,
            "skipped": self.skipped,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "failed_before": self.failed_before,
            "retries": self.retries,
            "seconds": round(seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "rows_per_s": round(self.ended * per_s, 3),
            "tokens_per_s": round(self.completion_tokens * per_s, 3),
        }


def _parsed(outcome: Outcome) -> _Body:
    """Nothing from an answer of another form."""
    if isinstance(outcome, Answer):
        try:
            return msgspec.json.decode(outcome.body, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return _Body()


class Rates:
    """Rows and answer tokens per second over the last `window_s`."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque()
        self.rows_per_s = 0.0
        self.tokens_per_s = 0.0

    def see(self, now_s: float, tally: Tally) -> None:
        self._seen.append((now_s, tally.ended, tally.completion_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        then_s, rows, tokens = self._seen[0]
        if now_s > then_s:
            self.rows_per_s = (tally.ended - rows) / (now_s - then_s)
            self.tokens_per_s = (tally.completion_tokens - tokens) / (now_s - then_s)


def progress(tally: Tally, rates: Rates, total: int | None) -> str:
    """One line. `total`: rows of the input, None while they are not counted."""
    done = tally.skipped + tally.ended
    bar = ""
    count = f"{done:,} rows"
    parts = [f"{rates.rows_per_s:,.1f} rows/s", f"{rates.tokens_per_s:,.0f} tok/s"]
    if failed := tally.failed + tally.failed_before:
        parts.append(f"{failed:,} failed")
    parts.append(f"{tally.in_flight:,} in flight")
    if total:
        filled = min(_BAR_WIDTH, _BAR_WIDTH * done // total)
        bar = f"[{'█' * filled}{'·' * (_BAR_WIDTH - filled)}] "
        count = f"{done:,}/{total:,} rows"
        if rates.rows_per_s > 0:
            parts.append(f"{duration(max(total - done, 0) / rates.rows_per_s)} left")
    return bar + " · ".join([count, *parts])


def summary(tally: Tally, seconds: float) -> str:
    """Of the whole run, with the first error of each kind."""
    parts = [f"{tally.succeeded:,} succeeded", f"{tally.failed:,} failed"]
    if tally.skipped:
        errors = f" ({tally.failed_before:,} of them errors)" if tally.failed_before else ""
        parts.append(f"{tally.skipped:,} were there already{errors}")
    rows = "1 row" if tally.rows == 1 else f"{tally.rows:,} rows"
    lines = [f"{rows}: {', '.join(parts)}"]
    if tally.ended:
        figures = tally.figures(seconds)
        lines.append(
            f"{duration(seconds)}, {figures['rows_per_s']:,.1f} rows/s, "
            f"{figures['tokens_per_s']:,.0f} tok/s ({tally.prompt_tokens:,} prompt tokens, "
            f"{tally.cached_tokens:,} of them cached, {tally.completion_tokens:,} in answers)"
        )
    kinds = sorted(tally.failures.items(), key=lambda item: -item[1].count)
    lines += [f"failed: {each.count:,} × {kind}, first: {each.first}" for kind, each in kinds]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """As a clock shows it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitted(line: str, columns: int | None = None) -> str:
    """No longer than the terminal is wide, so that it can be written over."""
    width = columns or shutil.get_terminal_size().columns
    return line if len(line) < width else line[: width - 2] + "…"
