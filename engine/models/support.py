"""What is refused at load, with the reason, rather than served wrong.

Invariant: a model that passes these checks and `probe.verify_model` gives the same tokens packed
and paged as it gives alone. Everything here is decided by what a config or class states about
itself, never by a model's name.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Rotary embeddings whose frequencies follow the longest position in the batch: in a packed step
# one request would change another's.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_NO_ROPE_KEYS: frozenset[str] = frozenset({"alibi", "use_alibi"})


def load_config(folder: Path) -> Any:
    """The `transformers` config of a checkpoint, once `check_config` has passed it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise ModelRefused(
                f"model type {model_type!r} needs code from the model's repository (auto_map), "
                "which is never run"
            )
        raise ModelRefused(f"transformers does not know the model type {model_type!r}")
    try:
        # A native type with an auto_map is loaded by transformers' own class.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelRefused(f"transformers cannot read {folder}/config.json: {error}") from error
    check_config(config)
    return config


def check_config(config: Any) -> None:
    """Raises `ModelRefused` with the first reason that the config states against serving it."""
    for check in _CONFIG_CHECKS:
        reason = check(config)
        if reason is not None:
            raise ModelRefused(f"this model cannot be served correctly: {reason}")


def causal_lm_class(config: Any) -> Any:
    """The model class for `config`, once it is known to call attention through the interface.

    Raises `ModelRefused` for a type without a causal LM, a checkpoint of another task, or a class
    that keeps a recurrent state or computes attention on its own.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ModelRefused(
            f"model type {config.model_type!r} has no causal language model"
        ) from None
    if isinstance(found, tuple | list):
        found = found[0]
    architectures = getattr(config, "architectures", None) or [found.__name__]
    if found.__name__ not in architectures:
        raise ModelRefused(
            f"the checkpoint is a {architectures[0]}, not a {found.__name__}: only causal language "
            "models are served"
        )
    check_class(found)
    return found


def check_class(model_class: Any) -> None:
    """Raises `ModelRefused` for a class whose layers cannot run over the paged cache."""
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise ModelRefused(f"{name} keeps a recurrent state, which a paged cache cannot hold")
    uses_interface = getattr(model_class, "_can_set_attn_implementation", lambda: False)()
    if not uses_interface or not getattr(model_class, "_supports_attention_backend", False):
        raise ModelRefused(f"{name} does not compute attention through AttentionInterface")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelRefused(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} does not hold a JSON object")
    return value


def _check_kind(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if config.get_text_config() is not config:
        return "it is multimodal, and only text is served"
    if getattr(config, "add_cross_attention", False) or getattr(
        config, "cross_attention_layers", None
    ):
        return "it has cross attention"
    return None


def _check_direction(config: Any) -> str | None:
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    return None


def _check_layers(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - _SERVED_LAYER_TYPES):
        return f"it has layers of type {', '.join(unknown)}"
    if shared := getattr(config, "num_kv_shared_layers", 0):
        return f"{shared} of its layers share the KV of others"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked"
    return None


def _check_heads(config: Any) -> str | None:
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if isinstance(getattr(config, name, None), list | tuple | dict):
            return f"its {name} differs between layers"
    for name in ("global_head_dim", "num_global_key_value_heads", "block_configs"):
        if getattr(config, name, None):
            return f"its layers differ in shape ({name})"
    if getattr(config, "kv_lora_rank", None):
        return "it has latent attention (kv_lora_rank), whose keys and values differ in size"
    return None


def _check_positions(config: Any) -> str | None:
    if any(getattr(config, key, False) is True for key in _NO_ROPE_KEYS):
        return "it uses ALiBi position biases"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute", "rope", "rotary"):
        return f"its position embedding is {config.position_embedding_type!r}"
    for rope in _rope_dicts(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if any(word in kind for word in _BATCH_DEPENDENT_ROPE):
            return f"its rotary embedding ({kind}) depends on the longest position in the batch"
        if rope.get("mrope_section"):
            return "it has multimodal rotary positions (M-RoPE)"
    return None


def _rope_dicts(config: Any) -> Iterator[dict[str, Any]]:
    """Rope parameters, which some configs hold once and others once for each layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            yield value
            yield from (inner for inner in value.values() if isinstance(inner, dict))


_CONFIG_CHECKS: tuple[Callable[[Any], str | None], ...] = (
    _check_kind,
    _check_direction,
    _check_layers,
    _check_heads,
    _check_positions,
)
