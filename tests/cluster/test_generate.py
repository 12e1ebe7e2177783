"""`shoal` and `shoal generate` as a user runs them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import cluster.cli
import cluster.commands.generate
from configs.engine import EngineConfig, SimulationConfig


def _shoal(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_help_lists_the_commands_and_imports_none() -> None:
    code = (
        "import sys, cluster.cli;"
        "sys.argv = ['shoal', '--help'];\n"
        "try: cluster.cli.main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'bench', 'transformers', 'fastapi', 'pydantic'}\n"
        "print('imported', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "generate  Generate text from one prompt, with an engine of its own." in done.stdout
    assert "serve " in done.stdout
    assert "imported []" in done.stdout


def test_exit_codes_and_messages(tmp_path: Path) -> None:
    assert _shoal("--version").stdout.startswith("shoal, version ")
    assert _shoal("no-such-command").returncode == 2
    usage = _shoal("generate", "x", "--threads", "0")
    assert usage.returncode == 2
    assert "--threads: " in usage.stderr
    refused = _shoal("generate", "x", "--model", str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: ")
    assert "config.json" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_command_whose_module_is_gone_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    gone = EntryPoint("gone", "no_such_package.cli:gone", "shoal.commands")
    monkeypatch.setattr(cluster.cli, "entry_points", lambda group: [gone])
    group = cluster.cli.LazyGroup()
    context = cluster.cli.click.Context(group)
    assert group.list_commands(context) == []
    assert group.get_command(context, "gone") is None


@pytest.mark.slow
def test_generate_streams_a_right_answer_and_its_figures() -> None:
    done = _shoal(
        "generate",
        "What is the capital of France? Answer in one sentence.",
        "--max-tokens=20",
        "--threads=1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.stderr.count("\n") == 1
    assert "42 prompt tokens (0 cached), 8 output tokens (stop), first after " in done.stderr


def test_generate_raw_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated executor, and in this process, for speed."""
    config = EngineConfig(executor="simulated", simulation=SimulationConfig(vocab_size=49152))
    monkeypatch.setattr(cluster.commands.generate, "engine_config", lambda **_: config)
    arguments = ["1, 2, 3", "--raw", "--json", "--max-tokens=4", "--seed=1"]
    answers = []
    for _ in range(2):
        done = CliRunner().invoke(cluster.commands.generate.generate, arguments)
        assert done.exit_code == 0, done.output
        answers.append(json.loads(done.stdout))
    assert answers[0]["text"]
    assert answers[0]["text"] == answers[1]["text"]
    assert (answers[0]["prompt_tokens"], answers[0]["completion_tokens"]) == (7, 4)
    assert answers[0]["finish_reason"] == "length"


@pytest.mark.slow
def test_ctrl_c_ends_generate_and_its_engine() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster", "generate", "Tell me a long story.", "--threads=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors
    time.sleep(0.2)
    assert not Path(f"/proc/{children[0]}").exists()
