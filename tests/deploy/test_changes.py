"""`shoal deploy` on a Ray cluster that runs: what is live changes what runs, what is not replaces
one model's engines, and nobody's request fails. Simulated engines; everything around them is real.
"""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.models.resolve import resolve_model
from tests.cluster.live import open_stream, under_load
from tests.deploy.rig import SIMULATED, Deployed, effects, model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]


def test_it_serves_and_a_second_time_changes_nothing(deployed: Deployed) -> None:
    assert deployed.ask(model="good").status_code == 200
    before = deployed.pids("good"), deployed.pids("heavy")
    assert deployed.deploy()["changes"] == []
    assert deployed.ask(model="heavy").status_code == 200
    assert (deployed.pids("good"), deployed.pids("heavy")) == before


def test_live_settings_reach_what_runs(deployed: Deployed) -> None:
    before = deployed.pids("good"), deployed.pids("heavy")
    engine = {**SIMULATED, "scheduler": {"max_num_batched_tokens": 256, "max_num_seqs": 3}}
    good = model("good", engine=engine, autoscaling={"up_queued_requests": 2.0}, aliases=["fine"])
    with under_load(deployed) as statuses:
        time.sleep(1)
        said = deployed.deploy(
            models=[good, deployed.config["models"][1]],
            ingress={**deployed.config["ingress"], "max_body_bytes": "2KiB"},
            router={"policy": "least_backlog"},
        )
        time.sleep(1)
        assert set(statuses) == {200}
    assert effects(said) == {
        "models[good].engine.scheduler.max_num_batched_tokens": "live",
        "models[good].engine.scheduler.max_num_seqs": "live",
        "models[good].autoscaling.up_queued_requests": "live",
        "models[good].aliases": "live",
        "ingress.max_body_bytes": "live",
        "router.policy": "live",
    }
    assert (deployed.pids("good"), deployed.pids("heavy")) == before
    assert [engine["max_num_seqs"] for engine in deployed.engines("good").values()] == [3]
    assert deployed.ask(model="fine").status_code == 200
    assert deployed.ask(text="x" * 3000).status_code == 413
    streams = [open_stream(deployed, "good", max_tokens=300) for _ in range(5)]
    deployed.wait(lambda: [e["running"] for e in deployed.engines("good").values()] == [3])
    assert [stream.num_tokens for stream in streams] == [300] * 5


def test_replicas_come_and_go_and_no_request_fails(deployed: Deployed) -> None:
    (name,) = deployed.pids("good")
    good, heavy = deployed.config["models"]
    with under_load(deployed) as statuses:
        assert effects(deployed.deploy(models=[{**good, "replicas": 2}, heavy])) == {
            "models[good].replicas": "live"
        }
        deployed.wait_ready("good", engines=2)
        streams = [open_stream(deployed, "good", max_tokens=800) for _ in range(6)]
        while min(engine["running"] for engine in deployed.engines("good").values()) < 2:
            assert len(streams) < 60, f"an engine gets nothing: {deployed.ready()}"
            streams.append(open_stream(deployed, "good", max_tokens=800))
            time.sleep(0.2)
        deployed.deploy(models=[{**good, "replicas": 1}, heavy])
        assert {stream.num_tokens for stream in streams} == {800}
        deployed.wait_ready("good", engines=1)
        time.sleep(1)
        assert set(statuses) == {200}
    assert set(deployed.pids("good")) == {name}, "the newest is the one to go"


def test_a_changed_model_on_a_full_machine_holds_requests(deployed: Deployed) -> None:
    """There is no room for a second engine beside the first: that one stops first."""
    other = deployed.folder / "other-model"
    shutil.copytree(resolve_model("default"), other)
    good, heavy = deployed.config["models"]
    before = deployed.pids("good")
    (pid,) = deployed.pids("heavy").values()
    stream = open_stream(deployed, "heavy", max_tokens=1000)
    with under_load(deployed, 2, model="heavy", timeout_s=90) as statuses:
        deployed.wait(lambda: deployed.engines("heavy").popitem()[1]["running"] > 0)
        said = deployed.deploy(
            models=[good, {**heavy, "engine": SIMULATED | {"model": str(other)}}]
        )
        deployed.wait_ready("heavy")
        served = statuses[200]
        deployed.wait(lambda: statuses[200] > served + 5)
        assert set(statuses) == {200}
    assert effects(said) == {"models[heavy].engine.model": "restart"}
    assert "new requests wait" in said["notes"][0]
    assert stream.num_tokens == 1000
    assert stream.is_complete
    assert deployed.pids("heavy").popitem()[1] != pid
    assert deployed.pids("good") == before


