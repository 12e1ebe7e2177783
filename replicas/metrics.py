"""What a supervisor tells Ray of its engine: `ray_shoal_*` on each node's metrics port.

Invariant: an engine that is gone leaves zeros, and metrics that fail touch nothing else.
"""

import contextlib
from collections.abc import Mapping

from ray.util.metrics import Gauge

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
"""Of `EngineCore.stats`."""


class EngineGauges:
    """The signals of one engine, and what its cache counts."""

    def __init__(self, model: str, replica_id: str) -> None:
        tags = {"model": model, "engine": replica_id}
        described = SIGNALS | {f"cache_{name}": text for name, text in CACHE_STATS.items()}
        self._gauges = {
            name: Gauge(f"shoal_replica_{name}", description=text, tag_keys=tuple(tags))
            for name, text in described.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)

    def set(self, signals: Mapping[str, float], stats: Mapping[str, float]) -> None:
        """Of `LoadWindow.signals`, and of `EngineCore.stats`; what is not there is zero."""
        shown = {**signals, **{f"cache_{name}": stats.get(name, 0.0) for name in CACHE_STATS}}
        for name, gauge in self._gauges.items():
            with contextlib.suppress(Exception):
                gauge.set(shown[name])

    def clear(self) -> None:
        self.set(dict.fromkeys(SIGNALS, 0.0), {})
