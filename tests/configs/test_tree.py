"""The tree itself: every field is documented, bounded and marked; differences; names; the page."""

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from configs.describe import accepts, field_table
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from configs.shoal import ModelConfig, PlacementConfig, RouterConfig, ShoalConfig
from configs.tree import Leaf, diff, flatten, joined, leaves, part, section_of

LEAVES = list(leaves())
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def config(*models: ModelConfig, **sections: Any) -> ShoalConfig:
    return ShoalConfig(models=list(models) or [ModelConfig(name="a")], **sections)


def test_the_walk_meets_every_part():
    paths = {leaf.path for leaf in LEAVES}
    assert len(paths) == len(LEAVES)
    assert {
        "models[].name",
        "models[].engine.cache.block_size",
        "models[].supervision.stall_s",
        "ingress.port",
        "router.policy",
        "registry.path",
        "cluster_secret_file",
    } <= paths


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_every_field_is_documented_marked_and_bounded(leaf: Leaf):
    assert leaf.info.description.endswith("."), "a description is a sentence"
    assert leaf.change in ("live", "restart")
    schema = leaf.section.model_json_schema()["properties"][leaf.name]
    kinds = schema.get("anyOf", [schema])
    for kind in kinds:
        if kind.get("type") in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum"} & set(kind)
            assert {"maximum", "exclusiveMaximum"} & set(kind)
        if kind.get("type") == "string" and "enum" not in kind:
            assert "maxLength" in kind
        if kind.get("type") == "array":
            assert "maxItems" in kind
        if kind.get("type") == "object":
            assert "maxProperties" in kind


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_units_are_read_wherever_the_name_says_so(leaf: Leaf):
    is_rate = leaf.name.endswith("_per_s")
    expected = "bytes" if leaf.name.endswith("_bytes") else None
    if leaf.name.endswith("_s") and not is_rate:
        expected = "seconds"
    assert (leaf.unit.name if leaf.unit else None) == expected


def test_no_field_holds_a_secret():
    for leaf in LEAVES:
        if any(word in leaf.name for word in ("secret", "password", "credential")):
            assert leaf.name.endswith("_file")


def test_every_section_is_documented_and_strict():
    pending: list[Any] = [ShoalConfig]
    while pending:
        section = pending.pop()
        assert section.__doc__
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
        pending += filter(None, (section_of(f.annotation) for f in section.model_fields.values()))


def test_json_round_trip():
    full = config(
        ModelConfig(
            name="a/b",
            aliases=["c", "d"],
            engine=EngineConfig(threads=3, cache=CacheConfig(memory_bytes=3 << 20)),
            placement=PlacementConfig(num_gpus=0.25, node_labels={"ray.io/zone": "x"}),
        ),
        router=RouterConfig(tie_fraction=0.3),
    )
    assert ShoalConfig.model_validate_json(full.model_dump_json()) == full
    engine = full.models[0].engine
    assert EngineConfig.model_validate_json(engine.model_dump_json()) == engine
    assert json.loads(engine.model_dump_json())["cache"]["memory_bytes"] == 3 << 20


def test_strict_values():
    for wrong in ({"threads": "4"}, {"threads": True}, {"threads": 4.0}, {"model": 5}):
        with pytest.raises(ValidationError):
            EngineConfig.model_validate(wrong)
    with pytest.raises(ValidationError):
        RouterConfig(tie_fraction=float("nan"))


@pytest.mark.parametrize(
    ("models", "message", "loc"),
    [
        ([("a", []), ("a", [])], "'a' is taken by models[0]", ("models", 1, "name")),
        ([("a", ["b"]), ("b", [])], "'b' is taken by models[0]", ("models", 1, "name")),
        ([("a", ["a"])], "'a' is taken by models[0]", ("models", 0, "aliases", 0)),
        ([("a", []), ("b", ["c", "a"])], "taken by models[0]", ("models", 1, "aliases", 1)),
    ],
)
def test_a_name_belongs_to_one_model(models, message, loc):
    value = {"models": [{"name": name, "aliases": aliases} for name, aliases in models]}
    with pytest.raises(ValidationError) as caught:
        ShoalConfig.model_validate(value)
    (error,) = caught.value.errors()
    assert message in error["msg"]
    assert error["loc"] == loc


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a\n", "x" * 129])
def test_what_is_no_model_name(name):
    with pytest.raises(ValidationError):
        ModelConfig(name=name)