def test_a_model_that_is_removed_finishes_what_it_has(deployed: Deployed) -> None:
    good, heavy = deployed.config["models"]
    deployed.deploy(models=[good, heavy, model("third", placement={"num_cpus": 0.5})])
    deployed.wait_ready("third")
    before = deployed.pids("good"), deployed.pids("heavy")
    stream = open_stream(deployed, "third", max_tokens=1000)
    deployed.wait(lambda: deployed.engines("third").popitem()[1]["running"] > 0)
    assert effects(deployed.deploy(models=[good, heavy])) == {"models[third]": "remove"}
    deployed.wait(lambda: deployed.ask(model="third").status_code == 404)
    assert stream.num_tokens == 1000
    assert stream.is_complete
    assert (deployed.pids("good"), deployed.pids("heavy")) == before


def test_the_applications_of_others_are_left_alone(deployed: Deployed) -> None:
    serve = f"{deployed.address}/api/serve/applications/"
    token = Path(deployed.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=30) as http:
        details = http.get(serve).json()
        ours = [each["deployed_app_config"] for each in details["applications"].values()]
        (args,) = [each["args"] for each in ours if each["name"] == "engine-good"]
        theirs = {
            "name": "neighbour",
            "route_prefix": None,
            "import_path": "cluster.applications:engine",
            "args": {**args, "model": {**args["model"], "name": "neighbour"}},
            "deployments": [{"name": "Supervisor", "num_replicas": 1, "user_config": {}}],
        }
        wanted = {
            "http_options": {"host": "127.0.0.1", "port": deployed.config["ingress"]["port"]},
            "applications": [*ours, theirs],
        }
        assert http.put(serve, json=wanted).status_code == 200

        def state() -> Any:
            return http.get(serve).json()["applications"].get("neighbour", {}).get("status")

        deployed.wait(lambda: state() == "RUNNING")
        before = deployed.pids("good"), deployed.pids("heavy")
        assert deployed.deploy(router={"policy": "least_backlog"})["changes"][0]["effect"] == "live"
        assert state() == "RUNNING"
        assert (deployed.pids("good"), deployed.pids("heavy")) == before
        assert http.put(serve, json={**wanted, "applications": ours}).status_code == 200


def test_what_cannot_be_done_is_said_and_not_begun(deployed: Deployed, tmp_path: Path) -> None:
    before = deployed.pids("good")
    path = tmp_path / "shoal.yaml"
    path.write_text(json.dumps({**deployed.config, "ingress": {"port": 1234}}))
    assert "ingress.port cannot change" in deployed.run(str(path), code=1).stderr
    path.write_text(json.dumps({**deployed.config, "cluster_secret_file": None}))
    assert "cluster_secret_file is required" in deployed.run(str(path), code=1).stderr
    path.write_text(json.dumps({**deployed.config, "rooter": {}}))
    assert "did you mean router?" in deployed.run(str(path), code=1).stderr
    good, heavy = deployed.config["models"]
    path.write_text(json.dumps({**deployed.config, "models": [{**good, "replicas": 7}, heavy]}))
    dry = deployed.run(str(path), "--dry-run")
    assert "models[good].replicas: 1 → 7" in dry.stderr
    assert deployed.pids("good") == before
    unreachable = Deployed("", address="http://127.0.0.1:9", environment=deployed.environment)
    assert "no Ray dashboard" in unreachable.run(str(path), code=1).stderr


def test_a_model_that_cannot_start_is_named_and_the_others_serve(deployed: Deployed) -> None:
    good, heavy = deployed.config["models"]
    broken = model(
        "broken",
        engine={"model": "/no/such/folder"},
        placement={"num_cpus": 0.1},
        supervision={"max_restarts": 0},
    )
    with under_load(deployed, 1) as statuses, contextlib.suppress(AssertionError):
        deployed.deploy(models=[good, heavy, broken])
        pytest.fail("it should have failed")
    assert set(statuses) == {200}
    path = deployed.folder / "shoal.yaml"
    done = deployed.run(str(path), "--json", code=1)
    assert "/no/such/folder" in json.loads(done.stdout)["failed"]["broken"]
