"""A Ray cluster that tests deploy to, and what they deploy. Simulated engines; everything around
them is real."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.live import Live

NUM_CPUS = 4
SIMULATED = {
    "executor": "simulated",
    "cache": {"num_blocks": 4096},
    "simulation": {"vocab_size": 49152, "max_model_len": 8192, "step_s": "5ms", "token_s": "0.3ms"},
}


def model(name: str, **fields: Any) -> dict[str, Any]:
    supervision = {"poll_interval_s": "200ms", "stall_s": "5s", "drain_timeout_s": "60s"}
    return {"name": name, "engine": SIMULATED, "supervision": supervision, **fields}


@dataclass
class Deployed(Live):
    """A Ray cluster, and the configuration that it was given last."""

    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
    config: dict[str, Any] = field(default_factory=dict)
    """What is deployed; as given here, what each test begins with."""

    def __post_init__(self) -> None:
        self._first = dict(self.config)

    def restore(self) -> None:
        if self.config != self._first:
            self.config = dict(self._first)
            self.deploy()
            for each in self.config["models"]:
                self.wait_ready(each["name"])

    def run(self, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "cluster", "deploy", *arguments, "--address", self.address],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def serve_details(self) -> dict[str, Any]:
        """What Ray's dashboard says of each application."""
        token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        url = f"{self.address}/api/serve/applications/"
        reply = self.http.get(url, headers={"Authorization": f"Bearer {token}"})
        found: dict[str, Any] = reply.json()["applications"]
        return found

    def target(self, model: str) -> int:
        """How many replicas Serve is to run of a model."""
        deployment = self.serve_details()[f"engine-{model}"]["deployments"]["Supervisor"]
        return int(deployment["target_num_replicas"])

    def deploy(self, *, wait: bool = True, **changes: Any) -> dict[str, Any]:
        """Deploys the last configuration with these changes; returns what was said of it."""
        self.config |= changes
        path = self.folder / "shoal.yaml"
        path.write_text(json.dumps(self.config))
        said: dict[str, Any] = json.loads(
            self.run(str(path), "--json", *([] if wait else ["--no-wait"])).stdout
        )
        return said


def effects(said: dict[str, Any]) -> dict[str, str]:
    return {change["path"]: change["effect"] for change in said["changes"]}
