"""Ingresses come and go while streams run on them."""

import time

import pytest

from tests.cluster.live import Stream, open_stream
from tests.deploy.rig import SIMULATED, Deployed, model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

STEP_S = 0.05
SLOW = {**SIMULATED, "simulation": {**SIMULATED["simulation"], "step_s": STEP_S, "token_s": 0.0}}


def num_ingresses(deployed: Deployed) -> int:
    """Processes, those included that wait for their streams."""
    replicas = deployed.serve_details()["ingress"]["deployments"]["Ingress"]["replicas"]
    return len(replicas)


def num_serving(deployed: Deployed) -> int:
    replicas = deployed.serve_details()["ingress"]["deployments"]["Ingress"]["replicas"]
    return sum(replica["state"] == "RUNNING" for replica in replicas)


@pytest.mark.parametrize(
    "seconds",
    [
        # When an ingress goes, its streams have more left than the 20 s that Serve waits by itself.
        pytest.param(30, id="30s"),
        pytest.param(180, id="180s", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_streams_outlive_ingresses_that_come_and_go(deployed: Deployed, seconds: int) -> None:
    """Serve takes away the newest: so streams are begun on one ingress, more on two, and then one
    is taken away. Each runs to its end, and only then does the process go."""
    front = deployed.config["ingress"]
    deployed.deploy(models=[model("slow", engine=SLOW)])
    deployed.wait_ready("slow")
    num_tokens = int(seconds / STEP_S)
    streams = [begin(deployed, num_tokens) for _ in range(2)]
    deployed.deploy(ingress={**front, "replicas": 2})
    deployed.wait(lambda: num_serving(deployed) == 2)
    # HAProxy has its back-ends within a moment, and gives the one with least to do the next.
    time.sleep(2)
    streams += [begin(deployed, num_tokens) for _ in range(6)]
    time.sleep(1)
    deployed.deploy(ingress={**front, "replicas": 1}, wait=False)
    deployed.wait(lambda: num_serving(deployed) == 1)
    assert num_ingresses(deployed) == 2, "one of them had a stream"
    assert deployed.ask(model="slow").status_code == 200
    assert all(stream.thread.is_alive() for stream in streams[2:]), "they were to run meanwhile"
    for stream in streams:
        assert stream.is_complete
        assert stream.num_tokens == num_tokens
    deployed.wait(lambda: num_ingresses(deployed) == 1, timeout_s=60)


def begin(deployed: Deployed, num_tokens: int) -> Stream:
    return open_stream(deployed, "slow", max_tokens=num_tokens)
