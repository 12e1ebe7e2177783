"""The configuration inside the chart's RayService, deployed by Ray's own `serve deploy`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.rig import SIMULATED, Deployed

pytest.importorskip("helm_python")

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]


def test_serve_takes_what_the_chart_says(deployed: Deployed, tmp_path: Path) -> None:
    """All of it but what a single node cannot have: the secret's path, and labels of groups."""
    from tests.helm.chart import example, serve_config_of

    port = deployed.config["ingress"]["port"]
    model = {"name": "owner/charted:1", "aliases": ["short"], "engine": {**SIMULATED, "threads": 1}}
    values = example("cpu", config={"models": [model], "ingress": {"port": port}})
    text = yaml.safe_dump(serve_config_of(values))
    text = text.replace("/etc/shoal/secret", deployed.config["cluster_secret_file"])
    config = yaml.safe_load(text.replace("0.0.0.0", "127.0.0.1"))
    (ingress,) = config["applications"][0]["deployments"]
    assert ingress["ray_actor_options"].pop("label_selector") == {"shoal/pool": "ingress"}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    deployed.config["models"] = [model]
    done = subprocess.run(
        [Path(sys.executable).with_name("serve"), "deploy", path, "--address", deployed.address],
        env={**os.environ, **deployed.environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    deployed.wait_ready("owner/charted:1")
    assert set(deployed.ready()) == {"owner/charted:1"}
    assert deployed.ask(model="short").status_code == 200

    def states() -> dict[str, str]:
        return {name: each["status"] for name, each in deployed.serve_details().items()}

    # Serve's controller says so a moment after the engine.
    running = {"ingress": "RUNNING", "engine-owner%2fcharted%3a1": "RUNNING"}
    deployed.wait(lambda: states() == running)
    # What the one deployed, the other changes.
    deployed.restore()
