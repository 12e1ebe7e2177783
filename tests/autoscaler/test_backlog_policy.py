"""The policy as Serve calls it: its reports, its state, its log, its metrics, and the way there."""

import logging
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from autoscaler import policy
from autoscaler.policy import STALE_S, BacklogPolicy

APPLICATION = "engine-org%2fmodel"
THRESHOLDS = {
    "up_queued_requests": 4.0,
    "up_backlog_s": 5.0,
    "up_delay_s": 1.0,
    "down_utilisation": 0.5,
    "down_delay_s": 60.0,
    "warmup_s": 120.0,
}


class Point(NamedTuple):
    """As Serve's `TimeStampedValue`."""

    timestamp: float
    value: float


def stats(queued: float = 0.0, **others: float) -> dict[str, float]:
    """What `EngineSupervisor.record_autoscaling_stats` answers."""
    load = {
        "ready": 1.0,
        "queued_requests": queued,
        "queued_tokens": 0.0,
        "prefill_tokens_per_s": 1000.0,
        "running": 1.0,
        "utilisation": 0.1,
    }
    return {**load, **THRESHOLDS, **others}


class Controller:
    """Serve's, as far as a policy sees it."""

    def __init__(self, target: int = 2, least: int = 1, most: int = 10) -> None:
        self.policy: Any = BacklogPolicy()
        self.target = target
        self.least = least
        self.most = most
        self.state: dict[str, Any] = {}
        self.now = 1.7e9
        self.config: Any = None
        self.total_num_requests = 0.0
        self.reports: dict[str, tuple[float, dict[str, Any]]] = {}

    def report(self, *each: dict[str, Any]) -> None:
        """One dictionary for each running replica."""
        reports = {f"replica-{number}": (self.now, one) for number, one in enumerate(each)}
        self.reports = reports

    def context(self) -> AutoscalingContext:
        raw: dict[str, dict[str, list[Point]]] = {}
        for replica, (stamp, values) in self.reports.items():
            for name, value in values.items():
                # The last of a series counts.
                points = [Point(stamp - 0.2, 77.0), Point(stamp, value)]
                raw.setdefault(name, {})[replica] = points
        return AutoscalingContext(
            deployment_id=None,
            deployment_name="Supervisor",
            app_name=APPLICATION,
            current_num_replicas=len(self.reports),
            target_num_replicas=self.target,
            running_replicas=list(self.reports),
            total_num_requests=self.total_num_requests,
            total_queued_requests=0.0,
            aggregated_metrics=lambda: pytest.fail("far too slow"),
            raw_metrics=lambda: raw,
            capacity_adjusted_min_replicas=self.least,
            capacity_adjusted_max_replicas=self.most,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=self.config,
        )

    def tick(self) -> int:
        self.now += 0.1
        desired, self.state = self.policy(self.context())
        self.target = max(self.least, min(self.most, desired))
        return desired

    def run(self, seconds: float, *each: dict[str, Any]) -> int:
        """Reports come twice a second."""
        for tick in range(round(seconds * 10)):
            if tick % 5 == 0:
                self.report(*each)
            desired = self.tick()
        return desired


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What Serve's log says, where Serve is set to errors only."""
    serve = logging.getLogger("ray.serve")
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, level = Handler(), serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.ERROR)
    yield said
    serve.removeHandler(handler)
    serve.setLevel(level)


# ------------------------------------------------------------ decisions


def test_reports_become_decisions() -> None:
    controller = Controller()
    controller.run(20, stats(), stats())
    assert controller.run(2, stats(6), stats(7)) == 4
    controller = Controller()
    assert controller.run(63, stats(), stats()) == 1


def test_no_reports_keep_the_target() -> None:
    controller = Controller(target=3)
    assert controller.run(200) == 3
    assert controller.run(200, stats(99, ready=0.0), {}) == 3


def test_thresholds_come_with_the_reports() -> None:
    controller = Controller()
    lax = {"up_queued_requests": 50.0, "up_backlog_s": 1000.0}
    assert controller.run(30, stats(9, **lax), stats(9, **lax)) == 2
    assert controller.run(2, stats(9, up_queued_requests=8.0), stats(9)) == 3


