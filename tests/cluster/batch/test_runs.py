"""Whole runs against a scripted HTTP server."""

import asyncio
import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.batch import watch
from cluster.batch.index import RowIndex
from cluster.batch.intake import InputError, pending
from cluster.batch.output import OutputFile
from cluster.batch.records import Answer, NoAnswer, Outcome
from cluster.batch.report import Tally
from cluster.batch.retry import RetryPolicy
from cluster.batch.rows import Row
from cluster.batch.runner import Limits, Runner
from cluster.batch.server import NotReady, ServerRefused
from cluster.batch.watch import ServerAway
from tests.cluster.batch.conftest import (
    ScriptedServer,
    Step,
    ids_of,
    lines_of,
    ready_model,
    row,
    run,
    wait_until,
    write_rows,
)

_Files = tuple[Path, Path]


def _by_id(files: _Files) -> dict[str, Any]:
    return {line["custom_id"]: line for line in lines_of(files[1])}


def test_answers_and_errors_of_every_kind(files: _Files, server: ScriptedServer) -> None:
    files[0].write_text(
        "".join(row(name) for name in ("good", "slowed", "broken", "dropped", "page", "hung"))
        + row("refused")
        + row("hopeless")
        + row("lost")
        + row("text")
        + "nonsense\n"
    )
    server.steps = {
        "slowed": [Step(429, {"Retry-After": "1"}, body=b"{}")],
        "broken": [Step(500), Step(503)],
        "dropped": [Step(drop=True), Step(drop=True)],
        "page": [Step(502, body=b"<html>\nbad gateway")],
        "hung": [Step(delay_s=30)],
        "refused": [Step(422)],
        "hopeless": [Step(500, body=b"<p>no")] * 9,
        "lost": [Step(drop=True)] * 9,
        "text": [Step(200, body=b"no JSON")] * 9,
    }
    tally = run(files, server.url, timeout_s=1.5)
    assert (tally.rows, tally.succeeded, tally.failed, tally.in_flight) == (11, 6, 5, 0)
    assert (tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens) == (42, 18, 24)
    lines = _by_id(files)
    assert lines["good"]["response"] == {
        "status_code": 200,
        "request_id": "request-good",
        "body": {
            "model": "m",
            "choices": [{"text": "answer to good"}],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        },
    }
    for name in ("good", "slowed", "broken", "dropped", "page", "hung"):
        assert lines[name]["response"]["body"]["choices"][0]["text"] == f"answer to {name}"
        assert lines[name]["error"] is None
    assert lines["refused"]["response"]["status_code"] == 422
    assert lines["refused"]["response"]["body"] == {"error": {"message": "refused refused"}}
    assert lines["refused"]["error"] is None
    assert lines["hopeless"]["response"]["body"] == {"error": {"message": "<p>no"}}
    assert lines["lost"]["response"] is None
    assert lines["lost"]["error"]["code"] == "connection_lost"
    assert lines["text"]["error"] == {
        "code": "invalid_answer",
        "message": "status 200 without JSON: no JSON",
    }
    assert lines[None]["error"]["code"] == "invalid_json"
    assert lines[None]["id"] == "batch_req_line_11"
    assert server.asked == {
        "good": 1, "slowed": 2, "broken": 3, "dropped": 3, "page": 2, "hung": 2, "refused": 1,
        "hopeless": 4, "lost": 4, "text": 4,
    }  # fmt: skip
    first_s, second_s = server.asked_at_s["slowed"]
    assert 1.0 <= second_s - first_s < 10
    assert tally.failures["status 422"].first == "line 7: refused refused"


def test_a_date_in_retry_after_is_honoured(files: _Files, server: ScriptedServer) -> None:
    write_rows(files[0], 1)
    date = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
    text = format_datetime(date, usegmt=True)
    server.steps = {"row-0": [Step(429, {"Retry-After": text})]}
    run(files, server.url)
    waited_s = time.monotonic() - server.asked_at_s["row-0"][1]
    asked = datetime.now(UTC) - timedelta(seconds=waited_s)
    assert -0.1 < (asked - date).total_seconds() < 10


