"""serveConfigV2: what Ray reads of it, and that it deploys what `shoal deploy` would."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.applications import serve_config
from cluster.deployment import IngressArguments
from configs.shoal import ShoalConfig
from configs.tree import joined, leaves
from replicas.application import EngineArguments
from tests.helm.chart import EXAMPLES, example, ray_service, serve_config_of

_SECRET_FILE = "/etc/shoal/secret"
_BARE = {"models": [{"name": "bare"}]}
_ODD = {
    "models": [
        {
            "name": "Qwen/Qwen3-8B:v1@main+x",
            "aliases": ["a", "b:c"],
            "replicas": 3,
            "autoscaling": {"up_delay_s": 0.25},
            "engine": {
                "executor": "simulated",
                "max_model_len": None,
                "cache": {"memory_bytes": 17592186044416, "num_blocks": 16777216},
                "scheduler": {"max_num_batched_tokens": 1048576},
                "simulation": {"token_s": 0.0005, "max_model_len": 1073741824},
                "transport": {"max_message_bytes": "16MiB", "lease_s": "1.5s"},
            },
        },
        {"name": "only-scheduler", "engine": {"scheduler": {"max_num_seqs": 8}}},
        {"name": "scaled", "replicas": 2, "autoscaling": {"max_replicas": 5}},
    ],
    "ingress": {"port": 9000, "replicas": 3, "max_body_bytes": 8388608, "keep_alive_s": 15},
    "router": {"default_prefill_tokens_per_s": 1000000},
    "registry": {"lease_s": 2},
    "cluster_secret_file": _SECRET_FILE,
}
_CONFIGS = {name: example(name)["config"] for name in EXAMPLES} | {"bare": _BARE, "odd": _ODD}
configs = pytest.mark.parametrize("config", _CONFIGS.values(), ids=_CONFIGS.keys())


def values_with(config: dict[str, Any]) -> dict[str, Any]:
    """Values for any of them: one pool that takes all of its models."""
    pools = {name: {"tensorParallelSize": 8} for name in ("any", "cpu", "large", "small")}
    return example("cpu", config=config, pools=pools)


def typed(config: dict[str, Any]) -> ShoalConfig:
    return ShoalConfig.model_validate(config | {"cluster_secret_file": _SECRET_FILE})


@configs
def test_ray_takes_it(config: dict[str, Any]) -> None:
    parsed = ServeDeploySchema.model_validate(serve_config_of(values_with(config)))
    assert parsed.proxy_location == "EveryNode"
    [ingress] = parsed.applications[0].deployments
    options = ingress.ray_actor_options
    assert (options.num_cpus, options.label_selector) == (1, {"shoal/pool": "ingress"})


@configs
def test_it_deploys_what_python_would(config: dict[str, Any]) -> None:
    rendered, wanted = serve_config_of(values_with(config)), serve_config(typed(config))
    # A pod is reached from others, whatever the file says of a machine of its own.
    wanted["http_options"]["host"] = "0.0.0.0"
    applications = rendered.pop("applications"), wanted.pop("applications")
    assert rendered == wanted
    for ours, theirs in zip(*applications, strict=True):
        deployments = ours.pop("deployments"), theirs.pop("deployments")
        arguments = ours.pop("args"), theirs.pop("args")
        assert ours == theirs
        is_ingress = ours["name"] == "ingress"
        schema: Any = IngressArguments if is_ingress else EngineArguments
        identities = [schema.model_validate(each).model_dump() for each in arguments]
        [[mine], [other]] = deployments
        live = mine.pop("user_config"), other.pop("user_config")
        if is_ingress:
            del mine["ray_actor_options"]
            assert identities[0] == identities[1]
            trees = [ShoalConfig.model_validate(each["config"]) for each in live]
            assert trees[0] == trees[1]
        else:
            models = [each.pop("model") for each in identities]
            assert identities[0] == identities[1]
            assert joined(models[0], {}) == joined(models[1], {})
            assert joined(models[0], live[0]) == joined(models[1], live[1])
        assert mine == other


def _paths(tree: dict[str, Any], prefix: str = "models[].") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "node_labels":
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@configs
def test_what_is_live_restarts_nothing(config: dict[str, Any]) -> None:
    change_of = {leaf.path: leaf.change for leaf in leaves()}
    for application in serve_config_of(values_with(config))["applications"][1:]:
        identity = set(_paths(application["args"]["model"]))
        live = set(_paths(application["deployments"][0]["user_config"]))
        assert {change_of[path] for path in identity} == {"restart"}
        assert {change_of[path] for path in live} <= {"live"}


def test_the_number_of_engines() -> None:
    bounds = []
    for application in serve_config_of(values_with(_ODD))["applications"][1:]:
        scaling = application["deployments"][0]["autoscaling_config"]
        bounds.append((scaling["min_replicas"], scaling["max_replicas"]))
    assert bounds == [(3, 3), (1, 1), (2, 5)]


@configs
def test_whole_numbers_stay_whole(config: dict[str, Any]) -> None:
    # Helm holds every number as a float, and prints 8388608 as 8.388608e+06 where it is let.
    assert not re.search(r"\d[eE]\+\d", ray_service(values_with(config))["spec"]["serveConfigV2"])
    # Strict: a float is no int.
    ingress = serve_config_of(values_with(config))["applications"][0]
    ShoalConfig.model_validate(ingress["deployments"][0]["user_config"]["config"])


def test_a_change_of_the_configuration_changes_no_pod() -> None:
    def cluster(config: dict[str, Any]) -> Any:
        spec = ray_service(values_with(config))["spec"]
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            # Not part of what KubeRay compares.
            del group["replicas"], group["minReplicas"], group["maxReplicas"]
        return spec["rayClusterConfig"], spec["serveConfigV2"]

    changed = _ODD | {"models": [*_ODD["models"], {"name": "new"}], "router": {}}
    changed["ingress"] = _ODD["ingress"] | {"replicas": 5, "max_body_bytes": "1MiB"}
    before, after = cluster(_ODD), cluster(changed)
    assert before[0] == after[0]
    assert before[1] != after[1]
