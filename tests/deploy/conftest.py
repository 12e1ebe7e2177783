"""One Ray cluster for all tests of this folder: it takes a quarter of a minute to start."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ports import free_ports
from configs.secret import write_secret
from tests.deploy.rig import NUM_CPUS, Deployed, effects, model


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.ray_cluster", str(NUM_CPUS)],
        # Jobs find `shoal` on the path of the cluster.
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="package")
def _deployed(ray_cluster: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    folder = tmp_path_factory.mktemp("deploy")
    write_secret(folder / "secret")
    (port,) = free_ports(1)
    config = {
        "models": [model("good"), model("heavy", placement={"num_cpus": 1.5})],
        "ingress": {"port": port},
        "cluster_secret_file": str(folder / "secret"),
    }
    deployed = Deployed(f"http://127.0.0.1:{port}", folder=folder, config=config, **ray_cluster)
    assert set(effects(deployed.deploy()).values()) == {"start"}
    deployed.wait_ready("good")
    deployed.wait_ready("heavy")
    return deployed


@pytest.fixture
def deployed(_deployed: Deployed) -> Deployed:
    """As it was before the first test, whatever became of the last one."""
    _deployed.restore()
    return _deployed
