"""Ray's nodes as pods: what they are given, and what they may do."""

import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.secret import SecretError, read_secret
from tests.helm.chart import (
    CHART,
    EXAMPLES,
    cluster_of,
    example,
    groups_of,
    pod_of,
    ray_service,
)

examples = pytest.mark.parametrize("name", EXAMPLES)


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["initContainers"], *pod["containers"]]


def environment_of(group: dict[str, Any]) -> dict[str, Any]:
    [container] = pod_of(group)["containers"]
    entries = container["env"]
    environment = {each["name"]: each.get("value", each.get("valueFrom")) for each in entries}
    assert len(environment) == len(entries)
    return environment


def resources_of(group: dict[str, Any]) -> dict[str, Any]:
    [container] = pod_of(group)["containers"]
    limits: dict[str, Any] = container["resources"]["limits"]
    return limits


# ---------------------------------------------------------------- security


@examples
def test_every_pod_keeps_the_restricted_standard(name: str) -> None:
    for group in groups_of(cluster_of(example(name))).values():
        pod = pod_of(group)
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"secret", "emptyDir", "persistentVolumeClaim", "projected"}
        for container in containers_of(pod):
            _assert_restricted(container["securityContext"])


def _assert_restricted(context: dict[str, Any]) -> None:
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"] is True
    assert not context.get("privileged")


@examples
def test_requests_are_limits(name: str) -> None:
    for group in groups_of(cluster_of(example(name))).values():
        for container in containers_of(pod_of(group)):
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            assert resources["limits"].keys() >= {"cpu", "memory"}


@examples
def test_the_secret_is_a_file_on_every_pod_and_nowhere_else(name: str) -> None:
    for group in groups_of(cluster_of(example(name))).values():
        pod = pod_of(group)
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes["cluster-secret-source"]["secret"]["secretName"] == "shoal"
        assert volumes["cluster-secret"]["emptyDir"]["medium"] == "Memory"
        [container] = pod["containers"]
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        assert mounts["/etc/shoal"] == {
            "name": "cluster-secret",
            "mountPath": "/etc/shoal",
            "readOnly": True,
        }
        # The original is readable by a group; only the container that copies it sees it.
        assert "cluster-secret-source" not in {each["name"] for each in container["volumeMounts"]}
    assert "shoal-secret" not in str(ray_service(example(name))["spec"]["serveConfigV2"])


def test_the_copy_of_the_secret_is_one_that_shoal_reads(tmp_path: Path) -> None:
    [init] = pod_of(groups_of(cluster_of(example("cpu")))["ingress"])["initContainers"]
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("0123456789abcdef" * 4)
    source.chmod(0o440)  # what fsGroup makes of a Secret volume
    with pytest.raises(SecretError, match="must not be accessible to others"):
        read_secret(source)

    *command, original, copy = init["command"]
    assert (original, copy) == ("/run/cluster-secret/secret", "/etc/shoal/secret")
    assert shutil.which(command[0])
    for _ in range(2):  # a pod's sandbox may be made anew, with the volume still there
        subprocess.run([*command, str(source), str(target)], check=True, timeout=10)
    assert stat.S_IMODE(target.stat().st_mode) == 0o400
    assert len(read_secret(target)) == 64


def test_the_hub_token_goes_by_reference_to_those_that_download() -> None:
    groups = groups_of(cluster_of(example("one-gpu")))
    reference = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert environment_of(groups["gpu"])["HF_TOKEN"] == reference
    assert environment_of(groups["ingress"])["HF_TOKEN"] == reference
    assert "HF_TOKEN" not in environment_of(groups["head"])
    assert "HF_TOKEN" not in environment_of(groups_of(cluster_of(example("cpu")))["cpu"])


def test_ray_asks_for_its_token() -> None:
    assert cluster_of(example("cpu"))["authOptions"] == {"mode": "token"}
    named = cluster_of(example("cpu", auth={"secretName": "mine"}))
    assert named["authOptions"] == {"mode": "token", "secretName": "mine"}


def test_without_a_token_ray_is_told_so() -> None:
    cluster = cluster_of(example("two-models-eight-gpus", auth={"mode": "disabled"}))
    for group in groups_of(cluster).values():
        assert environment_of(group)["RAY_AUTH_MODE"] == "disabled"
    assert cluster["autoscalerOptions"]["env"] == [{"name": "RAY_AUTH_MODE", "value": "disabled"}]


