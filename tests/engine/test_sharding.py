"""What each rank holds: parts that make up the whole, read from several files, and refusals."""

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.collectives import TorchCollectives
from engine.errors import ConfigurationError, ModelRefused
from engine.models.checkpoint import read_shapes
from engine.models.decoder_traits import read_decoder_traits
from engine.models.device import usable_device
from engine.models.load import load_model
from engine.models.merged_weights import WholeTensors, count_bytes, read_weights
from engine.models.sharding import WHOLE, Shard
from engine.models.support import load_config
from engine.models.traits import read_traits
from tests.tiny_models import reference_module, tiny_model

CPU = torch.device("cpu")
RANKS = (Shard(0, 2), Shard(1, 2))


@given(st.integers(1, 9), st.integers(0, 200))
def test_parts_follow_one_another_and_are_the_whole(count: int, size: int) -> None:
    parts = [Shard(rank, count).part(size) for rank in range(count)]
    assert [place for part in parts for place in part] == list(range(size))
    assert all(len(part) <= len(parts[0]) for part in parts)
    if size % count == 0:
        assert {len(part) for part in parts} == {size // count}


@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_of_each_section_a_rank_holds_its_part(count: int, factors: list[int]) -> None:
    sections = [count * factor for factor in factors]
    held = [Shard(rank, count).parts(sections) for rank in range(count)]
    begin = 0
    for number, size in enumerate(sections):
        places = [place for ranges in held for place in ranges[number]]
        assert places == list(range(begin, begin + size))
        assert {len(ranges[number]) for ranges in held} == {factors[number]}
        begin += size


def in_files(name: str, folder: Path) -> Path:
    """The tiny model `name` in many small files."""
    reference_module(name).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def read(folder: Path, shard: Shard) -> dict[str, torch.Tensor]:
    config = load_config(folder)
    traits = read_traits(config, folder, "float32")
    decoder = read_decoder_traits(config, traits)
    weights = read_weights(folder, traits, decoder, CPU, shard=shard)
    assert weights.num_bytes == count_bytes(read_shapes(folder), traits, decoder, shard)
    return weights.tensors


def rows(whole: torch.Tensor, rank: int, *sections: int) -> torch.Tensor:
    """Of each section the half that is `rank`'s."""
    halves = [part.chunk(2)[rank] for part in whole.split(list(sections))]
    return torch.cat(halves)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
def test_shards_read_from_several_files_are_slices_of_the_whole(name: str, tmp_path: Path) -> None:
    folder = in_files(name, tmp_path)
    whole = read(folder, WHOLE)
    for shard in RANKS:
        held, rank = read(folder, shard), shard.rank
        for tensor_name, tensor in whole.items():
            # 4 heads and 2 KV heads of 16, 96 intermediate elements.
            match tensor_name.split(".")[-1]:
                case "qkv" | "qkv_bias":
                    expected = rows(tensor, rank, 64, 32, 32)
                case "gate_up":
                    expected = rows(tensor, rank, 96, 96)
                case "head":
                    expected = tensor.chunk(2)[rank]
                case "output" | "down":
                    expected = tensor.chunk(2, dim=1)[rank]
                case _:
                    expected = tensor
            assert torch.equal(held[tensor_name], expected), tensor_name
        assert held.keys() == whole.keys()


def test_experts_are_shared_out_one_by_one(tmp_path: Path) -> None:
    folder = in_files("mixtral", tmp_path)
    whole = read(folder, WHOLE)
    for shard in RANKS:
        held, rank = read(folder, shard), shard.rank
        for layer in range(3):
            gate_up, down = whole[f"{layer}.expert_gate_up"], whole[f"{layer}.expert_down"]
            expected = torch.stack([rows(expert, rank, 96, 96) for expert in gate_up])
            assert torch.equal(held[f"{layer}.expert_gate_up"], expected)
            assert torch.equal(held[f"{layer}.expert_down"], down.chunk(2, dim=2)[rank])
            assert torch.equal(held[f"{layer}.router"], whole[f"{layer}.router"])


def test_a_bias_that_is_added_to_a_sum_is_the_first_ranks_alone(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    first, second = (read(tmp_path, shard) for shard in RANKS)
    assert "0.output_bias" in first
    assert "0.output_bias" not in second
    assert len(first["0.qkv_bias"]) == len(second["0.qkv_bias"]) == 3 * 16


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_whole_tensors_are_those_of_the_models_own_class(name: str) -> None:
    folder = tiny_model(name)
    config = load_config(folder)
    traits = read_traits(config, folder, "float32")
    tensors = WholeTensors(folder, traits, read_decoder_traits(config, traits), CPU)
    for own_name, expected in reference_module(name).state_dict().items():
        assert own_name in tensors
        assert torch.equal(tensors.read(own_name), expected), own_name


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("llama", 3, "tensor_parallel_size is 3, which does not divide the model's 4 attention"),
        ("llama", 4, "tensor_parallel_size is 4, which does not divide the model's 2 KV heads"),
        ("olmo2", 2, "this model normalises queries and keys over all heads"),
        ("gpt_oss", 2, "only what the fused decoder runs can be shared out.*'gpt_oss'"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    name: str, count: int, reason: str, tmp_path: Path
) -> None:
    collectives = TorchCollectives(Shard(0, count), tmp_path, lambda: None)
    with pytest.raises(ModelRefused, match=reason):
        load_model(tiny_model(name), CPU, "float32", collectives=collectives)


def test_ranks_share_no_device_that_is_named() -> None:
    with pytest.raises(ConfigurationError, match="device is meta, and tensor_parallel_size 2"):
        usable_device("meta", Shard(0, 2))
    assert usable_device("cpu", Shard(1, 2)) == CPU
