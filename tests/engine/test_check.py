"""What `models check` says of a checkpoint, against what loading it does."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kernels.cpu.build import cpu_kernels
from engine.models import check as checking
from engine.models.check import Need, ServingPath, check_model
from engine.models.load import load_model
from engine.models.native_decoder import NativeDecoder
from tests.engine.test_model_support import copy_of
from tests.tiny_models import FUSED_NAMES, NAMES, reference_module, tiny_model

CPU = torch.device("cpu")


def path_of(model):
    backend = getattr(model, "backend", None)
    if backend is None:
        return ServingPath.TRANSFORMERS
    return ServingPath.NATIVE if isinstance(backend, NativeDecoder) else ServingPath.FUSED


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", sorted({*NAMES, *FUSED_NAMES}))
def test_it_says_what_loading_does(name, dtype):
    if not cpu_kernels(print):
        pytest.skip("no C++ compiler")
    found = check_model(str(tiny_model(name)), CPU, dtype)
    model = load_model(tiny_model(name), CPU, dtype)
    assert found.path == path_of(model)
    assert found.need.dtype == model.traits.dtype
    assert found.need.kv_bytes_per_token == model.traits.kv_bytes_per_token
    # transformers counts a few computed tables too.
    assert found.need.weight_bytes == pytest.approx(model.weight_bytes, rel=2e-3)
    assert (found.reason is None) == (found.path is ServingPath.NATIVE)
    model.close()


def test_no_weight_is_read(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    assert check_model(str(tiny_model("llama")), CPU).path is ServingPath.NATIVE
    assert check_model(str(tiny_model("gpt_oss")), CPU).path is ServingPath.TRANSFORMERS


def test_shards_by_their_index(tmp_path):
    reference_module("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    whole = check_model(str(tiny_model("llama")), CPU)
    assert check_model(str(tmp_path), CPU).need.weight_bytes == whole.need.weight_bytes
    # Not named by the index, as a second copy of the weights in another form would lie there.
    save_file({"other": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert check_model(str(tmp_path), CPU).need == whole.need
    sorted(tmp_path.glob("model-*.safetensors"))[0].unlink()
    refused = check_model(str(tmp_path), CPU)
    assert refused.path is ServingPath.REFUSED
    assert "model-00001-of" in refused.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"num_key_value_heads": 1}, "k_proj.weight has shape (32, 48), not (16, 48)"),
    ],
    ids=["activation", "shape"],
)
def test_why_it_is_not_fused(tmp_path, changes, reason):
    found = check_model(str(copy_of("llama", tmp_path, changes)), CPU)
    assert found.path is ServingPath.TRANSFORMERS
    assert found.need is not None
    assert reason in found.reason


def test_a_tensor_without_a_place_is_named(tmp_path):
    folder = copy_of("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.bias"] = torch.zeros(96)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = check_model(str(folder), CPU)
    assert (found.path, "gate_proj.bias" in found.reason) == (ServingPath.TRANSFORMERS, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "none-of-ours"}, "does not know the model type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "(GPTQ), which needs"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only causal language models"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
    ids=["type", "quantised", "classifier", "encoder-decoder"],
)
def test_what_loading_refuses_is_refused(tmp_path, changes, reason):
    found = check_model(str(copy_of("llama", tmp_path, changes)), CPU)
    assert (found.path, found.need) == (ServingPath.REFUSED, None)
    assert reason in found.reason


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = copy_of("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    assert "cannot be read" in check_model(str(path.parent), CPU).reason
    path.write_bytes(json.dumps({"not": "safetensors"}).encode())
    assert check_model(str(path.parent), CPU).path is ServingPath.REFUSED


def test_why_it_is_not_native(monkeypatch):
    half = check_model(str(tiny_model("llama")), CPU, "float16")
    assert (half.path, half.reason) == (
        ServingPath.FUSED,
        "the C++ kernels compute in float32 and bfloat16, not in float16",
    )
    monkeypatch.setattr(checking, "why_no_kernels", lambda: "there is no C++ compiler (c++)")
    found = check_model(str(tiny_model("llama")), CPU)
    assert (found.path, found.reason) == (ServingPath.FUSED, "there is no C++ compiler (c++)")


def test_tokens_that_fit_are_whole_blocks_beside_the_weights():
    need = Need("llama", "bfloat16", 1000, 700, "bfloat16", 10, 4096)
    assert need.tokens_in(1000 + 16 * 10 * 3 + 159, 16) == 48
    assert need.tokens_in(1000 + 159, 16) == 0
    assert need.tokens_in(10, 16) == 0


def test_a_hub_id_is_never_downloaded(monkeypatch, tmp_path):
    import huggingface_hub

    def snapshot_download(model, **options):
        assert options["local_files_only"] is True
        raise huggingface_hub.errors.LocalEntryNotFoundError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = check_model("owner/name", CPU)
    assert found.path is ServingPath.REFUSED
    assert "nothing is downloaded" in found.reason