# ---------------------------------------------------------------- Ray


@examples
def test_ray_and_serve_are_told_the_same_everywhere(name: str) -> None:
    environments = [environment_of(each) for each in groups_of(cluster_of(example(name))).values()]
    for environment in environments:
        environment.pop("HF_TOKEN", None)
        assert environment == environments[0]
    expected = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": "/usr/local/bin/shoal-haproxy",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HOME": "/models/huggingface",
    }
    assert expected.items() <= environments[0].items()


def test_the_proxy_is_the_one_that_is_configured() -> None:
    values = example("cpu")
    values["config"]["ingress"] = {"proxy": "python"}
    groups = groups_of(cluster_of(values))
    assert {environment_of(each)["RAY_SERVE_ENABLE_HA_PROXY"] for each in groups.values()} == {"0"}


@examples
def test_a_pod_has_longer_than_the_drain(name: str) -> None:
    for group in groups_of(cluster_of(example(name))).values():
        drain_s = float(environment_of(group)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 15 <= drain_s < pod_of(group)["terminationGracePeriodSeconds"]


def test_head_and_ingress_take_no_work_of_others() -> None:
    groups = groups_of(cluster_of(example("two-models-eight-gpus")))
    head, ingress = groups["head"]["rayStartParams"], groups["ingress"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0")
    # Room for one ingress, and for no engine: that needs its CPUs and its supervisor's 0.01.
    assert (ingress["num-cpus"], ingress["num-gpus"]) == ("1", "0")
    assert ray_service(example("cpu"))["spec"]["excludeHeadPodFromServeSvc"] is True


def test_ingresses_have_a_group_of_their_own() -> None:
    group = groups_of(cluster_of(example("two-models-eight-gpus")))["ingress"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    # KubeRay refuses labels among rayStartParams; from here they are Ray's and the pod's.
    assert group["labels"] == {"shoal/pool": "ingress"}
    assert "labels" not in group["rayStartParams"]
    spread = pod_of(group)["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    labels = group["template"]["metadata"]["labels"]
    assert all(each["labelSelector"]["matchLabels"].items() <= labels.items() for each in spread)


def test_kuberay_keeps_the_label_that_its_services_select_by() -> None:
    for group in groups_of(cluster_of(example("cpu"))).values():
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]


def test_the_port_of_http_is_named_for_kuberay() -> None:
    values = example("cpu")
    values["config"]["ingress"] = {"port": 9000}
    for group in groups_of(cluster_of(values)).values():
        [container] = pod_of(group)["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["serve"] == 9000


def test_the_chart_and_its_ray_are_those_of_the_images() -> None:
    version = cluster_of(example("cpu"))["rayVersion"]
    for name in ("Dockerfile", "Dockerfile.cpu"):
        assert f'"ray[serve]=={version}"' in (CHART.parents[1] / name).read_text()


# ---------------------------------------------------------------- pools


@pytest.mark.parametrize("size", [1, 2, 8])
def test_gpus_of_a_worker_follow_tensor_parallel_size(size: int) -> None:
    values = example("one-gpu", pools={"gpu": {"tensorParallelSize": size}})
    group = groups_of(cluster_of(values))["gpu"]
    assert resources_of(group)["nvidia.com/gpu"] == size


def test_pools_of_the_largest_example() -> None:
    groups = groups_of(cluster_of(example("two-models-eight-gpus")))
    assert list(groups) == ["head", "ingress", "large", "small"]
    large, small = groups["large"], groups["small"]
    assert resources_of(large) == {"cpu": "8", "memory": "192Gi", "nvidia.com/gpu": 1}
    assert resources_of(small) == {"cpu": "8", "memory": "96Gi", "nvidia.com/gpu": 1}
    assert [large[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 4]
    assert [small[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 4]
    assert large["labels"] == {"shoal/pool": "large"}
    # For Ray's autoscaler: what a pod that is not there yet would have.
    assert large["rayStartParams"]["resources"] == """'{"accelerator_type:H100": 1}'"""
    assert "resources" not in small["rayStartParams"]
    for group in (large, small):
        assert pod_of(group)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "nodeSelector" not in pod_of(groups["ingress"])
    shared = {each["name"]: each for each in pod_of(large)["volumes"]}["shared-memory"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}


def test_a_cpu_pool_has_no_gpus() -> None:
    group = groups_of(cluster_of(example("cpu")))["cpu"]
    assert resources_of(group) == {"cpu": "5", "memory": "8Gi"}
    assert group["rayStartParams"]["num-gpus"] == "0"


def test_a_pool_says_nothing_by_naught_and_by_empty_lists() -> None:
    values = example("one-gpu")
    values["poolDefaults"] = {"tolerations": [{"operator": "Exists"}], "replicas": 2}
    values["pools"] = {"gpu": {"replicas": 0, "maxReplicas": 4, "tolerations": []}}
    group = groups_of(cluster_of(values))["gpu"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [0, 0, 4]
    assert "tolerations" not in pod_of(group)


def test_an_image_of_its_own() -> None:
    values = example("two-models-eight-gpus")
    values["image"] |= {"digest": "sha256:" + 64 * "a"}
    values["head"] = {"image": {"tag": "cpu"}}
    groups = groups_of(cluster_of(values))
    images = {
        name: {each["image"] for each in containers_of(pod_of(group))}
        for name, group in groups.items()
    }
    assert images["head"] == {"REGISTRY/shoal:cpu"}
    assert images["large"] == {"REGISTRY/shoal:0.1.0@sha256:" + 64 * "a"}


def test_the_autoscaler_runs_where_a_pool_may_grow_or_shrink() -> None:
    assert "enableInTreeAutoscaling" not in cluster_of(example("cpu"))
    cluster = cluster_of(example("two-models-eight-gpus"))
    assert cluster["enableInTreeAutoscaling"] is True
    options = cluster["autoscalerOptions"]
    assert (options["version"], options["idleTimeoutSeconds"]) == ("v2", 600)
    assert options["resources"]["requests"] == options["resources"]["limits"]
    _assert_restricted(options["securityContext"])

    shrinking = example("cpu")
    shrinking["pools"]["cpu"] |= {"replicas": 2, "minReplicas": 1}
    assert cluster_of(shrinking)["enableInTreeAutoscaling"] is True


def test_only_the_autoscaler_has_a_token_of_kubernetes() -> None:
    cluster = cluster_of(example("two-models-eight-gpus"))
    [mount] = cluster["autoscalerOptions"]["volumeMounts"]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    with_token = [
        name
        for name, group in groups_of(cluster).items()
        if "kubernetes-api" in {each["name"] for each in pod_of(group)["volumes"]}
    ]
    assert with_token == ["head"]
    for group in groups_of(cluster).values():
        mounted = {m["name"] for each in containers_of(pod_of(group)) for m in each["volumeMounts"]}
        assert "kubernetes-api" not in mounted


# ---------------------------------------------------------------- storage, Redis, upgrades


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "9Gi"}}, {"emptyDir": {"sizeLimit": "9Gi"}}),
        (
            {"claim": {"create": True}},
            {"persistentVolumeClaim": {"claimName": "prod-shoal-models"}},
        ),
        ({"existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
    ],
)
def test_models_are_on_every_pod(cache: dict[str, Any], expected: dict[str, Any]) -> None:
    for group in groups_of(cluster_of(example("cpu", modelCache=cache))).values():
        volumes = {each.pop("name"): each for each in pod_of(group)["volumes"]}
        assert volumes["models"] == expected
        [container] = pod_of(group)["containers"]
        assert {"name": "models", "mountPath": "/models"} in container["volumeMounts"]


def test_redis_by_reference() -> None:
    assert cluster_of(example("two-models-eight-gpus"))["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.databases:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    assert "gcsFaultToleranceOptions" not in cluster_of(example("cpu"))


def test_pods_change_when_their_operators_say_so() -> None:
    assert ray_service(example("cpu"))["spec"]["upgradeStrategy"] == {"type": "None"}


def test_a_new_version_of_the_chart_alone_makes_no_new_cluster(tmp_path: Path) -> None:
    copy = tmp_path / "shoal"
    shutil.copytree(CHART, copy)
    definition = copy / "Chart.yaml"
    definition.write_text(definition.read_text().replace("\nversion: ", "\nversion: 9"))
    before, after = ray_service(example("cpu")), ray_service(example("cpu"), chart=copy)
    assert before["metadata"] != after["metadata"]
    assert before["spec"] == after["spec"]
