"""`shoal bench serve` as it is called: against a real ingress and engine, and against nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serve import plot
from bench.serve.plot import PlotUnavailable
from cluster.cli import main
from engine.models.resolve import resolve_model
from tests.cluster.conftest import MODEL_NAME, Served, serve_ingress, simulated

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """2 ms a step, and an output never ends by itself."""
    with serve_ingress(simulated(step_s=0.002), resolve_model("default")) as served:
        yield served


def _bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shoal", "bench", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_shared_prefix_load_on_shoal(
    server: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures_path, picture_path = tmp_path / "figures.json", tmp_path / "picture.png"
    code = _bench(
        monkeypatch,
        *("--url", server.url, "--workload", "shared-prefix", "--groups", "2", "--users", "3"),
        *("--shared-tokens", "256", "--input-tokens", "32", "--output-tokens", "20"),
        *("--rate", "60", "--requests", "24", "--warmup", "2", "--slo-ttft", "60000"),
        *("--json", str(figures_path), "--png", str(picture_path)),
    )
    assert code == 0
    got: dict[str, Any] = json.loads(figures_path.read_text())
    assert (got["model"], got["interrupted"], got["requests_ok"]) == (MODEL_NAME, False, 24)
    assert (got["output_tokens"], got["output_tokens_by"]) == (24 * 20, "usage")
    assert 24 * 288 < got["input_tokens"] < 24 * 340, "words are tokens, and a template around"
    assert got["cached_share"] > 0.4
    assert got["cached_tokens_reported_by"] == 24
    assert got["tpot_ms_p50"] >= 2.0
    assert 0 < got["ttft_ms_p50"] <= got["ttft_ms_p99"] <= got["e2e_ms_max"]
    assert got["goodput_share"] == 1.0
    assert (got["flag_rate"], got["flag_groups"], got["flag_slo_ttft_ms"]) == (60, 2, 60000)
    assert not any(isinstance(value, dict | list) for value in got.values())
    assert picture_path.read_bytes().startswith(_PNG_MAGIC)
    table = capsys.readouterr().out
    assert "2 groups × 3 users" in table
    assert "latency counts from when a request is due" in table
    assert "24 complete, 0 failed" in table


def test_conversations_find_their_own_history_cached(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    code = _bench(
        monkeypatch,
        *("--url", f"{server.url}/v1", "--workload", "multi-turn", "--turns", "4"),
        *("--shared-tokens", "0", "--input-tokens", "64", "--output-tokens", "16"),
        *("--requests", "8", "--concurrency", "2", "--json", str(path)),
    )
    got = json.loads(path.read_text())
    assert (code, got["requests_ok"]) == (0, 8)
    assert got["cached_share"] > 0.4


def test_a_trace_keeps_its_times(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    line = '{{"timestamp": {}, "input_length": 700, "output_length": 9, "hash_ids": [1, {}]}}\n'
    trace.write_text("".join(line.format(number * 1000, number + 2) for number in range(4)))
    code = _bench(
        monkeypatch,
        *("--url", server.url, "--workload", "trace", "--trace", str(trace)),
        *("--time-scale", "0.2", "--max-output-tokens", "5", "--json", str(path)),
    )
    got = json.loads(path.read_text())
    assert (code, got["requests_ok"], got["output_tokens"]) == (0, 4, 20)
    assert 0.6 < got["duration_s"] < 5
    assert got["cached_tokens"] >= 3 * 496


def test_every_request_refused_is_exit_1(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _bench(monkeypatch, "--url", server.url, "--input-tokens", "9000", "--requests", "2")
    assert code == 1
    assert "failed: 2 × status_400, first: 400 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--extra-body", '{"frobnicate": 1}'], "refuses the request: 400"),
        (["--model", "other"], "404"),
    ],
)
def test_a_refusal_is_told_before_the_load(
    server: Served,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _bench(monkeypatch, "--url", server.url, *arguments) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_no_server_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(monkeypatch, "--url", "http://127.0.0.1:9") == 1
    assert "http://127.0.0.1:9/v1/models: " in capsys.readouterr().err


def test_no_matplotlib_is_told_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _bench(monkeypatch, "--png", str(tmp_path / "x.png")) == 1
    assert "shoal[bench]" in capsys.readouterr().err
    with pytest.raises(PlotUnavailable):
        plot.require_matplotlib()


def test_ctrl_c_shows_what_there_is(server: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "cluster", "bench", "serve", "--url", server.url]
    options = ["--input-tokens", "8", "--output-tokens", "10", "--duration", "60"]
    process = subprocess.Popen(
        [*command, *options, "--json", str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        server.wait_running(1, timeout_s=20)
        # A moment of load, so that some answers are complete.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    got = json.loads(path.read_text())
    assert got["interrupted"] is True
    assert got["requests_ok"] > 10
    assert got["requests_failed"] == 0
    assert "interrupted" in output
    server.wait_idle()
