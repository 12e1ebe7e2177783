"""llama.cpp's server, over HTTP on this machine.

Invariant: every workload's requests fit its slots, so that none waits for another's; the server is
gone when `open` is left.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.server import Server, running
from bench.peers.session import Prompts, Session
from bench.peers.setup import PeerMissing
from cluster.ports import free_ports

_SLOTS = 64
# Of one slot: the longest prompt is 1,024 tokens.
_SLOT_TOKENS = 1280
_ANSWER_S = 900.0


@dataclass(frozen=True)
class LlamaCpp:
    """`binaries` has its programs, `model` is a GGUF file in bfloat16."""

    binaries: Path
    model: Path
    threads: int
    log: Path
    name: str = "llamacpp"

    @property
    def flags(self) -> Mapping[str, str]:
        return {
            "--model": str(self.model),
            "--threads": str(self.threads),
            "--threads-batch": str(self.threads),
            "--parallel": str(_SLOTS),
            "--ctx-size": str(_SLOTS * _SLOT_TOKENS),
        }

    @contextmanager
    def open(self) -> Iterator[Session]:
        (port,) = free_ports(1)
        command = [str(self.binaries / "llama-server"), "--host", "127.0.0.1", "--port", str(port)]
        for name, value in self.flags.items():
            command += [name, value]
        libraries = {"LD_LIBRARY_PATH": str(self.binaries)}
        with running(Server(command, port, self.log, libraries)):
            yield _LlamaSession(port)


class _LlamaSession:
    def __init__(self, port: int) -> None:
        self._port = port

    def generate(self, prompts: Prompts, output_tokens: int) -> float:
        bodies = [
            json.dumps(
                {
                    "prompt": prompt,
                    "n_predict": output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
            )
            for prompt in prompts
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            began_s = time.perf_counter()
            answers = list(pool.map(self._post, bodies))
            seconds = time.perf_counter() - began_s
        counts = [answer.get("tokens_predicted") for answer in answers]
        if counts != [output_tokens] * len(prompts):
            raise PeerMissing(f"{counts} tokens came back, not {output_tokens} each")
        return seconds

    def _post(self, body: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        try:
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except OSError as error:
            raise PeerMissing(f"its server broke off: {error}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise PeerMissing(f"its server answered {response.status}: {text[:200]!r}")
        answer: dict[str, Any] = json.loads(text)
        return answer
