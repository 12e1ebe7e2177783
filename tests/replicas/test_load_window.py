"""What the autoscaler is told of an engine."""

import pytest

from replicas.load_window import LoadWindow


def stats(**changes: float) -> dict[str, float]:
    idle = {
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 100,
        "held_blocks": 0,
        "num_blocks": 1000,
        "steps": 0,
        "computed_tokens": 0,
        "busy_s": 0.0,
        "prefill_tokens_per_s": 0.0,
    }
    return {**idle, **changes}


def test_an_engine_that_is_not_ready_has_no_load() -> None:
    window = LoadWindow()
    assert set(window.signals().values()) == {0.0}
    window.add(11.0, stats(running=5, waiting=3))
    assert window.signals()["ready"] == 1
    window.reset()
    assert set(window.signals().values()) == {0.0}


def test_the_scarcest_of_three_is_the_utilisation() -> None:
    window = LoadWindow()
    window.add(1.0, stats(running=5, held_blocks=100))
    assert window.signals()["utilisation"] == 0.5
    window.add(2.0, stats(running=1, held_blocks=800))
    assert window.signals()["utilisation"] == 0.8
    # Ten steps of 90 tokens with a budget of 100, running for half of the second.
    window.add(3.0, stats(steps=10, computed_tokens=900, busy_s=0.5))
    assert window.signals()["utilisation"] == pytest.approx(0.45)
    window.add(4.0, stats(steps=10, computed_tokens=900, busy_s=0.5))
    assert window.signals()["utilisation"] == 0


def test_queues_are_those_of_the_last_look() -> None:
    window = LoadWindow()
    window.add(101.0, stats(waiting=7, waiting_tokens=5000, prefill_tokens_per_s=2500, running=2))
    signals = window.signals()
    assert signals["queued_requests"] == 7
    assert signals["queued_tokens"] == 5000
    assert signals["prefill_tokens_per_s"] == 2500
    assert signals["running"] == 2
