"""Every manifest against the schema of its kind."""

import gzip
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.helm.chart import (
    CHART,
    EXAMPLES,
    REPOSITORY,
    example,
    helm,
    load_yaml,
    ray_service,
    render,
)

_CRD = REPOSITORY.parent / "shared" / "data" / "kuberay" / "rayservices-crd.yaml.gz"
_KUBERNETES = ("1.29", "1.37")
_OF_OPERATORS = ("RayService", "PodMonitor")


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lint(name: str) -> None:
    report = helm.lint(CHART, example(name), strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", _KUBERNETES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_kinds_of_kubernetes(name: str, version: str) -> None:
    claim = {"create": True, "storageClassName": "fast"}
    manifests = render(example(name, modelCache={"claim": claim}))
    checked = set()
    for (kind, _), manifest in manifests.items():
        if kind not in _OF_OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked.add(kind)
    assert checked >= {"NetworkPolicy", "PersistentVolumeClaim"}


@pytest.fixture(scope="module")
def crd() -> jsonschema.Draft202012Validator:
    if not _CRD.is_file():
        pytest.skip(f"{_CRD} is not there: a RayService can only be checked against KubeRay's CRD")
    definition = load_yaml(gzip.decompress(_CRD.read_bytes()).decode())
    versions = {each["name"]: each for each in definition["spec"]["versions"]}
    schema: dict[str, Any] = versions["v1"]["schema"]["openAPIV3Schema"]
    _close(schema)
    return jsonschema.Draft202012Validator(schema)


def _close(schema: Any) -> None:
    """Refuses what the API server would drop: a field that the CRD does not name."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            _close(each)
    elif isinstance(schema, list):
        for each in schema:
            _close(each)


@pytest.mark.parametrize("name", EXAMPLES)
def test_ray_service(name: str, crd: jsonschema.Draft202012Validator) -> None:
    crd.validate(ray_service(example(name)))


def test_ray_service_with_everything_set(crd: jsonschema.Draft202012Validator) -> None:
    values = example(
        "two-models-eight-gpus",
        upgradeStrategy={
            "type": "NewClusterWithIncrementalUpgrade",
            "clusterUpgradeOptions": {
                "gatewayClassName": "istio",
                "stepSizePercent": 10,
                "intervalSeconds": 30,
            },
        },
        service={"type": "LoadBalancer", "annotations": {"internal": "true"}},
        auth={"secretName": "ray-token"},
        serviceAccountName="models",
        modelCache={"emptyDir": {"sizeLimit": "200Gi"}},
        extraEnv=[{"name": "HF_ENDPOINT", "value": "hub"}],
    )
    values["gcsFaultTolerance"]["redisUsername"] = {"name": "redis"}
    values["pools"]["small"] |= {
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "annotations": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
        "image": {"tag": "1", "digest": "sha256:" + 64 * "0"},
    }
    crd.validate(ray_service(values))


def test_the_check_notices_what_the_crd_does_not_know(crd: jsonschema.Draft202012Validator) -> None:
    service = ray_service(example("cpu"))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["nodeSelektor"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeSelektor"):
        crd.validate(service)


def test_names_stay_within_what_kuberay_takes() -> None:
    service = ray_service(example("cpu"), release="a" * 53)
    assert len(service["metadata"]["name"]) == 47


def test_names_that_yaml_would_take_for_something_else() -> None:
    values = example("cpu", clusterSecret={"name": "123", "key": "on"})
    values["pools"] = {"on": values["pools"]["cpu"], "cpu": values["pools"]["cpu"]}
    service = ray_service(values, release="x")
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [each["groupName"] for each in groups] == ["ingress", "cpu", "on"]
    source = groups[0]["template"]["spec"]["volumes"][0]["secret"]
    assert (source["secretName"], source["items"][0]["key"]) == ("123", "on")


def test_pod_monitor_finds_the_ports_of_this_release() -> None:
    monitor = render(example("two-models-eight-gpus"))["PodMonitor", "prod-shoal"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
    selector = dict(monitor["spec"]["selector"]["matchLabels"])
    assert selector.pop("ray.io/is-ray-node") == "yes"  # KubeRay's, of every Ray pod

    spec = ray_service(example("two-models-eight-gpus"))["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        template = group["template"]
        assert selector.items() <= template["metadata"]["labels"].items()
        ports = {
            each["name"]: each["containerPort"]
            for each in template["spec"]["containers"][0]["ports"]
        }
        assert ports["metrics"] == 8080


def test_pod_monitor_is_off_by_default() -> None:
    assert "PodMonitor" not in {kind for kind, _ in render(example("cpu"))}
