"""When an engine reports how busy it is, and what it says. Pure; time is passed in.

Invariant: reports come at the usual interval; sooner once all work is done, lest a router takes an
idle engine for a busy one.
"""

from engine.load import LoadMeter
from engine.scheduler import Scheduler
from engine.wire import LoadReport

_MIN_INTERVAL_S = 0.01


class LoadReporter:
    def __init__(self, scheduler: Scheduler, meter: LoadMeter, interval_s: float) -> None:
        self._scheduler = scheduler
        self._meter = meter
        self._interval_s = interval_s
        self._reported_s = 0.0
        self._reported_idle = False

    def due_s(self, is_idle: bool) -> float:
        """When the next report is due."""
        is_news = is_idle and not self._reported_idle
        return self._reported_s + (_MIN_INTERVAL_S if is_news else self._interval_s)

    def report(
        self, now: float, is_idle: bool, step_age_s: float, seen: dict[str, int]
    ) -> LoadReport:
        """The report of now; `seen`: the highest request number seen from each ingress."""
        self._reported_s, self._reported_idle = now, is_idle
        scheduler, meter = self._scheduler, self._meter
        pool = scheduler.cache.pool
        return LoadReport(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_uncomputed_tokens,
            max_num_seqs=scheduler.config.max_num_seqs,
            num_blocks=pool.num_blocks,
            used_blocks=pool.num_held,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_tokens_per_s=meter.decode_tokens_per_s,
            step_s=meter.last_step_s,
            step_age_s=step_age_s,
            preemptions=scheduler.counts.preempted,
            seen=seen,
        )
