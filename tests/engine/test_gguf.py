"""GGUF files: converted once into what the tiny model is, or refused with the reason."""

import os
from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigurationError, ModelRefused
from engine.models import conversion
from engine.models.check import ServingPath, check_model
from engine.models.gguf_file import read_gguf
from engine.models.load import load_model
from engine.models.resolve import resolve_model, resolve_tokenizer
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def interleaved(weight, heads):
    """Rows as llama.cpp has them, where the two of a rotated pair lie side by side."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(path, change=lambda writer: None, architecture="llama", half=False, drop=()):
    """The tiny Llama as a GGUF file; its tokens are bytes and made-up words."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(48)
    writer.add_block_count(3)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    words = [f"w{i}" for i in range(VOCAB_SIZE - 8)]
    writer.add_token_list(["<pad>", "<s>", "</s>", "a", "b", "c", "ab", "abc", *words])
    writer.add_token_types([3, 3, 3, *[1] * (VOCAB_SIZE - 3)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    change(writer)
    for name, tensor in load_file(tiny_model("llama") / "model.safetensors").items():
        target = OUTER.get(name)
        if target is None:
            _, _, layer, rest = name.split(".", 3)
            target = f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
        if target in drop:
            continue
        if "attn_q" in target:
            tensor = interleaved(tensor, 4)
        if "attn_k" in target:
            tensor = interleaved(tensor, 2)
        if half and tensor.dim() > 1:
            tensor = tensor.half()
        writer.add_tensor(target, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(monkeypatch, tmp_path):
    root = tmp_path / "cache"
    monkeypatch.setattr(conversion, "cache_root", lambda: root)
    return root


def test_it_becomes_the_model_that_it_was_made_from(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(path))
    assert folder.parent == cache
    original = load_file(tiny_model("llama") / "model.safetensors")
    made = load_file(folder / "model.safetensors")
    assert made.keys() == original.keys()
    assert all(torch.equal(made[name], original[name]) for name in original)
    traits = load_model(folder, CPU).traits
    assert (traits.dtype, traits.eos_token_ids) == ("float32", (2,))
    assert (folder / "tokenizer.json").is_file()


def test_it_is_converted_once_and_anew_when_it_changes(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf")
    messages = []
    first = resolve_model(str(path), messages.append)
    assert messages[0].startswith("preparing tiny.gguf: reading its tokenizer")
    messages.clear()
    assert resolve_model(str(tmp_path), messages.append) == first
    assert resolve_tokenizer(str(path)) == first
    assert messages == []
    os.utime(path, (1, 1))
    assert resolve_model(str(path)) != first
    assert not [each for each in cache.iterdir() if each.is_dir() and each.name.startswith(".")]


def test_shorter_weights_become_bfloat16(tmp_path, cache):
    folder = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", half=True)))
    assert load_model(folder, CPU).traits.dtype == "bfloat16"


def test_of_a_folder_with_two_one_has_to_be_named(tmp_path, cache):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.GGUF")
    with pytest.raises(ModelRefused, match=r"2 GGUF files; name one of them: a\.gguf, b\.GGUF"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path / "b.GGUF")).name.startswith("b-")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.add_key_length(12), "attention.key_length is 12, and transformers reads 16"),
        (lambda w: w.add_sliding_window(8), "attention.sliding_window is 8"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rotary scaling is 'yarn'"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", torch.ones(8).numpy()),
            "drops its tensor rope_freqs.weight",
        ),
        (lambda w: w.add_uint16("split.count", 3), "one file of several"),
    ],
    ids=["head size", "window", "scaling", "factors", "split"],
)
def test_what_would_be_read_wrong_is_refused(tmp_path, cache, change, reason):
    path = write_gguf(tmp_path / "tiny.gguf", change)
    with pytest.raises(ModelRefused, match=reason.replace(".", r"\.")):
        resolve_model(str(path))
    assert not [each for each in cache.iterdir() if each.is_dir()]
    checked = check_model(str(path), CPU)
    assert (checked.path, reason in checked.reason) == (ServingPath.REFUSED, True)


def test_an_unknown_architecture_is_refused(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", architecture="none-of-ours")
    with pytest.raises(ModelRefused, match=r"cannot read tiny\.gguf: .*none-of-ours"):
        resolve_model(str(path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path, cache):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not a model at all, in any form that is known")
    with pytest.raises(ModelRefused, match=r"cannot read tiny\.gguf"):
        resolve_model(str(path))


def test_a_missing_tensor_is_refused(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelRefused, match=r"lacks 1 tensors, among them .*layers\.1.*up_proj"):
        resolve_model(str(path))


def test_without_room_nothing_is_written(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ConfigurationError, match=r"takes \d{6} bytes in .*, where 1000 are free"):
        resolve_model(str(path))
    assert not [each for each in cache.iterdir() if each.is_dir()]


def test_a_check_says_what_the_converted_folder_will_be_and_converts_nothing(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", half=True)
    before = check_model(str(path), CPU)
    assert before.is_converted_first
    assert not cache.exists()
    resolve_model(str(path))
    after = check_model(str(path), CPU)
    assert not after.is_converted_first
    assert before.need.stored_bytes == path.stat().st_size
    expected = replace(before.need, stored_bytes=after.need.stored_bytes)
    assert (before.path, expected) == (after.path, after.need)
    assert read_gguf(path).dtype == after.need.dtype == "bfloat16"
