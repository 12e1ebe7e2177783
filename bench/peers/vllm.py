"""vLLM for CPUs, in a process and an environment of its own.

Invariant: its whole process group is gone when `open` is left. Times are taken in its own process,
around its `generate`, so that no pipe of ours counts against it.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.peers.session import Prompts, Session
from bench.peers.setup import PeerMissing

_RUNNER = Path(__file__).with_name("vllm_runner.py")
SETTINGS: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables: room for its cache, and nothing of it leaves the machine."""
_STOP_S = 20.0
_LOG_LINES = 3


@dataclass(frozen=True)
class Vllm:
    """`folder` is its environment, `model` a folder of safetensors."""

    folder: Path
    model: Path
    threads: int
    log: Path
    is_eager: bool = False
    """Without compilation: it starts faster."""
    has_all_cores: bool = False
    """It computes on all `threads` cores. As it comes it keeps one free for its own processes, of
    two that is half: one stream is faster so, and prefill slower."""

    @property
    def name(self) -> str:
        if self.is_eager:
            return "vllm_eager"
        return "vllm_all_cores" if self.has_all_cores else "vllm"

    @property
    def flags(self) -> Mapping[str, str]:
        arguments = {name: str(value) for name, value in self._arguments().items()}
        return arguments | self._environment()

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"model": str(self.model), "dtype": "bfloat16"}
        return arguments | ({"enforce_eager": True} if self.is_eager else {})

    def _environment(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        binding = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        return {**SETTINGS, **(binding if self.has_all_cores else {})}

    @contextmanager
    def open(self) -> Iterator[Session]:
        python = self.folder / "bin" / "python"
        environment = {**program_environment(self.folder), **self._environment()}
        with self.log.open("w") as log:
            process = subprocess.Popen(
                # -P: the files beside the runner are not its modules.
                [str(python), "-P", str(_RUNNER), json.dumps(self._arguments())],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            session = _VllmSession(process.stdin, process.stdout, self.log)
            try:
                session.receive()
                yield session
            finally:
                _stop(process)


def program_environment(folder: Path) -> dict[str, str]:
    """For a program of the environment in `folder`: the settings, and where its compiler finds
    ninja."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**SETTINGS, "PATH": path}


class _VllmSession:
    def __init__(self, requests: IO[str], replies: IO[str], log: Path) -> None:
        self._requests = requests
        self._replies = replies
        self._log = log

    def receive(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
            raise PeerMissing("its process ended: " + " / ".join(words))
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerMissing(str(reply["error"]).split("\n")[0])
        return reply

    def generate(self, prompts: Prompts, output_tokens: int) -> float:
        self._requests.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}))
        self._requests.write("\n")
        self._requests.flush()
        reply = self.receive()
        if reply["counts"] != [output_tokens] * len(prompts):
            raise PeerMissing(f"{reply['counts']} tokens came back, not {output_tokens} each")
        return float(reply["seconds"])


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # The engine's core is a process of its own.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
