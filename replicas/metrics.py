"""What a supervisor tells Ray of its engine: `ray_shoal_*` on each node's metrics port.

Invariant: an engine that is gone leaves zeros, and metrics that fail touch nothing else.
"""

import contextlib
from collections.abc import Mapping

from ray.util.metrics import Gauge

from engine.device_metrics import DEVICE_STATS
from replicas.load_window import SIGNALS

CACHE_STATS = {
    "num_blocks": "KV blocks of the device.",
    "held_blocks": "KV blocks that requests hold.",
    "cached_blocks": "Blocks that can be found in the prefix cache.",
    "evicted_blocks": "Cached blocks given up, since the engine started.",
    "holes": "Chains found with a key missing in the middle: none, unless there is a fault.",
    "copied_tokens": "Tokens found in a part of a block, and copied.",
    "slots": "Blocks of the host tier.",
    "saved_blocks": "Blocks copied to the host tier.",
    "unsaved_blocks": "Blocks not copied, because requests held all of the host tier.",
    "loaded_blocks": "Blocks that requests found in the host tier.",
    "promoted_blocks": "Blocks read from disk into the host tier.",
    "missed_blocks": "Blocks asked of the disk in vain.",
    "unwritten_blocks": "Blocks not written, because the disk did not keep up.",
    "disk_bytes": "Bytes on disk.",
    "disk_corrupt": "Files on disk that were not what was stored, and are deleted.",
    "disk_failed": "Errors of the disk's file system.",
}
SCHEDULER_STATS = {
    "waiting": "Requests that wait.",
    "steps": "Steps since the engine started, as are all totals here.",
    "computed_tokens": "Tokens computed: over steps, the size of a batch.",
    "step_s": "Seconds of the last step.",
    "step_age_s": "Seconds since the running step began.",
    "busy_s": "Seconds that the device computed: over time, its utilisation.",
    "wait_s": "Seconds that it stood still between two steps although there was work.",
    "plan_s": "Seconds spent on making plans and taking over results: over steps, what one takes.",
    "preemptions": "Times that a running request went back to the queue.",
    "displaced": "Of them, to make room for a stronger class.",
    "restored_tokens": "Of preempted requests, found in the cache when they came back.",
    "recomputed_tokens": "Of preempted requests, computed once more.",
    "queue_timeouts": "Requests that waited longer than they may.",
    **{
        f"{name}_{service_class}": f"{text}, class {service_class}."
        for service_class in ("interactive", "standard", "batch")
        for name, text in (
            ("started", "Requests that have begun"),
            ("queued_s", "Seconds that those have waited before"),
        )
    },
}
"""Of `EngineCore.stats`, as are the others."""
_STATS = {
    **{f"cache_{name}": (name, text) for name, text in CACHE_STATS.items()},
    **{f"scheduler_{name}": (name, text) for name, text in SCHEDULER_STATS.items()},
}
"""By the name of the metric: of the figure, and what it is."""


class EngineGauges:
    """The signals of one engine, what its cache and its scheduler count, and what its GPU says."""

    def __init__(self, model: str, replica_id: str) -> None:
        tags = {"model": model, "engine": replica_id}
        counted = {metric: text for metric, (_, text) in _STATS.items()}
        described = {**SIGNALS, **counted, **DEVICE_STATS}
        self._gauges = {
            name: Gauge(f"shoal_replica_{name}", description=text, tag_keys=tuple(tags))
            for name, text in described.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)
        self._seen: dict[str, float] = {}
        """Zero for each figure that the device has given once: others never appear."""

    def set(self, signals: Mapping[str, float], stats: Mapping[str, float]) -> None:
        """Of `LoadWindow.signals`, and of `EngineCore.stats`; what is not there is zero, but for
        what the device has never given."""
        counted = {metric: stats.get(name, 0.0) for metric, (name, _) in _STATS.items()}
        device = {name: stats[name] for name in DEVICE_STATS if name in stats}
        self._seen |= dict.fromkeys(device, 0.0)
        for name, value in {**signals, **counted, **self._seen, **device}.items():
            with contextlib.suppress(Exception):
                self._gauges[name].set(value)

    def clear(self) -> None:
        self.set(dict.fromkeys(SIGNALS, 0.0), {})