def test_placement_that_ray_would_refuse():
    for wrong in ({"num_gpus": 1.5}, {"num_gpus": 0.0, "num_cpus": 0.0}):
        with pytest.raises(ValidationError):
            PlacementConfig(**wrong)
    assert PlacementConfig(num_gpus=0.5, num_cpus=0).num_gpus == 0.5


def test_an_engine_gets_the_clusters_secret_unless_it_names_its_own():
    plain, own = (
        ModelConfig(name="a"),
        ModelConfig(name="b", engine=EngineConfig(cluster_secret_file="/own")),
    )
    both = config(plain, own, cluster_secret_file="/shared")
    assert plain.engine.with_secret(both.cluster_secret_file).cluster_secret_file == "/shared"
    assert own.engine.with_secret(both.cluster_secret_file).cluster_secret_file == "/own"


def test_flatten_and_diff():
    old = config(ModelConfig(name="a"), ModelConfig(name="b"))
    assert flatten(old)["models[b].engine.cache.block_size"] == (16, "restart")
    assert flatten(old)["router.policy"] == ("prefix", "live")
    assert diff(old, config(ModelConfig(name="b"), ModelConfig(name="a"))) == []
    new = config(
        ModelConfig(
            name="b",
            replicas=2,
            engine=EngineConfig(
                cache=CacheConfig(block_size=32), scheduler=SchedulerConfig(max_num_seqs=8)
            ),
        ),
        ModelConfig(name="c"),
    )
    assert [(each.path, each.change) for each in diff(old, new)] == [
        ("models[a]", "live"),
        ("models[c]", "live"),
        ("models[b].replicas", "live"),
        ("models[b].engine.cache.block_size", "restart"),
        ("models[b].engine.scheduler.max_num_seqs", "live"),
    ]
    replicas = diff(old, new)[2]
    assert (replicas.old, replicas.new) == (1, 2)


def test_accepted_values_in_words():
    words = {leaf.path: accepts(leaf) for leaf in LEAVES}
    assert words["ingress.port"] == "whole number, ≥ 1, ≤ 65535"
    assert words["models[].engine.threads"] == "whole number, ≥ 1, ≤ 1024 or `null`"
    assert words["ingress.max_body_bytes"] == "size, ≥ 1KiB, ≤ 1GiB"
    assert words["ingress.proxy"] == "`auto`, `haproxy`, `python`"
    literals = [leaf for leaf in LEAVES if get_origin(leaf.info.annotation) is Literal]
    assert all(get_args(leaf.info.annotation)[0] in words[leaf.path] for leaf in literals)


def test_the_page_is_up_to_date():
    """If it is not: replace everything below its last heading with what
    `shoal config schema --table` prints."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition("## Every field\n\n")[2].rstrip("\n") == field_table()


def test_a_model_falls_apart_into_what_restarts_it_and_what_does_not():
    model = ModelConfig(
        name="a",
        replicas=3,
        aliases=["b"],
        engine=EngineConfig(model="/m", scheduler=SchedulerConfig(max_num_seqs=9)),
        placement=PlacementConfig(num_gpus=1, node_labels={"pool": "x"}),
    )
    identity, live = part(model, "restart"), part(model, "live")
    assert identity["engine"]["model"] == "/m"
    assert "scheduler" not in identity["engine"]
    assert live["engine"] == {"scheduler": model.engine.scheduler.model_dump()}
    assert set(live) == {"aliases", "replicas", "engine", "supervision", "autoscaling"}
    assert joined(identity, live) == model
    assert joined(identity, {}).engine.scheduler == SchedulerConfig()
