"""What is refused at load, what is read from a config, and where a model is found."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from configs.engine import CacheConfig
from engine.errors import ConfigurationError, ModelRefused
from engine.models import kv_cache
from engine.models.kv_cache import KVCache, plan_num_blocks
from engine.models.resolve import resolve_model
from engine.models.support import causal_lm_class, check_class, check_config, load_config
from engine.models.traits import fingerprint, read_traits
from engine.models.transformers_model import TransformersModel
from tests.tiny_models import MAX_MODEL_LEN, SLIDING_WINDOW, tiny_model

CPU = torch.device("cpu")


def copy_of(name, folder, config=None, **other_files):
    """A tiny model with its config.json changed (None removes a key)."""
    target = folder / name
    shutil.copytree(tiny_model(name), target)
    path = target / "config.json"
    raw = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    for file_name, content in other_files.items():
        (target / f"{file_name}.json").write_text(json.dumps(content))
    return target


ROPE = {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "longest position"),
        (
            {
                "rope_parameters": ROPE
                | {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "factor": 2.0,
                    "original_max_position_embeddings": 256,
                }
            },
            "longest position",
        ),
        (
            {"rope_parameters": ROPE | {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            "M-RoPE",
        ),
        ({"alibi": True}, "ALiBi"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"is_causal": False}, "not causal"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"num_kv_shared_layers": 1}, "share the KV"),
        ({"attention_chunk_size": 64}, "chunked"),
        ({"num_key_value_heads": [2, 1, 2]}, "differs between layers"),
        ({"global_head_dim": 32}, "differ in shape"),
        ({"kv_lora_rank": 16}, "latent attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_cannot_be_served_is_refused(changes, reason):
    config = load_config(tiny_model("llama"))
    for name, value in changes.items():
        # Past the config's own checks, as a class that declares such a field would have it.
        object.__setattr__(config, name, value)
    with pytest.raises(ModelRefused, match=reason):
        check_config(config)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_rope_types_that_do_not_depend_on_the_batch_pass(rope_type):
    config = load_config(tiny_model("llama"))
    config.rope_parameters = ROPE | {"rope_type": rope_type, "factor": 2.0}
    check_config(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "none-of-ours", "auto_map": {"AutoConfig": "x.Y"}}, "never run"),
        ({"model_type": "none-of-ours"}, "does not know the model type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"GPTQ\), which needs"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only causal language models"),
        ({"vocab_size": None}, "cannot load the checkpoint"),
    ],
    ids=["remote code", "unknown type", "quantised", "classifier", "shape mismatch"],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(tmp_path, changes, reason):
    folder = copy_of("llama", tmp_path, changes)
    with pytest.raises(ModelRefused, match=reason):
        TransformersModel.load(folder, CPU)


def test_a_native_type_with_remote_code_beside_it_loads_without_it(tmp_path):
    folder = copy_of("llama", tmp_path, {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "evil.py").write_text("raise SystemExit('this must never run')")
    TransformersModel.load(folder, CPU).close()


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MambaForCausalLM", "JambaForCausalLM"])
def test_classes_without_the_attention_interface_are_refused(name):
    with pytest.raises(ModelRefused, match=r"AttentionInterface|recurrent state"):
        check_class(getattr(transformers, name))


def test_an_encoder_decoder_has_no_causal_class():
    with pytest.raises(ModelRefused, match="no causal language model"):
        causal_lm_class(transformers.T5Config())


def test_missing_weights_are_refused(tmp_path):
    folder = copy_of("llama", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks 1 tensors.*layers\.1\.self_attn\.k_proj"):
        TransformersModel.load(folder, CPU)


def test_truncated_weights_are_refused(tmp_path):
    folder = copy_of("llama", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelRefused, match="cannot load the checkpoint"):
        TransformersModel.load(folder, CPU)


def test_the_probe_notices_a_wrong_scale(monkeypatch):
    """A model whose attention were not what it says would be refused."""
    from engine.models import paged_hook

    options = paged_hook.AttentionOptions
    monkeypatch.setattr(
        paged_hook,
        "AttentionOptions",
        lambda scale, **rest: options(scale=scale * 1.05, **rest),
    )
    with pytest.raises(ModelRefused, match="other logits than alone"):
        TransformersModel.load(tiny_model("llama"), CPU)


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("gpt_oss", "sinks"), ("gemma2", "softcap"), ("mistral", "sliding_window")],
)
def test_the_probe_notices_what_attention_would_ignore(monkeypatch, name, ignored):
    from engine.models import paged_hook

    options = paged_hook.AttentionOptions
    monkeypatch.setattr(
        paged_hook, "AttentionOptions", lambda **fields: options(**fields | {ignored: None})
    )
    with pytest.raises(ModelRefused, match="other logits than alone"):
        TransformersModel.load(tiny_model(name), CPU)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 5}, "sliding window of 5"),
    ],
    ids=str,
)
def test_what_attention_is_asked_for_and_does_not_know_is_refused(kwargs, reason):
    model = TransformersModel.load(tiny_model("llama"), CPU)
    with pytest.raises(ModelRefused, match=reason):
        model._hook._options(torch.nn.Module(), 0, None, {"scaling": 0.25} | kwargs)
    with pytest.raises(ModelRefused, match="mask of its own"):
        model._hook._options(torch.nn.Module(), 0, torch.zeros(1), {"scaling": 0.25})
    model.close()


def test_two_models_in_one_process_do_not_meet():
    first = TransformersModel.load(tiny_model("llama"), CPU)
    second = TransformersModel.load(tiny_model("qwen3"), CPU)
    names = transformers.AttentionInterface().valid_keys()
    assert first._hook.name in names
    assert second._hook.name in names
    first.close()
    second.close()
    assert not [name for name in transformers.AttentionInterface() if name.startswith("shoal_")]


def test_traits():
    folder = tiny_model("gemma2")
    traits = read_traits(load_config(folder), folder)
    assert (traits.num_layers, traits.num_heads, traits.num_kv_heads) == (3, 4, 2)
    assert (traits.head_dim, traits.vocab_size, traits.max_model_len) == (16, 384, MAX_MODEL_LEN)
    assert traits.sliding_windows == (SLIDING_WINDOW, None, SLIDING_WINDOW)
    assert traits.dtype == "float32"
    assert traits.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    half = read_traits(load_config(folder), folder, "bfloat16")
    assert half.kv_bytes_per_token * 2 == traits.kv_bytes_per_token


def test_end_tokens_are_the_generation_configs(tmp_path):
    folder = copy_of("llama", tmp_path, generation_config={"eos_token_id": [2, 9]})
    assert read_traits(load_config(folder), folder).eos_token_ids == (2, 9)
    (folder / "generation_config.json").unlink()
    assert read_traits(load_config(folder), folder).eos_token_ids == (2,)


def test_the_dtype_of_a_config_without_one_is_the_checkpoints(tmp_path):
    folder = copy_of("llama", tmp_path, {"dtype": None})
    config = load_config(folder)
    config.dtype = None
    assert read_traits(config, folder).dtype == "float32"


def test_the_fingerprint_follows_weights_config_and_dtype_only(tmp_path):
    folder = copy_of("llama", tmp_path)
    traits = read_traits(load_config(folder), folder)
    original = fingerprint(folder, traits)
    assert original == fingerprint(tiny_model("llama"), traits)
    renamed = copy_of("llama", tmp_path / "b", {"transformers_version": "9", "_name_or_path": "x"})
    assert fingerprint(renamed, traits) == original

    half = read_traits(load_config(folder), folder, "bfloat16")
    rope = copy_of("llama", tmp_path / "c", {"rope_parameters": ROPE | {"rope_theta": 5.0}})
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        tensors[name] = tensors[name] * 1.001
    tuned = copy_of("llama", tmp_path / "d")
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    others = [fingerprint(folder, half), fingerprint(rope, traits), fingerprint(tuned, traits)]
    assert len({original, *others}) == 4


def test_num_blocks_follow_from_memory_and_the_other_way_round(monkeypatch):
    folder = tiny_model("llama")
    traits = read_traits(load_config(folder), folder)
    block_bytes = 16 * traits.kv_bytes_per_token
    cache = CacheConfig(block_size=16, memory_bytes=1 << 20)
    assert plan_num_blocks(traits, cache, CPU) == (1 << 20) // block_bytes
    assert plan_num_blocks(traits, CacheConfig(num_blocks=7), CPU) == 7
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 6 * block_bytes)
    with pytest.raises(
        ConfigurationError, match=rf"need {7 * block_bytes} bytes.* {6 * block_bytes} "
    ):
        plan_num_blocks(traits, CacheConfig(num_blocks=7), CPU)


def test_memory_below_one_block_is_refused_with_both_figures():
    folder = tiny_model("llama")
    traits = read_traits(load_config(folder), folder)
    wide = type(traits)(
        **{name: getattr(traits, name) for name in traits.__slots__} | {"num_layers": 96}
    )
    cache = CacheConfig(block_size=256, memory_bytes=1 << 20)
    with pytest.raises(ConfigurationError, match=r"1048576.*256 tokens take 6291456 bytes"):
        plan_num_blocks(wide, cache, CPU)


def test_copies_that_build_on_each_other_go_in_order():
    folder = tiny_model("llama")
    cache = KVCache(read_traits(load_config(folder), folder), 5, 4, CPU)
    for keys, values in cache.layers:
        for i in range(5):
            keys[i], values[i] = i, -i
    cache.copy_blocks([(0, 1), (1, 2)])
    cache.copy_blocks([(3, 4)])
    for keys, values in cache.layers:
        assert keys[:, 0, 0, 0].tolist() == [0, 0, 0, 3, 3]
        assert values[:, 1, 3, 15].tolist() == [0, 0, 0, -3, -3]


def test_a_local_folder_is_resolved(tmp_path):
    folder = tiny_model("llama")
    assert resolve_model(str(folder)) == folder.resolve()
    with pytest.raises(ModelRefused, match="no folder"):
        resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ModelRefused, match=r"it has \.bin files"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelRefused, match="is a file"):
        resolve_model(str(tmp_path / "config.json"))


def test_a_hub_id_that_is_not_cached_is_refused_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelRefused, match="HF_HUB_OFFLINE is set"):
        resolve_model("some-owner/some-model-that-is-not-here")
