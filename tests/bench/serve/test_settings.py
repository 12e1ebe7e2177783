"""Options that go together, and those that don't."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.serve.command import serve
from bench.serve.settings import Settings, flag, read_preset
from bench.serve.traces import TraceEntry

_PRESETS = sorted((Path(__file__).parents[3] / "bench/workloads/serve").glob("*.json"))


def _settings(**changes: Any) -> Settings:
    with serve.make_context("serve", []) as context:
        values = {name: context.params[name] for name in Settings.__dataclass_fields__}
    return Settings(**{**values, **changes})


def _usage_error(*arguments: str) -> str:
    result: Result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "2", "--rate", "1"], "closed loop"),
        (["--workload", "trace"], "needs --trace"),
        (["--groups", "3"], "--groups is for --workload shared-prefix, not random"),
        (["--think-time", "1"], "--think-time is for --workload multi-turn"),
        (["--token-ids"], "needs --api completions"),
        (["--token-ids", "--api", "completions", "--workload", "multi-turn"], "are text"),
        (["--vocab-size", "9"], "--vocab-size is for --token-ids"),
        (["--url", "localhost:8000"], "http://HOST:PORT"),
        (["--url", "http://me:pw@host"], "user or password"),
        (["--extra-body", "{"], "--extra-body"),
        (["--extra-body", "[]"], "JSON object"),
        (["--rate", "0"], "x>0"),
        (["--requests", "0"], "x>=1"),
        (["--json", "/nowhere/at/all.json"], "no such folder"),
        (["--preset", "nothing"], "chat, shared-prefix-73, smoke"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], words: str) -> None:
    assert words in _usage_error(*arguments)


def test_a_bad_trace_or_preset_is_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("nothing of the kind\n")
    assert "neither Mooncake" in _usage_error("--workload", "trace", "--trace", str(path))
    assert "--preset" in _usage_error("--preset", str(path))
    path.write_text('{"frobnicate": 1}')
    assert "no such option: frobnicate" in _usage_error("--preset", str(path))


@pytest.mark.parametrize("path", _PRESETS, ids=lambda path: path.stem)
def test_presets_are_options(path: Path) -> None:
    assert json.loads(path.read_text())["description"]
    with serve.make_context("serve", ["--preset", path.stem, "--seed", "99"]) as context:
        values = {name: context.params[name] for name in Settings.__dataclass_fields__}
    preset = read_preset(path.stem)
    assert {name: values[name] for name in preset if name != "seed"} == {
        name: value for name, value in preset.items() if name != "seed"
    }
    assert values["seed"] == 99, "what is given goes before the preset"
    Settings(**values).check(set(preset))


def test_urls() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert _settings(url=url).base_url() == "http://h:1"
    assert _settings(url="https://h/serve/v1").base_url() == "https://h/serve"


def test_pacing_and_limits() -> None:
    trace = [TraceEntry(5.0, 10, 2), TraceEntry(7.0, 10, 2)]
    default = _settings()
    assert (default.pacing.concurrency, default.num_requests) == (8, 100)
    assert len(list(default.conversations([]))) == 100
    timed = _settings(duration_s=3.0)
    assert timed.num_requests is None
    by_rate = _settings(rate=2.0, requests=5)
    assert by_rate.pacing.concurrency is None
    assert all(one.offset_s is not None for one in by_rate.conversations([]))
    by_trace = _settings(workload="trace", trace=Path("t"), time_scale=0.5)
    assert by_trace.pacing.concurrency is None
    assert [one.offset_s for one in by_trace.conversations(trace)] == [0.0, 1.0]
    closed_trace = _settings(workload="trace", trace=Path("t"), concurrency=3)
    assert closed_trace.pacing.concurrency == 3
    faster = _settings(workload="trace", trace=Path("t"), rate=float("inf"))
    assert [one.offset_s for one in faster.conversations(trace)] == [0.0, 0.0]


def test_warm_up_shares_no_content() -> None:
    settings = _settings(workload="shared-prefix", warmup=5, input_tokens=40)
    warm = list(settings.warmup_conversations([]))
    assert len(warm) == 5
    measured = list(itertools.islice(settings.conversations([]), 5))
    assert warm == measured, "of the same shape"
    for one in warm:
        text = settings.renderer("/warm-up").render(one.system)
        assert text != settings.renderer().render(one.system)


def test_flags_are_flat_json() -> None:
    flags = _settings(rate=float("inf"), trace=Path("a/b")).as_flags()
    assert json.loads(json.dumps(flags, allow_nan=False)) == flags
    assert (flags["flag_rate"], flags["flag_trace"]) == ("inf", "a/b")
    assert len(flags) == len(Settings.__dataclass_fields__)
    assert flag("slo_ttft_ms") == "--slo-ttft"