def test_the_newest_report_has_the_thresholds() -> None:
    controller = Controller()
    controller.run(20, stats(), stats())
    for _ in range(30):
        controller.report(stats(9, up_queued_requests=50.0), stats(9))
        stamp, values = controller.reports["replica-0"]
        controller.reports["replica-0"] = (stamp + 0.01, values)
        assert controller.tick() == 2


@pytest.mark.parametrize("jump_s", [0.0, 3600.0])
def test_a_silent_replica_is_not_taken_at_its_word_for_ever(jump_s: float) -> None:
    """Nor when the clock goes back."""
    controller = Controller(most=2)
    controller.report(stats(), stats(99))
    frozen = controller.reports["replica-1"]
    controller.tick()
    controller.now -= jump_s
    for tick in range(3000):
        if tick % 5 == 0:
            controller.report(stats(3), stats())
            controller.reports["replica-1"] = frozen
        if tick > 10 * STALE_S + 10:
            controller.most = 10
        assert controller.tick() == 2
    # It is still one that runs, and nobody knows what it holds.
    assert controller.run(65, stats(), stats()) == 1


def test_a_report_that_fails_to_come_once_is_bridged() -> None:
    controller = Controller()
    for _ in range(13):
        controller.run(5, stats(), stats())
        controller.reports["replica-1"] = (controller.now, {})
        controller.tick()
    assert controller.target == 1


@given(
    values=st.lists(
        st.dictionaries(
            st.sampled_from(sorted(stats())),
            st.floats() | st.sampled_from([math.nan, -math.inf, -1.0, 1e308, "x", None]),
        ),
        min_size=1,
        max_size=4,
    ),
    jump_s=st.sampled_from([0.0, -1e9, 1e9]),
)
def test_nonsense_is_not_acted_on(values: list[dict[str, Any]], jump_s: float) -> None:
    controller = Controller(target=len(values), most=8)
    for tick in range(60):
        if tick % 5 == 0:
            controller.now += jump_s
            controller.report(*({**stats(), **each} for each in values))
        before, desired = controller.target, controller.tick()
        assert before - 1 <= desired <= 2 * before
        assert 1 <= desired <= 8
    assert not controller.policy._has_failed


def test_nonsense_of_one_keeps_all() -> None:
    """What it holds is not known, so none may be taken away, and it adds nothing to the queue."""
    for nonsense in (math.nan, math.inf, -1.0, 1e300):
        controller = Controller()
        assert controller.run(100, stats(), stats(queued_requests=nonsense)) == 2
        controller = Controller()
        assert controller.run(100, stats(), stats(utilisation=nonsense)) == 2


# ------------------------------------------------------------ faults, logs, metrics


def test_one_line_for_each_change(lines: list[str]) -> None:
    controller = Controller()
    controller.run(20, stats(), stats())
    assert lines == []
    controller.run(30, stats(6), stats(7))
    controller.run(70, *[stats()] * 4)
    assert lines == [
        "org/model: from 2 to 4 engines: for each of 2 engines 6.5 requests, 0.0 s of work wait; "
        "4 and 5 s are allowed",
        "org/model: from 4 to 3 engines: hardly anything waits, and the load is 13% of each of 3, "
        "below 50% for 60 s",
    ]


def test_a_fault_keeps_the_target_and_is_said_once(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(target=3)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "decide", lambda *_: 1 / 0)
        assert controller.run(5, stats()) == 3
    assert lines == [f"{APPLICATION}: autoscaling failed, the target is kept"]
    controller.run(20, *[stats()] * 3)
    assert controller.run(3, *[stats(9)] * 3) == 6


