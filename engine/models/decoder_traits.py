"""What a fused decoder needs to know of a model beyond its shape.

Invariant: everything that differs between models is a value here. A model type that is not listed,
or a config value that is not understood, raises `NotFused`: then `transformers` runs the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from engine.models.quantisation import quantised_by
from engine.models.traits import ModelTraits


class NotFused(Exception):
    """The fused decoder does not serve this model; its message says why. Nothing is refused by it:
    `TransformersModel` may serve the model all the same."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Where a layer normalises: checkpoint names below ``model.layers.N.``; none: it does not."""

    input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a checkpoint has its experts, below ``model.layers.N.``; ``{}`` is an expert's
    number."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"


@dataclass(frozen=True, slots=True)
class ExpertTraits:
    """Layers whose MLP is a router and many gated MLPs, of which each token takes a few
    (https://arxiv.org/abs/1701.06538)."""

    layers: frozenset[int]
    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalized: bool
    """The weights of a token's experts sum to one; else they are what the softmax over all experts
    gave them."""
    names: ExpertNames


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type says by its code alone, and no key of its config."""

    norms: NormPlan = NormPlan()
    norm_offset: float = 0.0
    """Norms multiply by ``weight + norm_offset``."""
    head_norm: Literal["none", "head", "all"] = "none"
    """Queries and keys are normalised: not, each head by itself, or all heads at once."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of their size."""
    merged_checkpoint: bool = False
    """QKV, and gate and up, are merged in the checkpoint already."""
    activation_key: str = "hidden_act"
    experts: ExpertNames | None = None


_BOTH_ENDS = NormPlan(
    attention_output="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_OUTPUTS = NormPlan(
    input=None,
    attention_output="post_attention_layernorm",
    mlp=None,
    mlp_output="post_feedforward_layernorm",
)

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family(),
        "mistral": _Family(),
        "qwen2": _Family(),
        "qwen3": _Family(head_norm="head"),
        "gemma2": _Family(
            norms=_BOTH_ENDS,
            norm_offset=1.0,
            scaled_embeddings=True,
            activation_key="hidden_activation",
        ),
        "phi3": _Family(merged_checkpoint=True),
        "olmo2": _Family(norms=_OUTPUTS, head_norm="all"),
        "qwen3_moe": _Family(head_norm="head", experts=ExpertNames()),
        "mixtral": _Family(
            experts=ExpertNames(
                router="block_sparse_moe.gate.weight",
                gate="block_sparse_moe.experts.{}.w1.weight",
                up="block_sparse_moe.experts.{}.w3.weight",
                down="block_sparse_moe.experts.{}.w2.weight",
            )
        ),
    }
)

_ACTIVATIONS = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
)
# Their frequencies follow from the config alone, whatever the batch.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """A pre- or post-norm decoder with rotary positions and gated MLPs, one a layer or many."""

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    activation: str
    """``silu``, ``gelu`` (by the error function) or ``gelu_tanh``."""
    tied_embeddings: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    norms: NormPlan
    norm_offset: float
    head_norm: Literal["none", "head", "all"]
    merged_checkpoint: bool
    experts: ExpertTraits | None
    inverse_frequencies: tuple[float, ...]
    """Of each pair of rotated elements: half as many as a head has rotated elements."""
    rotary_scale: float
    """Multiplies cosine and sine."""


def read_decoder_traits(config: Any, traits: ModelTraits) -> DecoderTraits:
    """The traits of a `transformers` text config. Raises `NotFused`."""
    if (method := quantised_by(config)) is not None:
        raise NotFused(f"quantised ({method}), which the quantisers of transformers load")
    family = _FAMILIES.get(traits.model_type)
    if family is None:
        raise NotFused(f"model type {traits.model_type!r} is not one that it knows")
    activation = str(getattr(config, family.activation_key, None))
    if activation not in _ACTIVATIONS:
        raise NotFused(f"activation {activation!r}")
    if traits.num_heads % traits.num_kv_heads != 0:
        raise NotFused(f"{traits.num_heads} heads over {traits.num_kv_heads} KV heads")
    frequencies, rotary_scale = _rotary(config, traits)
    hidden_size = int(config.hidden_size)
    scalar = getattr(config, "query_pre_attn_scalar", None) or traits.head_dim
    return DecoderTraits(
        hidden_size=hidden_size,
        intermediate_size=int(config.intermediate_size),
        rms_norm_eps=float(config.rms_norm_eps),
        activation=_ACTIVATIONS[activation],
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
        attention_scale=scalar**-0.5,
        attention_softcap=getattr(config, "attn_logit_softcapping", None),
        final_softcap=getattr(config, "final_logit_softcapping", None),
        norms=family.norms,
        norm_offset=family.norm_offset,
        head_norm=family.head_norm,
        merged_checkpoint=family.merged_checkpoint,
        experts=None if family.experts is None else _experts(config, traits, family.experts),
        inverse_frequencies=frequencies,
        rotary_scale=rotary_scale,
    )


def _experts(config: Any, traits: ModelTraits, names: ExpertNames) -> ExpertTraits | None:
    """None where the config makes every layer a plain one."""
    plain = frozenset(getattr(config, "mlp_only_layers", None) or ())
    every = int(getattr(config, "decoder_sparse_step", 1))
    if every < 1:
        raise NotFused(f"experts in every {every}th layer")
    numbers = range(traits.num_layers)
    layers = frozenset(n for n in numbers if n not in plain and (n + 1) % every == 0)
    num_experts, num_per_token = int(config.num_experts), int(config.num_experts_per_tok)
    if not layers or num_experts == 0:
        return None
    if not 1 <= num_per_token <= num_experts:
        raise NotFused(f"{num_per_token} of {num_experts} experts a token")
    return ExpertTraits(
        layers=layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=int(
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        ),
        # A family without the key always does it.
        normalized=bool(getattr(config, "norm_topk_prob", True)),
        names=names,
    )


def _rotary(config: Any, traits: ModelTraits) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and scale (RoPE, https://arxiv.org/abs/2104.09864); the scaled variants
    are computed by `transformers`."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise NotFused("rotary parameters that differ between layers")
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise NotFused(f"rotary embedding of type {kind!r}")
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return tuple(frequencies.tolist()), float(scale)
    rotated = int(traits.head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotated % 2 != 0 or not 0 < rotated <= traits.head_dim:
        raise NotFused(f"{rotated} rotated elements of a head")
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    return tuple(frequencies.tolist()), 1.0
