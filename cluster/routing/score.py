"""How long a request would take to its first tokens on a replica, in seconds.

Invariant: what a replica has to do is what its last report counts, plus exactly those requests of
ours that this report had not seen. A booking ends by a report that has seen it, by `unbook`, or
with the replica.

The estimate, for a request of `n` tokens of which a replica has `c` cached, so that `u = n - c` are
to be computed::

    cost_s  = queue + compute + pace + room + slots
    queue   = q * per_token_s                 q: tokens to prefill before it, reported plus booked
    compute = u * per_token_s
    per_token_s = 1 / P + (R / D) / STEP_TOKENS
    pace    = steps * R / D                   steps = min(max_tokens, PACE_STEPS)
    room    = s / used * OUTPUT_TOKENS * R / D
    slots   = w * OUTPUT_TOKENS / D

- ``P``: prefill tokens/s, ``D``: decode tokens/s of all its requests together, each the peak that
  the replica has shown (see `Peak`).
- ``R``: requests that decode, will once prefilled, or are booked, at most as many as may run at a
  time. Each adds a token to every step, so ``R / D`` (s) is what they add to a step. They slow a
  prefill of several steps in each of them (second term of `per_token_s`), and they set the pace of
  the first output tokens (`pace`).
- ``s``: blocks short of room for the queue, ``used``: blocks held by requests. The running requests
  turn ``used`` blocks over while they decode about OUTPUT_TOKENS each. 0 while there is room.
- ``w``: requests, this one included, beyond those that may run at a time. One ends every
  ``OUTPUT_TOKENS / D`` seconds.

All of it is linear in `u` and `steps`: ``cost_s = base_s + u * token_s + steps * step_s``, with
coefficients that change only with a report or a booking. They lie in arrays by slot, so that a
request is weighed against a thousand replicas at once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.wire import LoadReport

Seconds = NDArray[np.float64]

STEP_TOKENS = 2048
"""Token budget of a step; engines do not report theirs, this is the default one."""
PACE_STEPS = 16
"""Output tokens whose pace is weighed against prefill. More of them would spread a hot prefix to
replicas that must compute it again, at the expense of all that already runs there."""
OUTPUT_TOKENS = 256
"""Typical length of an output."""

_BUSY_DECODES = 8
"""A decode rate says what an engine can do only if it had this many requests, or some waiting."""
_SLOWEST = 0.25
"""No replica is taken for slower than this fraction of the fastest. A rate that was measured on
short prompts is far too low, and a replica that gets no long ones would never show a better."""
_REPORTS_TO_HALF = 6000
"""A peak fades by half in so many reports: ten minutes, at ten a second."""
_IDLE_REPORTS_TO_HALF = 30
"""What an idle replica has shown counts half after so many reports: three seconds. One that was
slow for a moment (its first steps, a neighbour's burst) is tried again, else it never could show
that it is no longer."""


class Peak:
    """The highest rate shown of late. Engines measure a rate over all steps that did such work,
    however little of it, so that what is below the peak was mostly lack of work."""

    __slots__ = ("per_s",)

    def __init__(self) -> None:
        self.per_s = 0.0

    def show(self, per_s: float, reports: float) -> None:
        """Takes in one of every `reports` reports."""
        self.per_s = max(per_s, self.per_s * 0.5 ** (1 / (_REPORTS_TO_HALF * reports)))


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one engine."""

    prefill_per_s: float
    decode_per_s: float


class Fleet:
    """What the replicas of one model have shown together."""

    def __init__(self, default: Rates) -> None:
        """`default` is assumed until something is measured; its decode rate is that of one
        request alone."""
        self.num_replicas = 0
        self.default = default
        self._prefill = Peak()
        self._decode = Peak()

    @property
    def prefill_per_s(self) -> float:
        return self._prefill.per_s or self.default.prefill_per_s

    @property
    def decode_per_s(self) -> float:
        return self._decode.per_s or self.default.decode_per_s * _BUSY_DECODES

    def show(self, shown: Rates) -> None:
        share = max(1, self.num_replicas)
        self._prefill.show(shown.prefill_per_s, share)
        self._decode.show(shown.decode_per_s, share)

    def rates(self, own: Rates, trust: float = 1.0) -> Rates:
        """What to assume of a replica whose own peaks are `own`, 0 where it has none; `trust` is
        how much they count against what all have shown."""

        def blend(own_per_s: float, fleet_per_s: float) -> float:
            if not own_per_s:
                return fleet_per_s
            return fleet_per_s + trust * (max(own_per_s, fleet_per_s * _SLOWEST) - fleet_per_s)

        return Rates(
            blend(own.prefill_per_s, self.prefill_per_s),
            blend(own.decode_per_s, self.decode_per_s),
        )


class CostTable:
    """The coefficients of all replicas, by slot. A slot that no replica occupies is unroutable."""

    def __init__(self) -> None:
        self.size = 0
        self.base_s: Seconds = np.zeros(0)
        """Seconds before a replica could start on anything new."""
        self.token_s: Seconds = np.zeros(0)
        """Seconds for each token to compute, among what else runs."""
        self.step_s: Seconds = np.zeros(0)
        """Seconds that a replica's other requests add to a step."""
        self.compute_s: Seconds = np.zeros(0)
        """Seconds for each token to compute, alone."""
        self.block_size: NDArray[np.float64] = np.ones(0)
        self.seed: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.routable: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def reserve(self, slot: int) -> None:
        """Makes room for `slot`: doubles, so that many replicas cost no more each than few."""
        if slot < self.size:
            return
        more = max(8, 2 * slot) - self.size
        self.size += more
        self.base_s = np.append(self.base_s, np.zeros(more))
        self.token_s = np.append(self.token_s, np.zeros(more))
        self.step_s = np.append(self.step_s, np.zeros(more))
        self.compute_s = np.append(self.compute_s, np.zeros(more))
        self.block_size = np.append(self.block_size, np.ones(more))
        self.seed = np.append(self.seed, np.zeros(more, np.uint64))
        self.routable = np.append(self.routable, np.zeros(more, np.bool_))

    @property
    def backlog_s(self) -> Seconds:
        """Seconds that a request with nothing to compute would need for its first tokens."""
        return self.base_s + PACE_STEPS * self.step_s


class ReplicaLoad:
    """What one replica has to do, and how fast it is. Keeps its row of the cost table."""

    def __init__(self, fleet: Fleet, table: CostTable, slot: int, block_size: int) -> None:
        self.booked_tokens = 0
        self._fleet = fleet
        self._table = table
        self._slot = slot
        self._block_size = block_size
        self._prefill = Peak()
        self._decode = Peak()
        self._trust = 1.0
        self._report: LoadReport | None = None
        self._bookings: dict[int, int] = {}
        # Highest of our numbers that a report counts, that any message has shown to have arrived,
        # and that had been shown so when the last report came.
        self._seen = 0
        self._acknowledged = 0
        self._settled = 0
        table.block_size[slot] = block_size
        self._refresh()

    @property
    def num_booked(self) -> int:
        return len(self._bookings)

    @property
    def backlog_tokens(self) -> int:
        """Tokens to prefill, reported and booked."""
        return self.booked_tokens + (self._report.waiting_tokens if self._report else 0)

    def on_report(self, report: LoadReport, ingress_id: str) -> None:
        """Replaces the last report, and ends the bookings that this one counts."""
        seen = max(self._seen, report.seen.get(ingress_id, 0))
        if report.running or report.waiting or seen > self._seen:
            self._trust = 1.0
        else:
            self._trust *= 0.5 ** (1 / _IDLE_REPORTS_TO_HALF)
        self._report, self._seen = report, seen
        # A booking that was known to have arrived a whole report ago is over, whatever the report
        # says: the engine has forgotten us, for example.
        self._drop(max(self._seen, self._settled))
        self._settled = self._acknowledged
        self._prefill.show(report.prefill_tokens_per_s, 1)
        if report.running >= _BUSY_DECODES or report.waiting:
            self._decode.show(report.decode_tokens_per_s, 1)
        self._fleet.show(Rates(self._prefill.per_s, self._decode.per_s))
        self._refresh()

    def on_seen(self, number: int) -> None:
        """All numbers up to this one have arrived. Their bookings stay until a report: dropped
        now, they would be counted nowhere, since the last report is older than this."""
        self._acknowledged = max(self._acknowledged, number)

    def book(self, number: int, num_tokens: int) -> None:
        """Counts a request of ours until a report does. Raises `ValueError` for a number that is
        booked already."""
        if number <= self._seen:
            return
        if number in self._bookings:
            raise ValueError(f"request number {number} is already booked")
        self._bookings[number] = num_tokens
        self.booked_tokens += num_tokens
        self._refresh()

    def unbook(self, number: int) -> None:
        """Ends a booking. Harmless when the booking has ended."""
        num_tokens = self._bookings.pop(number, None)
        if num_tokens is not None:
            self.booked_tokens -= num_tokens
            self._refresh()

    def check_integrity(self) -> None:
        assert self.booked_tokens == sum(self._bookings.values())
        assert all(number > self._seen for number in self._bookings)

    def _drop(self, seen: int) -> None:
        for number in [number for number in self._bookings if number <= seen]:
            self.booked_tokens -= self._bookings.pop(number)

    def _refresh(self) -> None:
        rates = self._fleet.rates(Rates(self._prefill.per_s, self._decode.per_s), self._trust)
        report, queued = self._report, self.backlog_tokens
        num_requests, num_queued = len(self._bookings), 0
        if report is not None:
            num_requests += report.running + report.waiting
            num_queued = max(0, num_requests + 1 - report.max_num_seqs)
            num_requests = min(num_requests, report.max_num_seqs)
        step_s = num_requests / rates.decode_per_s
        compute_s = 1 / rates.prefill_per_s
        token_s = compute_s + step_s / STEP_TOKENS
        base_s = queued * token_s + num_queued * OUTPUT_TOKENS / rates.decode_per_s
        if report is not None and report.used_blocks:
            short = report.used_blocks + queued / self._block_size - report.num_blocks
            if short >= 0:
                block_s = OUTPUT_TOKENS * step_s / report.used_blocks
                base_s += short * block_s
                token_s += block_s / self._block_size
        table, slot = self._table, self._slot
        table.base_s[slot] = base_s
        table.token_s[slot] = token_s
        table.step_s[slot] = step_s
        table.compute_s[slot] = compute_s
