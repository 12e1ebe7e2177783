"""`shoal serve` as a user runs it: a real process, real Ray, the real default model."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.ports import free_ports
from cluster.reaper import marked

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

_READY_S = 150
_QUESTION: Any = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]


def _processes_of(folder: Path) -> list[str]:
    """What a server has started, by the mark that it leaves on all of it."""
    pids = marked(f"RAY_AUTH_TOKEN_PATH={folder}/token")
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(f"{pid}: {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return found


@dataclass
class Command:
    """A running `shoal serve`."""

    process: "subprocess.Popen[str]"
    port: int
    errors: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def folder(self) -> Path:
        """The server's private folder, from the environment of a process that it started."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_child = (
                    entry.name.isdigit()
                    and f"\nPPid:\t{self.process.pid}\n" in (entry / "status").read_text()
                )
                if is_child:
                    variables = (entry / "environ").read_text().split("\0")
                    for variable in variables:
                        if variable.startswith("RAY_AUTH_TOKEN_PATH="):
                            return Path(variable.partition("=")[2]).parent
        raise AssertionError("the server has started nothing")

    def wait_folder(self) -> Path:
        end_s = time.monotonic() + 30
        while True:
            with contextlib.suppress(AssertionError):
                return self.folder()
            assert time.monotonic() < end_s
            time.sleep(0.1)

    def wait_ready(self) -> str:
        """The lines that it prints when it is ready."""
        assert self.process.stdout is not None
        lines = ""
        while "curl" not in lines:
            line = self.process.stdout.readline()
            assert line, f"it ended with {self.process.wait()}: {self.errors.read_text()}"
            lines += line
        return lines

    def load(self) -> dict[str, int]:
        (model,) = httpx.get(f"{self.url}/ready").json()["models"].values()
        load: dict[str, int] = model["engines"][0]
        return load


@contextlib.contextmanager
def _serving(folder: Path, *options: str) -> Iterator[Command]:
    (port,) = free_ports(1)
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", "--port", str(port), *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"RAY_ADDRESS": "ray://nowhere:1"},
        )
    try:
        yield Command(process, port, errors)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with _serving(tmp_path_factory.mktemp("serve"), "--threads", "1") as command:
        ready = command.wait_ready()
        assert f"curl -N {command.url}/v1/chat/completions" in ready
        yield command


def test_it_tells_its_phases_and_listens_for_this_machine_only(server: Command) -> None:
    progress = server.errors.read_text()
    assert all(phase in progress for phase in ("model.", "Ray.", "HTTP."))
    assert " s\n" in progress
    assert "INFO" not in progress
    hosts = socket.gethostbyname_ex(socket.gethostname())[2]
    for host in hosts:
        if not host.startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((host, server.port), timeout=1)


def test_the_openai_client_streams_a_right_answer(server: Command) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(
                model=model.id, messages=_QUESTION, temperature=0, max_tokens=30, stream=True
            )
        ]
        whole = client.chat.completions.create(
            model=model.id, messages=_QUESTION, temperature=0, max_tokens=30, logprobs=True
        )
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 5
    (choice,) = whole.choices
    assert choice.message.content == "".join(pieces)
    assert choice.finish_reason == "stop"
    assert whole.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_has_its_request_aborted(server: Command, stream: bool) -> None:
    body = {
        "model": "default",
        "messages": _QUESTION,
        "stream": stream,
        "ignore_eos": True,
        "max_tokens": 2000,
    }
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    if stream:
        connection.getresponse().readline()
    end_s = time.monotonic() + 10
    while not server.load()["running"]:
        assert time.monotonic() < end_s
    connection.close()
    end_s = time.monotonic() + 3
    while (load := server.load())["running"] or load["used_blocks"]:
        assert time.monotonic() < end_s, load
        time.sleep(0.05)


def test_a_dead_engine_is_replaced_and_its_streams_go_on_there(server: Command) -> None:
    """It is the only one, so they wait for its successor."""
    body = {
        "model": "default",
        "messages": _QUESTION,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 300,
    }
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(server.load()["pid"], signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 300
    end_s = time.monotonic() + 60
    while server.load()["state"] != "ready" or server.load()["restarts"] != 1:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert server.process.poll() is None
    while not server.errors.read_text().rstrip().endswith("default is ready"):
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert "its process died" in server.errors.read_text()


def test_a_busy_port_is_named_before_anything_starts(server: Command) -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "--port", str(server.port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"127.0.0.1:{server.port}" in done.stderr
    assert "Ray" not in done.stderr
    assert time.monotonic() - began_s < 10


def test_ctrl_c_leaves_nothing_behind(server: Command) -> None:
    """The last of the tests that use `server`."""
    folder = server.folder()
    assert len(_processes_of(folder)) > 5
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert _processes_of(folder) == []
    assert not folder.exists()


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    with _serving(tmp_path) as command:
        folder = command.wait_folder()
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
        assert _processes_of(folder) == []
        assert not folder.exists()


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with _serving(tmp_path) as command:
        folder = command.wait_folder()
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(10) == 130
        _wait_gone(folder)


def test_a_killed_command_leaves_nothing_behind(tmp_path: Path) -> None:
    with _serving(tmp_path) as command:
        folder = command.wait_folder()
        time.sleep(3)
        command.process.kill()
        command.process.wait()
        _wait_gone(folder)


def _wait_gone(folder: Path) -> None:
    end_s = time.monotonic() + 10
    while (left := _processes_of(folder)) or folder.exists():
        assert time.monotonic() < end_s, left
        time.sleep(0.1)
