"""What a GGUF file holds, as `transformers` reads it.

Invariant: what `transformers` would read otherwise than the file has it is refused, not converted:
a rotary scaling or a window that gets lost gives text that is wrong and looks right.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.models.support import causal_lm_class, check_config

# Keys below the architecture's name, and what they have to be in the config.
_SAME = (
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
)
# Factors of rotary frequencies; the loader drops them.
_DROPPED_TENSORS = ("rope_freqs.", "rope_factors_")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A file that can be converted."""

    config: Any
    """Of `transformers`."""
    dtype: str
    """That its weights are converted to."""
    num_elements: int
    """Of all its tensors."""


def read_gguf(path: Path) -> GgufModel:
    """Reads metadata and the list of tensors. Raises `ModelRefused` with the reason for a file that
    cannot be served as it is."""
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import AutoConfig

    try:
        reader = GGUFReader(path)
        if int(_value(reader, "split.count") or 1) > 1:
            raise ModelRefused(f"{path.name} is one file of several: merge them into one first")
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except ModelRefused:
        raise
    except Exception as error:
        raise unreadable(path, error) from error
    for difference in _differences(reader, config):
        raise ModelRefused(f"{path.name} cannot be converted correctly: {difference}")
    check_config(config)
    causal_lm_class(config)
    matrices = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    exact = matrices == {GGMLQuantizationType.F32}
    return GgufModel(
        config=config,
        dtype="float32" if exact else "bfloat16",
        num_elements=sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def unreadable(path: Path, error: Exception) -> ModelRefused:
    """What `transformers` raised, in one line."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return ModelRefused(f"transformers cannot read {path.name}: {reason}")


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _differences(reader: Any, config: Any) -> Iterator[str]:
    architecture = _value(reader, "general.architecture")
    for key, name in _SAME:
        stated, read = _value(reader, f"{architecture}.{key}"), getattr(config, name, None)
        if stated is not None and not _equal(stated, read):
            yield f"its {key} is {stated}, and transformers reads {read}"
    for tensor in reader.tensors:
        if tensor.name.startswith(_DROPPED_TENSORS):
            yield f"transformers drops its tensor {tensor.name}, which scales rotary frequencies"
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none", rope.get("rope_type")):
        yield f"its rotary scaling is {scaling!r}, which transformers does not read"
    base = _value(reader, f"{architecture}.rope.freq_base")
    if base is not None and not _equal(base, rope.get("rope_theta")):
        yield f"its rotary base is {base}, and transformers reads {rope.get('rope_theta')}"


def _equal(stated: Any, read: Any) -> bool:
    """The file's numbers are float32."""
    if isinstance(stated, int | float) and isinstance(read, int | float):
        return abs(stated - read) <= 1e-6 * abs(read)
    return bool(stated == read)
