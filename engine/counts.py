"""What a scheduler has done since it began: totals only, so that a reader takes differences."""

from dataclasses import dataclass, field

from engine.wire import ServiceClass


@dataclass(slots=True)
class SchedulerCounts:
    preempted: int = 0
    """Times that a running request went back to the queue, for whatever reason."""
    displaced: int = 0
    """Of them, to make room for a stronger class."""
    timed_out: int = 0
    """Requests that waited longer than they may."""
    copied_tokens: int = 0
    """Found in a part of another request's block, and copied."""
    restored_tokens: int = 0
    """Of preempted requests: found on the device or in host memory when they came back."""
    recomputed_tokens: int = 0
    """Of preempted requests: computed once more."""
    started: dict[ServiceClass, int] = field(default_factory=lambda: dict.fromkeys(ServiceClass, 0))
    """Requests that have begun."""
    queued_s: dict[ServiceClass, float] = field(
        default_factory=lambda: dict.fromkeys(ServiceClass, 0.0)
    )
    """Seconds that those have waited before, together."""

    def note_start(self, service_class: ServiceClass, queued_s: float) -> None:
        self.started[service_class] += 1
        self.queued_s[service_class] += queued_s

    def note_return(self, num_lost: int, num_found: int) -> None:
        """A preempted request that had `num_lost` tokens computed is back with `num_found`."""
        restored = min(num_lost, num_found)
        self.restored_tokens += restored
        self.recomputed_tokens += num_lost - restored

    def as_stats(self) -> dict[str, float]:
        stats: dict[str, float] = {
            "preemptions": self.preempted,
            "displaced": self.displaced,
            "queue_timeouts": self.timed_out,
            "copied_tokens": self.copied_tokens,
            "restored_tokens": self.restored_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }
        for each in ServiceClass:
            name = each.name.lower()
            stats[f"started_{name}"] = self.started[each]
            stats[f"queued_s_{name}"] = self.queued_s[each]
        return stats
