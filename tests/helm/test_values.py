"""What `helm install` refuses, and the schema that it goes by."""

import runpy
from collections.abc import Callable
from typing import Any

import pytest

from configs.shoal import ShoalConfig
from tests.helm.chart import CHART, REPOSITORY, example, helm, render

Change = Callable[[dict[str, Any]], Any]


def message_of(change: Change, name: str = "two-models-eight-gpus") -> str:
    values = example(name)
    change(values)
    with pytest.raises(helm.HelmError) as error:
        render(values)
    return str(error.value)


def test_the_schema_is_what_the_script_makes() -> None:
    script = runpy.run_path(str(REPOSITORY / "helm" / "make_schema.py"))
    assert (CHART / "values.schema.json").read_text() == script["make_schema"](), (
        "run `make helm-schema`"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v.update(pool={}), "'pool' not allowed"),
        (lambda v: v["networkPolicy"].update(htpFrom=[]), "'/networkPolicy': additional"),
        (lambda v: v["pools"]["small"].update(tensorParalelSize=2), "'/pools/small': additional"),
        (lambda v: v["poolDefaults"].update(gpus=2), "'/poolDefaults': additional"),
        (lambda v: v["modelCache"].update(claim={"sise": 1}), "'/modelCache/claim': additional"),
        (lambda v: v["config"].update(routr={}), "'/config': additional properties 'routr'"),
        (
            lambda v: v["config"]["models"][1]["engine"]["cache"].update(memory_byte=1),
            "'/config/models/1/engine/cache': additional properties 'memory_byte'",
        ),
    ],
)
def test_misspelt(change: Change, expected: str) -> None:
    assert expected in message_of(change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v["config"].pop("models"), "'/config': missing property 'models'"),
        (lambda v: v.update(pools={}), "'/pools': minProperties"),
        (lambda v: v["pools"].update(ingress={}), "invalid propertyName 'ingress'"),
        (lambda v: v["pools"]["small"].update(replicas=1.5), "want integer"),
        (lambda v: v["pools"]["small"].update(resources={"cpu": "4 cores"}), "does not match"),
        (lambda v: v["config"]["models"][0].update(replicas=0), "minimum: got 0, want 1"),
        (
            lambda v: v["config"]["models"][0]["engine"]["cache"].update(memory_bytes=True),
            "got boolean",
        ),
        (lambda v: v.update(upgradeStrategy={"type": "Recreate"}), "'/upgradeStrategy/type'"),
        (lambda v: v.update(security={"runAsUser": 0}), "minimum: got 0, want 1"),
    ],
)
def test_out_of_bounds(change: Change, expected: str) -> None:
    assert expected in message_of(change)


@pytest.mark.parametrize("memory", [8388608, 34359738368, "32GiB", "1.5GB"])
@pytest.mark.parametrize("drain", [30, 0.5, "2m"])
def test_sizes_and_durations_are_numbers_or_text(memory: Any, drain: Any) -> None:
    values = example("cpu")
    values["config"]["models"][0] |= {
        "engine": {"cache": {"memory_bytes": memory}},
        "supervision": {"drain_timeout_s": drain},
    }
    ShoalConfig.model_validate(values["config"])
    render(values)


def test_without_a_secret_it_says_how_to_make_one() -> None:
    for change in (lambda v: v.pop("clusterSecret"), lambda v: v["clusterSecret"].update(name="")):
        message = message_of(change)
        assert "clusterSecret.name is not set" in message
        assert "kubectl create secret generic shoal --namespace llm" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda v: v["config"]["models"][0]["placement"].update(num_gpus=8),
            "(large): placement.num_gpus is 8, but no worker that it may run on has more than 1",
        ),
        (
            lambda v: (
                v["config"]["models"][1]["placement"].update(num_gpus=4),
                v["pools"]["large"].update(tensorParallelSize=8),
            ),
            "(small/chat): placement.num_gpus is 4, but no worker",
        ),
        (
            lambda v: v["config"]["models"][0]["placement"].update(
                node_labels={"shoal/pool": "huge"}
            ),
            "there is no pool huge",
        ),
        (lambda v: v["config"]["models"][1].update(name="large"), "large is given twice"),
        (lambda v: v["config"].update(cluster_secret_file="/tmp/s"), "is /etc/shoal/secret"),
        (
            lambda v: v["config"]["models"][0]["engine"].update(cluster_secret_file="/tmp/s"),
            "(large): engine.cluster_secret_file",
        ),
        (lambda v: v["config"]["ingress"].update(port=8265), "Ray uses port 8265"),
        (lambda v: v["config"]["ingress"].update(port=30500), "Ray uses port 30500"),
        (
            lambda v: v["pools"]["small"].update(replicas=5, minReplicas=2),
            "pools.small: replicas (5) must be from minReplicas (2) to maxReplicas (4)",
        ),
    ],
)
def test_what_could_never_run(change: Change, expected: str) -> None:
    assert expected in message_of(change)


def test_an_incremental_upgrade_wants_the_autoscaler() -> None:
    options = {"gatewayClassName": "g", "stepSizePercent": 5, "intervalSeconds": 5}
    strategy = {"type": "NewClusterWithIncrementalUpgrade"}

    def change(values: dict[str, Any]) -> None:
        values["upgradeStrategy"] = strategy

    assert "missing properties 'gatewayClassName'" in message_of(change, "cpu")
    strategy["clusterUpgradeOptions"] = options  # type: ignore[assignment]
    assert "wants the autoscaler" in message_of(change, "cpu")
    render(example("two-models-eight-gpus", upgradeStrategy=strategy))