class Instrument:
    def __init__(self, name: str, text: str = "", tag_keys: tuple[str, ...] = ()) -> None:
        self.tag_keys = tag_keys
        self.values: dict[tuple[str, ...], float] = {}
        INSTRUMENTS[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[tuple(tags[key] for key in self.tag_keys)] = value

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        key = tuple((tags or {})[key] for key in self.tag_keys)
        self.values[key] = self.values.get(key, 0.0) + value


INSTRUMENTS: dict[str, Instrument] = {}


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    module = ModuleType("ray.util.metrics")
    module.__dict__.update(Counter=Instrument, Gauge=Instrument)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", module)
    INSTRUMENTS.clear()
    return INSTRUMENTS


def test_metrics(metrics: dict[str, Instrument]) -> None:
    controller = Controller()
    assert metrics == {}
    controller.run(20, stats(), stats())
    controller.run(3, stats(6, queued_tokens=3000.0), stats(7))
    controller.run(70, *[stats()] * 4)
    controller.run(1, stats(6, queued_tokens=3000.0), *[stats()] * 2)
    of = ("org/model", APPLICATION)
    assert {name: instrument.values for name, instrument in metrics.items()} == {
        "shoal_autoscaler_target_replicas": {of: 3.0},
        "shoal_autoscaler_backlog_seconds": {of: 1.0},
        "shoal_autoscaler_queued_requests": {of: 6.0},
        "shoal_autoscaler_decisions": {(*of, "up", "queue"): 1.0, (*of, "down", "idle"): 1.0},
    }


@pytest.mark.parametrize("module", [None, ModuleType("ray.util.metrics")])
def test_metrics_may_be_missing(
    module: ModuleType | None, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.metrics", module)
    controller = Controller()
    controller.run(20, stats(), stats())
    assert controller.run(3, stats(6), stats(7)) == 4
    assert len(lines) == 1


def test_serves_wrapper_leaves_decisions_and_state_alone() -> None:
    """With the options of `replicas.application.live_options`."""
    controller = Controller()
    controller.config = AutoscalingConfig(
        min_replicas=1, max_replicas=10, upscale_delay_s=0, downscale_delay_s=0
    )
    controller.policy = _apply_autoscaling_config(controller.policy)
    controller.run(20, stats(), stats())
    state = controller.state["shoal"]
    assert state.clock_s == pytest.approx(19.9)
    assert controller.run(2, stats(6), stats(7)) == 4
    assert controller.run(300, *[stats()] * 4) == 1
    assert controller.state["shoal"].removal.replicas == 1

    # With no process yet: what is to be stays, and so does the state.
    controller.target, controller.reports = 3, {}
    clock_s = controller.state["shoal"].clock_s
    assert controller.run(2) == 3
    assert controller.state["shoal"].clock_s == pytest.approx(clock_s + 2)
    # At zero Serve wakes the model without asking, and hands the state on.
    controller.target, controller.least, controller.total_num_requests = 0, 0, 1.0
    assert controller.tick() == 1
    assert "shoal" in controller.state
    # Nobody calls: it stays at zero.
    controller.target, controller.total_num_requests = 0, 0.0
    assert controller.run(5) == 0


def test_it_travels_by_value_and_needs_nothing_of_shoal(tmp_path: Path) -> None:
    """A controller may run where Shoal is not installed."""
    given_policy = AutoscalingPolicy(policy_function="autoscaler.policy:BacklogPolicy")
    file = tmp_path / "policy"
    file.write_bytes(given_policy.get_serialized_policy_def())
    script = f"""
        import sys
        from importlib.abc import MetaPathFinder

        class Nothing(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] in {{"autoscaler", "configs", "engine", "replicas"}}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Nothing())
        from ray import cloudpickle
        from types import SimpleNamespace as Some

        policy = cloudpickle.loads(open({str(file)!r}, "rb").read())()
        state = {{}}
        for tick in range(40):
            point = Some(timestamp=tick, value=1.0)
            raw = {{name: {{"a": [point]}} for name in ("ready", "prefill_tokens_per_s")}}
            raw["queued_requests"] = {{"a": [Some(timestamp=tick, value=9.0)]}}
            desired, state = policy(Some(
                app_name="engine-m", current_time=1000.0 + tick / 10, raw_metrics=raw,
                target_num_replicas=1, current_num_replicas=1, running_replicas=["a"],
                capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4,
                policy_state=state,
            ))
            if desired > 1:
                break
        print(desired, policy._has_failed, type(state["shoal"]).__name__)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["2", "False", "State"], done.stderr


def test_it_imports_the_standard_library_only() -> None:
    lines = Path(policy.__file__).read_text(encoding="utf-8").splitlines()
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    imported = {name.partition(".")[0] for name in imports}
    assert imported
    assert imported <= sys.stdlib_module_names
