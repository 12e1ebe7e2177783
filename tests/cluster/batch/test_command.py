"""`shoal batch` as a user runs it, kills it and runs it again."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.batch.index import RowIndex
from cluster.batch.output import OutputFile
from cluster.commands.batch import batch
from tests.cluster.batch.conftest import (
    ScriptedServer,
    Step,
    ids_of,
    lines_of,
    ready_model,
    row,
    shoal_batch,
    wait_until,
    write_rows,
)

_Files = tuple[Path, Path]


def _finished(*arguments: object) -> tuple[int, str, str]:
    process = shoal_batch(*arguments)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def _invoked(*arguments: object) -> tuple[int, str, str]:
    """As `_finished`, in this process, which is faster."""
    done = CliRunner().invoke(batch, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


def test_killed_again_and_again_every_row_is_there_once(
    files: _Files, server: ScriptedServer
) -> None:
    names = write_rows(files[0], 400)
    with open(files[0], "a") as more:
        more.write("nonsense\n" + row("row-1"))
    # Long answers take several pages: a write can be cut between them.
    server.padding = "x" * 100_000
    server.default = Step(delay_s=0.01)
    server.models = {"m": ready_model(16)}
    chance = random.Random(0)
    target = files[1]
    for _ in range(5):
        size = target.stat().st_size if target.exists() else 0
        process = shoal_batch(*files, "--url", server.url)
        wait_until(lambda size=size: target.exists() and target.stat().st_size > size)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.communicate(timeout=10)
        assert process.returncode == -signal.SIGKILL
    assert len(target.read_bytes().splitlines()) < 400
    code, out, err = _finished(*files, "--url", server.url, "--json")
    assert code == 3, err
    assert ids_of(target) == {**dict.fromkeys(names, 1), None: 2}
    codes = {line["error"]["code"] for line in lines_of(target) if line["error"]}
    assert codes == {"invalid_json", "duplicate_custom_id"}
    figures = json.loads(out)
    assert (figures["rows"], figures["failed"] + figures["failed_before"]) == (402, 2)
    assert figures["skipped"] > 5
    # What was on its way when it was killed is all that was asked twice.
    assert server.asked.total() <= 400 + 5 * 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_the_server_is_told(
    files: _Files, server: ScriptedServer, number: signal.Signals
) -> None:
    names = write_rows(files[0], 40)
    server.models = {"m": ready_model(8)}
    server.steps = {name: [Step(delay_s=60)] for name in names[5:]}
    process = shoal_batch(*files, "--url", server.url)
    wait_until(lambda: server.running == 10 and files[1].read_bytes().count(b"\n") == 5)
    began_s = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - began_s < 5
    assert process.returncode == 128 + number
    assert "run the same command again" in err
    assert "Traceback" not in err
    wait_until(lambda: server.running == 0)
    assert server.gone.total() == 10
    assert ids_of(files[1]).total() == 5
    server.steps = {}
    assert _finished(*files, "--url", server.url)[0] == 0
    assert ids_of(files[1]) == dict.fromkeys(names, 1)


def test_summary_key_and_exit_codes(
    files: _Files, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(files[0], 4)
    key_file = files[0].with_name("key")
    key_file.write_text("secret-1\n")
    arguments = (*files, "--url", f"{server.url}/v1/", "--json")
    code, out, err = _invoked(*arguments, "--api-key-file", key_file)
    assert code == 0, err
    assert server.keys == {"Bearer secret-1"}
    figures = json.loads(out)
    assert figures["seconds"] > 0
    assert figures["rows_per_s"] > 0
    assert figures["tokens_per_s"] > 0
    expected = {
        "rows": 4,
        "skipped": 0,
        "succeeded": 4,
        "failed": 0,
        "failed_before": 0,
        "retries": 0,
        "prompt_tokens": 28,
        "completion_tokens": 12,
        "cached_tokens": 16,
    }
    assert {name: figures[name] for name in expected} == expected
    assert "4 rows: 4 succeeded, 0 failed" in err
    monkeypatch.setenv("SHOAL_API_KEY", "secret-2")
    server.steps = {"x": [Step(400)]}
    with open(files[0], "a") as more:
        more.write(row("x"))
    code, out, err = _invoked(*arguments)
    assert (code, json.loads(out)["failed"]) == (3, 1)
    assert server.keys == {"Bearer secret-1", "Bearer secret-2"}
    assert "failed: 1 × status 400, first: line 5: refused x" in err
    code, out, _ = _invoked(*arguments)
    assert (code, json.loads(out)["failed_before"]) == (3, 1)
    code, out, _ = _invoked(*arguments, "--retry-failed")
    assert (code, json.loads(out)["succeeded"]) == (0, 1)


def test_what_it_refuses_to_start_with(files: _Files, server: ScriptedServer) -> None:
    code, _, err = _invoked(*files)
    assert (code, "does not exist" in err) == (2, True)
    names = write_rows(files[0], 2)
    assert _invoked(*files, "--url", "ftp://x")[0] == 2
    code, out, err = _invoked(*files, "--url", "http://127.0.0.1:1", "--wait", "0", "--json")
    assert code == 1
    assert "Error: http://127.0.0.1:1 cannot take rows: connection refused\n" in err
    assert json.loads(out)["succeeded"] == 0
    with contextlib.closing(OutputFile.open(files[1], RowIndex())):
        code, _, err = _finished(*files, "--url", server.url)
    assert code == 1
    assert err == f"Error: {files[1]} is being written by another shoal batch\n"
    assert _invoked(*files, "--url", server.url)[0] == 0
    assert ids_of(files[1]) == dict.fromkeys(names, 1)


def test_it_says_that_it_waits(files: _Files, server: ScriptedServer) -> None:
    write_rows(files[0], 2)
    server.stop()
    process = shoal_batch(*files, "--url", server.url)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(f"waiting for {server.url}: connection refused (0 of 60 s)")
    server.start()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err


def test_neither_ray_nor_torch_is_imported() -> None:
    code = (
        "import sys, cluster.commands.batch;"
        "print(sorted({'ray', 'torch', 'transformers', 'fastapi', 'bench'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
