"""Whole answers over real HTTP: their status, their blanks, and clients that leave."""

import http.client
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Served, serve_ingress, simulated


def begin(served: Served, max_tokens: int = 5000) -> http.client.HTTPConnection:
    messages = [{"role": "user", "content": "Hello"}]
    connection = served.begin("/v1/chat/completions", messages=messages, max_tokens=max_tokens)
    served.wait_running(1)
    return connection


def test_a_client_that_leaves_before_its_whole_answer_has_it_aborted(slow: Served) -> None:
    begin(slow).close()
    slow.wait_idle(1.0)


def test_what_fails_before_there_is_output_has_its_own_status(model_folder: Path) -> None:
    with serve_ingress(simulated(step_s=30.0), model_folder, keep_alive_s=0.1) as served:
        connection = begin(served)
        time.sleep(0.3)
        os.kill(served.engine.pid, signal.SIGKILL)
        reply = connection.getresponse()
        assert reply.status == 503
        assert json.load(reply)["error"]["code"] == "engine_unavailable"


def test_a_slow_answer_begins_with_blanks(model_folder: Path) -> None:
    with serve_ingress(simulated(step_s=0.02), model_folder, keep_alive_s=0.1) as served:
        answer = begin(served, max_tokens=20).getresponse().read()
        assert answer.startswith(b" ")
        assert json.loads(answer)["usage"]["completion_tokens"] == 20
        begin(served).close()
        served.wait_idle(1.0)
        begun = begin(served).getresponse()
        assert begun.read(1) == b" "
        os.kill(served.engine.pid, signal.SIGKILL)
        with pytest.raises(http.client.IncompleteRead):
            begun.read()
