"""How many engines a model has: more while work waits, one fewer while the others could do it.

Invariant: `decide` is a function of what it is given, its former state and the time included.
Serve copies this module by value into its controller and calls it ten times a second there, so it
imports the standard library only, and `BacklogPolicy`, which asks `decide`, never raises.
"""

import logging
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

_LOGGER = logging.getLogger("ray.serve.shoal")
_LARGEST = 1e12

MAX_STEP_S = 5.0  # What a call adds to the clock at most, however far time has jumped.
SMOOTHING_S = 10.0  # Time constant of the moving average.
SETTLE_S = 10.0  # At most, engines just ready are given this long to show what they change.
STALE_S = 10.0  # Age of a report at which its replica counts as silent.
DOWN_SHARE = 0.5  # Of the up thresholds, to which queues must have fallen for a removal.
MISTAKE_DELAYS = 3  # A removal was a mistake if more are wanted within so many `down_delay_s`.
HOLD_DELAYS = 6, 64  # `down_delay_s` that it is remembered: at first, doubled each time; at most.
LESS_LOAD = 0.8  # Share of a mistake's load below which it teaches nothing.


@dataclass(frozen=True, slots=True)
class Sample:
    """What one engine last said of itself."""

    ready: float = 0.0  # 1 while it serves; nothing else counts before.
    queued_requests: float = 0.0
    queued_tokens: float = 0.0  # Prompt tokens yet to be computed.
    prefill_tokens_per_s: float = 0.0  # 0 until it is measured.
    utilisation: float = 0.0  # 0 to 1: of the limit that is used most.

    @classmethod
    def parse(cls, stats: Mapping[str, float]) -> "Sample":
        """One that is not ready, if a figure cannot be."""
        values = {name: stats.get(name, 0.0) for name in cls.__match_args__}
        return cls(**values) if all(map(_is_sound, values.values())) else cls()


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The model's settings, as in `AutoscalingConfig`. They are live: each report brings them."""

    up_queued_requests: float = 4.0
    up_backlog_s: float = 5.0
    up_delay_s: float = 1.0
    down_utilisation: float = 0.5
    down_delay_s: float = 60.0
    warmup_s: float = 120.0

    @classmethod
    def parse(cls, stats: Mapping[str, float]) -> "Thresholds":
        """What cannot be stays at its default."""
        given = {name: stats.get(name, math.nan) for name in cls.__match_args__}
        return cls(**{name: value for name, value in given.items() if _is_sound(value)})


