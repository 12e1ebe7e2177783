"""What a model's placement asks of Ray."""

from configs.engine import EngineConfig
from configs.shoal import ModelConfig, PlacementConfig
from replicas.application import EngineArguments, engine_application, engine_arguments


def options_of(placement: PlacementConfig, engine: EngineConfig | None = None) -> dict[str, object]:
    model = ModelConfig(name="m", engine=engine or EngineConfig(), placement=placement)
    arguments = EngineArguments(model=engine_arguments(model))
    deployment = engine_application(arguments)._bound_deployment
    config = deployment._replica_config
    return {
        "bundles": config.placement_group_bundles,
        "selector": config.placement_group_bundle_label_selector,
        "strategy": config.placement_group_strategy,
    }


def test_an_engine_has_a_bundle_of_its_own_beside_its_supervisor() -> None:
    options = options_of(PlacementConfig(num_cpus=3.0))
    assert options["strategy"] == "STRICT_PACK"
    assert options["bundles"] == [{"CPU": 0.01}, {"CPU": 3.0}]
    assert not options["selector"]


def test_gpus_their_kind_and_node_labels_are_asked_for() -> None:
    placement = PlacementConfig(
        num_gpus=1.0, num_cpus=2.0, accelerator_type="H100", node_labels={"pool": "big"}
    )
    options = options_of(placement)
    assert options["bundles"] == [
        {"CPU": 0.01},
        {"CPU": 2.0, "GPU": 1.0, "accelerator_type:H100": 0.001},
    ]
    assert options["selector"] == [{}, {"pool": "big"}]


def test_an_engine_of_several_ranks_has_one_bundle_with_a_gpu_for_each() -> None:
    placement = PlacementConfig(num_gpus=4.0, num_cpus=8.0)
    options = options_of(placement, EngineConfig(tensor_parallel_size=4))
    assert options["bundles"] == [{"CPU": 0.01}, {"CPU": 8.0, "GPU": 4.0}]
    assert options["strategy"] == "STRICT_PACK"
