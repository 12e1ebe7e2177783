"""What a supervisor tells Ray of its engine."""

from typing import Any

import pytest

from engine.device_metrics import DEVICE_STATS
from replicas import metrics
from replicas.load_window import SIGNALS
from replicas.metrics import EngineGauges


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By its name, what each gauge was set to last."""
    values: dict[str, float] = {}

    class Gauge:
        def __init__(self, name: str, **options: Any) -> None:
            self.name = name

        def set_default_tags(self, tags: dict[str, str]) -> None:
            assert tags == {"model": "m", "engine": "e"}

        def set(self, value: float) -> None:
            values[self.name] = value

    monkeypatch.setattr(metrics, "Gauge", Gauge)
    return values


def test_a_device_shows_what_it_gives_and_leaves_zeros(shown: dict[str, float]) -> None:
    gauges = EngineGauges("m", "e")
    signals = dict.fromkeys(SIGNALS, 1.0)
    gauges.set(signals, {"device_power_w": 300.0, "device_temperature_c": 40.0, "waiting": 3})
    assert shown["shoal_replica_device_power_w"] == 300.0
    assert shown["shoal_replica_scheduler_waiting"] == 3
    assert shown["shoal_replica_ready"] == 1.0
    assert "shoal_replica_device_utilisation" not in shown
    gauges.clear()
    assert shown["shoal_replica_device_power_w"] == 0.0
    assert set(shown.values()) == {0.0}


def test_without_a_gpu_there_are_no_figures_of_one(shown: dict[str, float]) -> None:
    gauges = EngineGauges("m", "e")
    gauges.set(dict.fromkeys(SIGNALS, 1.0), {})
    gauges.clear()
    assert not [name for name in shown if name.removeprefix("shoal_replica_") in DEVICE_STATS]