def _is_sound(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 <= value <= _LARGEST


class Fleet(NamedTuple):
    """The replicas as Serve sees them: how many are to be, how many processes run, the bounds."""

    target: int
    running: int
    min_replicas: int
    max_replicas: int

    @property
    def least(self) -> int:
        """A model that has a replica keeps one. One at zero is woken by Serve itself."""
        return max(self.min_replicas, min(1, self.target, self.max_replicas))

    def clamp(self, replicas: int) -> int:
        return max(self.least, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True)
class Load:
    """What the ready engines have to do, summed."""

    ready: int = 0
    queued_requests: float = 0.0
    queued_tokens: float = 0.0
    prefill_tokens_per_s: float = 0.0  # Mean of those that have measured it, or 0.
    utilisation: float = 0.0
    has_room: bool = False  # Nothing waits in one of them.

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Load":
        ready = [sample for sample in samples if sample.ready >= 0.5]
        rates = [s.prefill_tokens_per_s for s in ready if s.prefill_tokens_per_s > 0]
        return cls(
            ready=len(ready),
            queued_requests=sum(sample.queued_requests for sample in ready),
            queued_tokens=sum(sample.queued_tokens for sample in ready),
            prefill_tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
            utilisation=sum(min(1.0, sample.utilisation) for sample in ready),
            has_room=any(sample.queued_requests < 1 for sample in ready),
        )

    @property
    def backlog_s(self) -> float:
        """Queued prefill of each ready engine; 0 while no rate is known."""
        tokens_per_s = self.prefill_tokens_per_s * self.ready
        return self.queued_tokens / tokens_per_s if tokens_per_s > 0 else 0.0

    def pressures(self, thresholds: Thresholds) -> tuple[float, float]:
        """Engines that bring the queue, and the backlog, down to the up thresholds."""
        by_queue = self.queued_requests / max(thresholds.up_queued_requests, 1 / _LARGEST)
        return by_queue, self.backlog_s * self.ready / max(thresholds.up_backlog_s, 1 / _LARGEST)

    def needed(self, thresholds: Thresholds, share: float = 1.0) -> int:
        """Engines that bring both down to this share of the up thresholds."""
        return math.ceil(min(max(self.pressures(thresholds)) / share, _LARGEST) - 1e-9)

    def moved(self, towards: "Load", weight: float) -> "Load":
        """All the way with a weight of 1, beyond with more; nothing goes below 0."""
        names = ("queued_requests", "queued_tokens", "utilisation")
        ends = ((name, getattr(self, name), getattr(towards, name)) for name in names)
        moved = {name: max(0.0, start + weight * (end - start)) for name, start, end in ends}
        return replace(towards, **moved)


class Removal(NamedTuple):
    """One engine taken away: when, how many were left, and their summed utilisation."""

    at_s: float
    replicas: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class State:
    """What one decision hands to the next. To lose it is harmless: everything is timed afresh."""

    clock_s: float = 0.0  # What all times below are of; goes forward only, in small steps.
    seen_at: float | None = None  # The caller's time at the last call.
    mean: Load | None = None  # The moving average.
    crossed_since_s: float | None = None  # An up threshold is exceeded.
    calm_since_s: float | None = None  # One engine fewer would do.
    grown_at_s: float = 0.0  # The last growth; there may have been one that is forgotten.
    is_growing: bool = True  # Not all that it asked for have come.
    start_s: float = 0.0  # How long the ones before took to come.
    came_at_s: float = 0.0  # When all that it asked for had come.
    removal: Removal | None = None  # The last.
    mistake: Removal | None = None  # The last that was one,
    num_mistakes: int = 0  # how many there were in a row,
    held_until_s: float = 0.0  # and until when that counts.


class Decision(NamedTuple):
    """How many replicas there are to be; why, in a word and a sentence; and of what load."""

    desired: int
    cause: str  # queue, backlog, idle, bounds or kept.
    reason: str
    numbers: Load


class _Case(NamedTuple):
    """All that a decision looks at."""

    load: Load
    mean: Load
    thresholds: Thresholds
    fleet: Fleet
    state: State

    @property
    def needed(self) -> int:
        """Of what will still wait when engines asked for now are ready, should queues fall on as
        they do. A moving average lags behind a slope by its time constant: hence the slope."""
        ahead = self.mean.moved(self.load, 1.0 + self.state.start_s / SMOOTHING_S)
        return min(self.load.needed(self.thresholds), ahead.needed(self.thresholds))

    @property
    def remaining(self) -> int:
        """Ready engines after a removal: Serve first takes what does not run yet."""
        return max(1, min(self.load.ready, self.fleet.target - 1))

    @property
    def is_calm(self) -> bool:
        """One fewer would do, and all that run are ready: what others hold is not known."""
        lesson = self.state.mistake if self.state.clock_s < self.state.held_until_s else None
        is_held = (
            lesson is not None
            and self.remaining <= lesson.replicas
            and self.mean.utilisation >= LESS_LOAD * lesson.utilisation
        )
        return (
            self.fleet.target > self.fleet.least
            and self.load.ready >= max(1, self.fleet.running)
            and self.load.needed(self.thresholds) <= self.remaining
            and self.mean.needed(self.thresholds, DOWN_SHARE) <= self.remaining
            and self.mean.utilisation < self.thresholds.down_utilisation * self.remaining
            and not is_held
        )

    def choice(self) -> tuple[int, str, str]:
        fleet, state, target = self.fleet, self.state, self.fleet.target
        if fleet.clamp(target) != target:
            return fleet.clamp(target), "bounds", f"{fleet.least} to {fleet.max_replicas} may be"
        if state.crossed_since_s is not None:
            obstacle = self.obstacle(state.clock_s - state.crossed_since_s)
            return (target, "kept", obstacle) if obstacle else self.growth()
        if state.calm_since_s is None:
            return target, "kept", "neither more nor fewer are known to be needed"
        calm_s = state.clock_s - state.calm_since_s
        if calm_s < self.thresholds.down_delay_s:
            return target, "kept", f"one fewer would do, but only for {calm_s:.0f} s"
        use = f"{self.mean.utilisation / self.remaining:.0%} of each of {self.remaining}"
        below = f"below {self.thresholds.down_utilisation:.0%} for {calm_s:.0f} s"
        return target - 1, "idle", f"hardly anything waits, and the load is {use}, {below}"

    def obstacle(self, crossed_s: float) -> str:
        """Why none are added although a threshold has been exceeded for so long."""
        fleet, state, thresholds = self.fleet, self.state, self.thresholds
        coming = max(0, fleet.target - self.load.ready)
        if self.needed <= fleet.target:
            return f"{coming} more are on their way and will be enough"
        if coming and state.clock_s - state.grown_at_s < thresholds.warmup_s:
            return f"{coming} more are on their way"
        settle_s = state.start_s if self.load.has_room else min(state.start_s, SETTLE_S)
        if state.clock_s - state.came_at_s < settle_s:
            return "the last ones have only just become ready"
        if crossed_s < thresholds.up_delay_s:
            return f"more are needed, but only for {crossed_s:.1f} s"
        return "" if fleet.target < fleet.max_replicas else "more are needed than are allowed"

    def growth(self) -> tuple[int, str, str]:
        """As many as are needed, at most double. One, if the queue rises no more than by chance:
        there are enough for what arrives then, and only what has gathered takes too long."""
        load, fleet, limits = self.load, self.fleet, self.thresholds
        rise = load.queued_requests - self.mean.queued_requests
        most = 2 * fleet.target if rise > 0.5 * load.queued_requests**0.5 else fleet.target + 1
        by_queue, by_backlog = load.pressures(limits)
        cause = "queue" if by_queue >= by_backlog else "backlog"
        each = f"{load.queued_requests / load.ready:.1f} requests, {load.backlog_s:.1f} s of work"
        allowed = f"{limits.up_queued_requests:g} and {limits.up_backlog_s:g} s are allowed"
        reason = f"for each of {load.ready} engines {each} wait; {allowed}"
        return fleet.clamp(min(self.needed, most)), cause, reason

    def after(self, desired: int, cause: str) -> State:
        """The state once the decision is carried out."""
        state, target = self.state, self.fleet.target
        if desired == target:
            return state
        state = replace(state, crossed_since_s=None, calm_since_s=None, removal=None)
        if desired > target:
            state = state if cause == "bounds" else self.learned(state)
            return replace(state, grown_at_s=state.clock_s, is_growing=True)
        removal = Removal(state.clock_s, desired, self.mean.utilisation)
        return replace(state, removal=removal if cause == "idle" else None)

    def learned(self, state: State) -> State:
        """Of a growth: that the removal shortly before was a mistake."""
        removal = self.state.removal
        delay_s = max(self.thresholds.down_delay_s, SETTLE_S)
        if removal is None or state.clock_s - removal.at_s > MISTAKE_DELAYS * delay_s:
            return state
        first, most = HOLD_DELAYS
        is_again = state.clock_s < state.held_until_s + first * delay_s
        times = state.num_mistakes + 1 if is_again else 1
        until_s = state.clock_s + min(first * 2 ** min(times - 1, 16), most) * delay_s
        return replace(state, mistake=removal, num_mistakes=times, held_until_s=until_s)


def decide(
    samples: Sequence[Sample], thresholds: Thresholds, fleet: Fleet, state: State, now: float
) -> tuple[Decision, State]:
    """`samples` are of running replicas, one of each that reports; `now` is in seconds."""
    case = _observed(Load.of(samples), thresholds, fleet, state, now)
    desired, cause, reason = case.choice()
    return Decision(desired, cause, reason, case.load), case.after(desired, cause)


def _observed(load: Load, thresholds: Thresholds, fleet: Fleet, state: State, now: float) -> _Case:
    """Takes the time and the load into the state."""
    step_s = 0.0
    if math.isfinite(now):
        step_s = 0.0 if state.seen_at is None else min(max(0.0, now - state.seen_at), MAX_STEP_S)
        state = replace(state, clock_s=state.clock_s + step_s, seen_at=now)
    mean = state.mean or load
    if load.ready:
        mean = mean.moved(load, -math.expm1(-step_s / SMOOTHING_S))
    else:  # The first to come are no help to others.
        state = replace(state, grown_at_s=state.clock_s)
    if state.is_growing and load.ready >= fleet.target:
        start_s = min(state.clock_s - state.grown_at_s, thresholds.warmup_s)
        state = replace(state, is_growing=False, start_s=start_s, came_at_s=state.clock_s)
        mean = load  # So that slopes are those since.
    state = replace(state, mean=mean)
    case = _Case(load, mean, thresholds, fleet, state)
    is_crossed = load.ready > 0 and case.needed > load.ready
    crossed_s = _since(is_crossed, state.crossed_since_s, state.clock_s)
    calm_s = _since(case.is_calm, state.calm_since_s, state.clock_s)
    return case._replace(state=replace(state, crossed_since_s=crossed_s, calm_since_s=calm_s))


def _since(holds: bool, since_s: float | None, clock_s: float) -> float | None:
    """From when on it has held without a break."""
    return None if not holds else clock_s if since_s is None else since_s


class _Report(NamedTuple):
    """What a replica last said, when by its own clock, and when that was first seen."""

    stamp: float
    seen_at: float
    stats: Mapping[str, float]
    sample: Sample


class BacklogPolicy:
    """The policy as Serve calls it, which forgets object and state with each new controller and
    each new version of the model; `ctx` is its `AutoscalingContext`."""

    def __init__(self) -> None:
        _LOGGER.setLevel(logging.INFO)  # Even where Serve's own logger is set to errors only.
        self._reports: dict[Any, _Report] = {}
        self._has_failed = False
        self._metrics: list[Any] | None = []

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        try:
            return self._decide(ctx, float(ctx.current_time or 0.0))
        except Exception:
            # One that got out would keep Serve from updating any application.
            if not self._has_failed:
                _LOGGER.exception("%s: autoscaling failed, the target is kept", ctx.app_name)
            self._has_failed = True
            return ctx.target_num_replicas, {}

    def _decide(self, ctx: Any, now: float) -> tuple[int, dict[str, Any]]:
        bounds = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        fleet = Fleet(ctx.target_num_replicas, ctx.current_num_replicas, *bounds)
        reports = self._take_reports(ctx, now)
        newest = max(reports, key=lambda report: report.stamp).stats if reports else {}
        samples, thresholds = [report.sample for report in reports], Thresholds.parse(newest)
        state = ctx.policy_state.get("shoal") or State()
        decision, state = decide(samples, thresholds, fleet, state, now)
        self._tell(str(ctx.app_name), fleet.target, decision)
        return decision.desired, {"shoal": state}

    def _take_reports(self, ctx: Any, now: float) -> list[_Report]:
        """The last report of each running replica, unless it is old; each is parsed once. Serve's
        aggregates would be late, and cost ten times as much."""
        raw = ctx.raw_metrics or {}
        former, self._reports, stamps = self._reports, {}, raw.get("ready", {})
        for replica in ctx.running_replicas:
            report, points = former.get(replica), stamps.get(replica)
            if points and (report is None or points[-1].timestamp != report.stamp):
                stats = {key: of[replica][-1].value for key, of in raw.items() if of.get(replica)}
                report = _Report(points[-1].timestamp, now, stats, Sample.parse(stats))
            if report is not None:
                is_later = report.seen_at > now  # Time has gone back.
                self._reports[replica] = report._replace(seen_at=now) if is_later else report
        return [each for each in self._reports.values() if now - each.seen_at <= STALE_S]

    def _tell(self, application: str, target: int, decision: Decision) -> None:
        """Metrics each time, one line in the log for each change."""
        model = urllib.parse.unquote(application.removeprefix("engine-"))
        if decision.desired != target:
            change = model, target, decision.desired, decision.reason
            _LOGGER.info("%s: from %d to %d engines: %s", *change)
        tags = {"model": model, "application": application}
        try:
            self._record(tags, decision, decision.desired - target)
        except Exception:
            self._metrics = None

    def _record(self, tags: dict[str, str], decision: Decision, change: int) -> None:
        """Into metrics that are made when they are first wanted. They may raise, once."""
        if self._metrics is None:
            return
        if not self._metrics:
            from ray.util.metrics import Counter, Gauge

            keys, change_keys = tuple(tags), (*tags, "direction", "reason")
            texts = {
                "target_replicas": "Replicas that the model is to have.",
                "backlog_seconds": "Queued prefill of each ready engine at its measured rate.",
                "queued_requests": "Requests that wait in the ready engines.",
            }
            named = [(f"shoal_autoscaler_{name}", text) for name, text in texts.items()]
            self._metrics = [Gauge(name, text, tag_keys=keys) for name, text in named]
            self._metrics.append(Counter("shoal_autoscaler_decisions", tag_keys=change_keys))
        values = decision.desired, decision.numbers.backlog_s, decision.numbers.queued_requests
        for gauge, value in zip(self._metrics, values, strict=False):
            gauge.set(value, tags=tags)
        if change:
            direction = "up" if change > 0 else "down"
            self._metrics[-1].inc(tags={**tags, "direction": direction, "reason": decision.cause})
