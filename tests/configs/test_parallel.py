"""Which configurations an engine of several ranks excludes."""

import pytest

from configs.engine import CacheConfig, EngineConfig
from configs.shoal import ModelConfig, PlacementConfig


def test_configurations_that_exclude_ranks() -> None:
    with pytest.raises(ValueError, match="executor: model, not simulated"):
        EngineConfig(tensor_parallel_size=2, executor="simulated")
    with pytest.raises(ValueError, match=r"tensor_parallel_size above 1 and cache\.disk_path"):
        EngineConfig(tensor_parallel_size=2, cache=CacheConfig(disk_path="/tmp/kv"))
    with pytest.raises(ValueError, match="less than or equal to 64"):
        EngineConfig(tensor_parallel_size=65)


@pytest.mark.parametrize(
    ("ranks", "placement", "reason"),
    [
        (1, {"num_gpus": 2.0}, "num_gpus must be engine.tensor_parallel_size, which is 1"),
        (4, {"num_gpus": 2.0, "num_cpus": 4.0}, "num_gpus must be .* which is 4"),
        (2, {"num_gpus": 0.5, "num_cpus": 4.0}, "num_gpus must be .* which is 2"),
        (2, {"num_gpus": 2.0}, "num_cpus is less than one for each of .*, 2"),
    ],
)
def test_a_placement_has_a_gpu_for_each_rank_or_none(
    ranks: int, placement: dict[str, float], reason: str
) -> None:
    engine = EngineConfig(tensor_parallel_size=ranks)
    with pytest.raises(ValueError, match=reason):
        ModelConfig(name="m", engine=engine, placement=PlacementConfig(**placement))


def test_placements_of_ranks() -> None:
    engine = EngineConfig(tensor_parallel_size=2)
    for gpus in (0.0, 2.0):
        placement = PlacementConfig(num_gpus=gpus, num_cpus=2.0)
        assert ModelConfig(name="m", engine=engine, placement=placement).placement == placement
