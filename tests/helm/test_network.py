"""What reaches the pods from outside, and what keeps them when nodes are drained."""

from typing import Any

import pytest

from tests.helm.chart import EXAMPLES, example, groups_of, render

examples = pytest.mark.parametrize("name", EXAMPLES)


def policies_of(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one of all pods and the one of the head."""
    manifests = render(values)
    return (
        manifests["NetworkPolicy", "prod-shoal"]["spec"],
        manifests["NetworkPolicy", "prod-shoal-head"]["spec"],
    )


def opened(policy: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Peers by port, of other pods than the release's own. Fails where a rule leaves out either:
    that would mean all."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rule in policy["ingress"]:
        assert rule["from"]
        if rule["from"] == [{"podSelector": {"matchLabels": _OURS}}]:
            continue
        assert rule["ports"]
        for port in rule["ports"]:
            assert port["protocol"] == "TCP"
            assert "endPort" not in port
            found.setdefault(port["port"], []).extend(rule["from"])
    return found


_OURS = {"app.kubernetes.io/instance": "prod", "app.kubernetes.io/part-of": "prod-shoal"}


@examples
def test_every_pod_of_the_release_is_closed_and_no_other(name: str) -> None:
    everyone, head = policies_of(example(name))
    assert everyone["podSelector"] == {"matchLabels": _OURS}
    assert everyone["policyTypes"] == head["policyTypes"] == ["Ingress"]
    service = render(example(name))["RayService", "prod-shoal"]["spec"]["rayClusterConfig"]
    for group_name, group in groups_of(service).items():
        labels = group["template"]["metadata"]["labels"]
        assert _OURS.items() <= labels.items()
        is_head = head["podSelector"]["matchLabels"].items() <= labels.items()
        assert is_head == (group_name == "head")


@examples
def test_only_http_metrics_and_the_operators_port_are_open(name: str) -> None:
    everyone, head = policies_of(example(name))
    assert set(opened(everyone)) == {8000, 8080}
    assert set(opened(head)) == {8265}


def test_who_is_let_in() -> None:
    everyone, head = policies_of(example("two-models-eight-gpus"))
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
    monitoring = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    assert opened(everyone) == {8000: [gateway], 8080: [monitoring]}
    [operator] = opened(head)[8265]
    assert operator["podSelector"] == {
        "matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}
    }
    [namespaces] = operator["namespaceSelector"]["matchExpressions"]
    assert (namespaces["operator"], namespaces["values"]) == ("In", ["kuberay-system"])


def test_http_is_this_namespaces_by_default() -> None:
    everyone, _ = policies_of(example("cpu"))
    assert opened(everyone)[8000] == [{"podSelector": {}}]


def test_an_empty_list_closes() -> None:
    closed: dict[str, Any] = {"httpFrom": [], "metricsFrom": []}
    everyone, _ = policies_of(example("cpu", networkPolicy=closed))
    assert opened(everyone) == {}


def test_dashboard_and_client_for_those_who_are_named() -> None:
    peer = {"ipBlock": {"cidr": "192.0.2.0/24"}}
    network = {"dashboardFrom": [peer], "rayClientFrom": [peer]}
    _, head = policies_of(example("cpu", networkPolicy=network))
    assert opened(head)[8265][1:] == [peer]
    assert opened(head)[10001] == [peer]


def test_the_port_of_http_is_the_configured_one() -> None:
    values = example("cpu")
    values["config"]["ingress"] = {"port": 9000}
    everyone, _ = policies_of(values)
    assert set(opened(everyone)) == {9000, 8080}


def test_it_can_be_switched_off() -> None:
    kinds = {kind for kind, _ in render(example("cpu", networkPolicy={"enabled": False}))}
    assert "NetworkPolicy" not in kinds


def test_disruption_budgets() -> None:
    manifests = render(example("two-models-eight-gpus"))
    budgets = {
        name: each["spec"]
        for (kind, name), each in manifests.items()
        if kind == "PodDisruptionBudget"
    }
    assert {name: each["minAvailable"] for name, each in budgets.items()} == {
        "prod-shoal-ingress": 1,
        "prod-shoal-large": 3,
    }
    for name, budget in budgets.items():
        pool = name.removeprefix("prod-shoal-")
        assert budget["selector"] == {"matchLabels": _OURS | {"shoal/pool": pool}}
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_single_ingress_has_no_budget_that_would_block_drains() -> None:
    assert "PodDisruptionBudget" not in {kind for kind, _ in render(example("cpu"))}