def test_concurrency_follows_the_engines(
    files: _Files, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PERIOD_S", 0.05)
    names = write_rows(files[0], 150)
    server.models = {"m": ready_model(4), "other": ready_model(99)}
    server.default = Step(delay_s=0.05)
    most: list[int] = []

    def grow() -> None:
        wait_until(lambda: server.asked.total() > 20)
        most.append(server.most_running)
        server.models = {"m": ready_model(4, 8), "other": ready_model(99)}

    growing = threading.Thread(target=grow)
    growing.start()
    tally = run(files, server.url)
    growing.join()
    assert tally.succeeded == len(names)
    assert (most, server.most_running) == ([5], 15)


def test_a_given_concurrency_is_the_most(files: _Files, server: ScriptedServer) -> None:
    write_rows(files[0], 20)
    server.default = Step(delay_s=0.01)
    run(files, server.url, concurrency=3)
    assert server.most_running == 3


def test_a_server_that_comes_back_costs_no_row(files: _Files, server: ScriptedServer) -> None:
    """Twice away and two retries a row: only those on their way when it went are charged."""
    names = write_rows(files[0], 200)
    server.models = {"m": ready_model(8)}
    server.default = Step(delay_s=0.01)

    def restart() -> None:
        for count in (40, 120):
            wait_until(lambda count=count: server.asked.total() > count)
            server.stop()
            time.sleep(0.7)
            server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    tally = run(files, server.url, RetryPolicy(num_retries=2, first_delay_s=0.01))
    restarting.join()
    assert (tally.succeeded, tally.failed) == (200, 0)
    assert ids_of(files[1]) == dict.fromkeys(names, 1)


def test_a_server_that_stays_away_ends_the_run_and_burns_no_row(
    files: _Files, server: ScriptedServer
) -> None:
    names = write_rows(files[0], 100)
    server.models = {"m": ready_model(4)}
    server.default = Step(delay_s=0.01)

    def leave() -> None:
        wait_until(lambda: server.asked.total() > 30)
        server.stop()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(ServerAway, match="for 1 s: connection refused"):
        run(files, server.url, wait_s=1)
    leaving.join()
    answered = ids_of(files[1])
    assert 20 < answered.total() < 100
    assert all(line["response"]["status_code"] == 200 for line in lines_of(files[1]))
    server.start()
    tally = run(files, server.url)
    assert (tally.skipped, tally.succeeded) == (answered.total(), 100 - answered.total())
    assert ids_of(files[1]) == dict.fromkeys(names, 1)


class _Unreachable:
    """Refuses connections a number of times; says meanwhile that it is not ready, or that it is."""

    url = "memory"

    def __init__(self, refusals: int, says_so: bool) -> None:
        self.refusals = refusals
        self.says_so = says_so
        self.looks = 0

    async def ready(self) -> None:
        self.looks += 1
        if self.says_so and 1 < self.looks < 5:
            raise NotReady("connection refused")

    async def send(self, _: Row) -> Outcome:
        if self.refusals == 0:
            return Answer(200, "", b"{}")
        self.refusals -= 1
        return NoAnswer("connection_failed", "connection refused", was_sent=False)


@pytest.mark.parametrize(("says_so", "succeeded"), [(True, 1), (False, 0)])
def test_a_row_is_not_charged_for_a_server_that_is_away(
    files: _Files, monkeypatch: pytest.MonkeyPatch, says_so: bool, succeeded: int
) -> None:
    monkeypatch.setattr(watch, "_AWAY_PERIOD_S", 0.01)
    write_rows(files[0], 1)
    tally, server = Tally(), _Unreachable(1, says_so)

    async def send(output: OutputFile) -> None:
        limits = Limits(1, 5.0, RetryPolicy(num_retries=0, first_delay_s=0.01))
        with open(files[0], "rb") as file:
            rows = pending(file, RowIndex(), tally, None)
            await Runner(server, output, tally, limits).run(rows)

    with contextlib.closing(OutputFile.open(files[1], RowIndex())) as output:
        asyncio.run(send(output))
    assert (tally.succeeded, tally.failed) == (succeeded, 1 - succeeded)


def test_nothing_is_sent_while_the_model_loads(files: _Files, server: ScriptedServer) -> None:
    write_rows(files[0], 3)
    server.models = {"m": ready_model(4, state="loading"), "other": ready_model(4)}
    with pytest.raises(ServerAway, match="m is loading, other is ready"):
        run(files, server.url, wait_s=0)
    assert not server.asked
    threading.Timer(0.3, lambda: server.models.update(m=ready_model(4))).start()
    assert run(files, server.url).succeeded == 3


def test_no_server_is_needed_when_there_is_nothing_to_send(
    files: _Files, server: ScriptedServer
) -> None:
    write_rows(files[0], 3)
    run(files, server.url)
    with open(files[0], "a") as more:
        more.write("nonsense\n")
    server.stop()
    tally = run(files, server.url, wait_s=0)
    assert (tally.rows, tally.skipped, tally.failed) == (4, 3, 1)


def test_a_wrong_key_or_url_ends_the_run_and_not_each_row(
    files: _Files, server: ScriptedServer
) -> None:
    write_rows(files[0], 50)
    server.default = Step(401)
    with pytest.raises(ServerRefused, match="API key"):
        run(files, server.url)
    server.default = Step(307, {"Location": "http://127.0.0.1:1/v1"})
    with pytest.raises(ServerRefused, match=r"redirects to http://127.0.0.1:1/v1: see --url"):
        run(files, server.url)
    assert files[1].read_bytes() == b""


def test_the_input_is_no_output(files: _Files) -> None:
    write_rows(files[0], 1)
    files[1].symlink_to(files[0])
    with pytest.raises(InputError, match="is the input itself"):
        run(files, "http://127.0.0.1:1")
    with pytest.raises(InputError, match="must be a file"):
        run((Path("/dev/null"), files[1]), "http://127.0.0.1:1")
    with pytest.raises(InputError, match="No such file"):
        run((files[0].with_name("none"), files[1]), "http://127.0.0.1:1")
