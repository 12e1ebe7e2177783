"""The chart, its examples, and what Helm's own engine makes of them."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python")

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "helm" / "shoal"
EXAMPLES = ("cpu", "one-gpu", "two-models-eight-gpus")

Manifest = dict[str, Any]


@functools.cache
def _values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = helm.values_from_yaml(
        (CHART / "examples" / f"{name}.yaml").read_text()
    )
    return values


def example(name: str, **changes: Any) -> dict[str, Any]:
    """An example's values, `changes` put over its top level."""
    return copy.deepcopy(_values_of(name)) | changes


@functools.cache
def _rendered(chart: Path, values: str, release: str) -> str:
    with helm.Chart.load(chart) as loaded:
        files = loaded.render(json.loads(values), name=release, namespace="llm")
    return "\n---\n".join(text for path, text in files.items() if path.endswith(".yaml"))


def load_yaml(text: str) -> Any:
    """As PyYAML's safe loader, by its C part where that is there."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def render(
    values: dict[str, Any], release: str = "prod", chart: Path = CHART
) -> dict[tuple[str, str], Manifest]:
    """Manifests by kind and name, in namespace `llm`; the schema is checked as `helm install`
    does."""
    text = _rendered(chart, json.dumps(values, sort_keys=True), release)
    manifests = [load_yaml(each) for each in text.split("\n---\n")]
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests if each}


def ray_service(values: dict[str, Any], **options: Any) -> Manifest:
    found = [each for (kind, _), each in render(values, **options).items() if kind == "RayService"]
    assert len(found) == 1
    return found[0]


def cluster_of(values: dict[str, Any]) -> Manifest:
    """The RayCluster within the RayService."""
    cluster: Manifest = ray_service(values)["spec"]["rayClusterConfig"]
    return cluster


def groups_of(cluster: Manifest) -> dict[str, Manifest]:
    """Head and worker groups by name."""
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def pod_of(group: Manifest) -> Manifest:
    pod: Manifest = group["template"]["spec"]
    return pod


def serve_config_of(values: dict[str, Any]) -> dict[str, Any]:
    """serveConfigV2, read."""
    parsed: dict[str, Any] = load_yaml(ray_service(values)["spec"]["serveConfigV2"])
    return parsed
