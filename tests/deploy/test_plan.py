"""What a changed configuration does to what runs, and what is refused."""

from typing import Any

import pytest

from cluster.applications import is_ours, serve_applications
from cluster.deploy.plan import Effect, PlanRefused, make_plan
from configs.engine import EngineConfig, SchedulerConfig
from configs.shoal import IngressConfig, ModelConfig, RegistryConfig, RouterConfig, ShoalConfig
from configs.tree import diff, leaves


def config(*models: ModelConfig, **sections: Any) -> ShoalConfig:
    return ShoalConfig(models=list(models) or [ModelConfig(name="a")], **sections)


def effects(old: ShoalConfig | None, new: ShoalConfig) -> dict[str, Effect]:
    return {change.path: change.effect for change in make_plan(old, new).changes}


def test_the_first_time_everything_starts() -> None:
    assert effects(None, config()) == {"models[a]": Effect.START}
    assert effects(config(), config()) == {}


def test_models_come_and_go_on_their_own() -> None:
    a, b, c = (ModelConfig(name=name) for name in "abc")
    assert effects(config(a, b), config(b, c)) == {
        "models[a]": Effect.REMOVE,
        "models[c]": Effect.START,
    }


def test_what_restarts_is_said_with_what_it_means() -> None:
    old = ModelConfig(name="a", replicas=3)
    new = ModelConfig(name="a", replicas=3, engine=EngineConfig(model="other"))
    plan = make_plan(config(old, ModelConfig(name="b")), config(new, ModelConfig(name="b")))
    assert [str(change) for change in plan.changes] == [
        "restart  models[a].engine.model: default → other"
    ]
    (note,) = plan.notes
    assert note.startswith("a: its 3 engines are replaced in turns; what runs has 30s to finish")
    assert "wait up to 2m" in note


def test_another_secret_restarts_all_models() -> None:
    models = [ModelConfig(name="a"), ModelConfig(name="b")]
    old, new = (config(*models, cluster_secret_file=path) for path in ("/x", "/y"))
    plan = make_plan(old, new)
    assert [change.effect for change in plan.changes] == [Effect.RESTART]
    assert [note[0] for note in plan.notes] == ["a", "b"]


@pytest.mark.parametrize(
    "sections",
    [{"ingress": IngressConfig(port=9)}, {"registry": RegistryConfig(lease_s=9.0)}],
    ids=["port", "lease"],
)
def test_what_all_stands_on_cannot_change(sections: dict[str, Any]) -> None:
    with pytest.raises(PlanRefused, match=r"cannot change from .* to 9.* while the cluster runs"):
        make_plan(config(), config(**sections))


def test_only_what_is_marked_restart_is_an_argument_of_an_application() -> None:
    """Serve restarts what gets other arguments, and nothing else."""
    scheduler = SchedulerConfig(max_num_seqs=7)
    live = config(
        ModelConfig(name="a", replicas=2, aliases=["z"], engine=EngineConfig(scheduler=scheduler)),
        router=RouterConfig(tie_fraction=0.5),
        ingress=IngressConfig(replicas=2, hold_s=5.0),
    )
    assert all(change.change == "live" for change in diff(config(), live))

    def arguments(of: ShoalConfig) -> list[dict[str, Any]]:
        return [each["args"] for each in serve_applications(of)]

    assert arguments(live) == arguments(config())
    restart = config(ModelConfig(name="a", engine=EngineConfig(dtype="float32")))
    assert arguments(restart)[0] == arguments(config())[0]
    assert arguments(restart)[1] != arguments(config())[1]


def test_every_field_of_a_model_reaches_its_application() -> None:
    described = serve_applications(config())[1]
    (deployment,) = described["deployments"]
    parts = [described["args"]["model"], deployment["user_config"]]

    def has(tree: dict[str, Any], path: list[str]) -> bool:
        head, *rest = path
        return head in tree and (not rest or has(tree[head], rest))

    for leaf in leaves():
        section, _, path = leaf.path.partition("[].")
        if section == "models" and path not in ("replicas",):
            assert sum(has(part, path.split(".")) for part in parts) == 1, path


def test_an_application_of_others_is_not_ours_by_its_name_alone() -> None:
    ours = serve_applications(config())
    assert all(map(is_ours, ours))
    assert not any(is_ours({**each, "import_path": "their.module:app"}) for each in ours)
    assert not any(is_ours({**each, "name": "neighbour"}) for each in ours)
