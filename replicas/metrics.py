"""What a supervisor tells Ray of its engine: `ray_shoal_*` on each node's metrics port.

Invariant: an engine that is gone leaves zeros, and metrics that fail touch nothing else.
"""

import contextlib
from collections.abc import Mapping

from ray.util.metrics import Gauge

from replicas.load_window import SIGNALS


class EngineGauges:
    """The signals of one engine."""

    def __init__(self, model: str, replica_id: str) -> None:
        tags = {"model": model, "engine": replica_id}
        self._gauges = {
            name: Gauge(f"shoal_replica_{name}", description=text, tag_keys=tuple(tags))
            for name, text in SIGNALS.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)

    def set(self, signals: Mapping[str, float]) -> None:
        """Of `LoadWindow.signals`."""
        for name, gauge in self._gauges.items():
            with contextlib.suppress(Exception):
                gauge.set(signals[name])

    def clear(self) -> None:
        self.set(dict.fromkeys(SIGNALS, 0.0))
