"""A Ray cluster with a dashboard and nothing on it, for as long as stdin is open; private and on
loopback. Prints one line of JSON: where its dashboard is, and what a client's environment needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster import haproxy
from cluster.local_ray import OBJECT_STORE_BYTES, LocalRay
from cluster.ports import free_ports
from cluster.reaper import kill_marked


class RayHead(LocalRay):
    """Started as an operator would, by `ray start`, so that every port is one that is free. By
    `ray.init` the agent that takes jobs has a fixed one; if that is taken no job ever starts."""

    def __init__(self) -> None:
        super().__init__(use_haproxy=haproxy.is_available())
        self.dashboard_port, self._client_port = free_ports(2)

    def _start(self, num_cpus: int) -> None:
        command = [Path(sys.executable).with_name("ray"), "start", "--head"]
        options = {
            "num-cpus": num_cpus,
            "object-store-memory": OBJECT_STORE_BYTES,
            "temp-dir": self.folder / "ray",
            "node-ip-address": "127.0.0.1",
            "port": 0,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self.dashboard_port,
            "dashboard-agent-listen-port": 0,
            "ray-client-server-port": self._client_port,
        }
        subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            stdout=sys.stderr,
            check=True,
        )

    def _stop(self) -> None:
        kill_marked(self.mark)


def main() -> None:
    head = RayHead()
    with head.started(num_cpus=int(sys.argv[1])):
        environment = {name: os.environ[name] for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")}
        address = f"http://127.0.0.1:{head.dashboard_port}"
        sys.stdout.write(json.dumps({"address": address, "environment": environment}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
