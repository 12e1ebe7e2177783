"""A Ray cluster with a dashboard and nothing on it, for as long as stdin is open; private and on
loopback. Prints one line of JSON: where its dashboard is, and what a client's environment needs."""

import json
import socket
import sys

from cluster import haproxy
from cluster.local_ray import LocalRay


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    local_ray = LocalRay(use_haproxy=haproxy.is_available(), dashboard_port=port)
    with local_ray.started(num_cpus=int(sys.argv[1])):
        environment = {
            "RAY_AUTH_TOKEN_PATH": str(local_ray.folder / "token"),
            "RAY_AUTH_MODE": "token",
        }
        sys.stdout.write(
            json.dumps({"address": f"http://127.0.0.1:{port}", "environment": environment}) + "\n"
        )
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
