"""A fused decoder's step in plain torch: what its kernels are compared with, and what runs where
there are none.

Invariant: the residual stream is float32; what a product reads and the cache holds is rounded to
the model's dtype, once. The native decoder rounds in the same places or later.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.collectives import SINGLE, Collectives
from engine.kernels.batch import AttentionBatch
from engine.kernels.reference import AttentionOptions, paged_attention, row_max, write_kv
from engine.models.decoder_traits import DecoderTraits, ExpertTraits
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosine and sine of each token's rotation, float32 ``[T, rotated / 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, in float32
    (https://arxiv.org/abs/1910.07467)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotates the pairs ``(i, i + rotated / 2)`` of each head of `x` ``[T, heads, D]``."""
    half = angles.cos.shape[1]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[2] - 2 * half], dim=2)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)


class ReferenceDecoder:
    """See `MergedWeights` for the names of its tensors. Norm weights come with their offset. With
    several ranks `traits` and `tensors` are this rank's part."""

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        tensors: dict[str, torch.Tensor],
        collectives: Collectives = SINGLE,
    ) -> None:
        self._traits = traits
        self._decoder = decoder
        self._tensors = tensors
        self._collectives = collectives
        self._dtype = getattr(torch, traits.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        angles: Angles,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """Logits, float32 ``[len(rows), vocab_size]``; see `TransformersModel.forward`."""
        tensors, decoder = self._tensors, self._decoder
        scale = torch.tensor(decoder.embedding_scale, dtype=self._dtype, device=token_ids.device)
        hidden = (tensors["embedding"][token_ids] * scale).float()
        for layer in range(self._traits.num_layers):
            hidden = hidden + self._attention(hidden, layer, batch, angles, cache)
            hidden = hidden + self._mlp(hidden, layer)
        final = self._normed(hidden[rows], "final_norm")
        logits = F.linear(final, tensors.get("head", tensors["embedding"])).float()
        logits = self._collectives.all_gather(logits, self._traits.vocab_size)
        if decoder.final_softcap is not None:
            logits = torch.tanh(logits / decoder.final_softcap) * decoder.final_softcap
        return logits

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row and its place."""
        return row_max(logits)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """`x` after the norm `name`, or as it is where the model has none, in the model's dtype."""
        weight = self._tensors.get(name)
        if weight is not None:
            x = rms_norm(x, weight, self._decoder.rms_norm_eps)
        return x.to(self._dtype)

    def _normed_output(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors.get(name)
        return x.float() if weight is None else rms_norm(x, weight, self._decoder.rms_norm_eps)

    def _attention(
        self,
        hidden: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        angles: Angles,
        cache: KVCache,
    ) -> torch.Tensor:
        traits, tensors = self._traits, self._tensors
        x = self._normed(hidden, f"{layer}.input_norm")
        qkv = F.linear(x, tensors[f"{layer}.qkv"], tensors.get(f"{layer}.qkv_bias"))
        sizes = [traits.num_heads, traits.num_kv_heads, traits.num_kv_heads]
        query, key, value = torch.split(qkv.view(len(x), -1, traits.head_dim), sizes, dim=1)
        query = rotate(self._head_norm(query, f"{layer}.query_norm"), angles).to(self._dtype)
        key = rotate(self._head_norm(key, f"{layer}.key_norm"), angles).to(self._dtype)
        key_cache, value_cache = cache.layers[layer]
        write_kv(key, value, key_cache, value_cache, batch)
        options = AttentionOptions(
            self._decoder.attention_scale,
            traits.sliding_windows[layer],
            self._decoder.attention_softcap,
        )
        context = paged_attention(query, key_cache, value_cache, batch, options)
        output = F.linear(
            context.flatten(1), tensors[f"{layer}.output"], tensors.get(f"{layer}.output_bias")
        )
        output = self._collectives.all_reduce(output)
        return self._normed_output(output, f"{layer}.attention_output_norm")

    def _head_norm(self, heads: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors.get(name)
        if weight is None:
            return heads
        eps = self._decoder.rms_norm_eps
        if self._decoder.head_norm == "all":
            return rms_norm(heads.flatten(1), weight, eps).view(heads.shape)
        return rms_norm(heads, weight, eps)

    def _mlp(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        tensors, experts = self._tensors, self._decoder.experts
        x = self._normed(hidden, f"{layer}.mlp_norm")
        if experts is not None and layer in experts.layers:
            output = self._mixture(x, layer, experts)
        else:
            activated = self._gated(x, tensors[f"{layer}.gate_up"])
            bias = tensors.get(f"{layer}.down_bias")
            output = F.linear(activated, tensors[f"{layer}.down"], bias)
        output = self._collectives.all_reduce(output)
        return self._normed_output(output, f"{layer}.mlp_output_norm")

    def _gated(self, x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, gate_up).float().chunk(2, dim=-1)
        return (_activate(gate, self._decoder.activation) * up).to(self._dtype)

    def _mixture(self, x: torch.Tensor, layer: int, experts: ExpertTraits) -> torch.Tensor:
        """Each token's experts, weighted, in float32; an expert computes its tokens at once."""
        tensors = self._tensors
        # In float32: rounded, close scores would send tokens to other experts.
        scores = F.linear(x.float(), tensors[f"{layer}.router"].float()).softmax(dim=-1)
        weights, chosen = scores.topk(experts.num_per_token, dim=-1)
        if experts.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            activated = self._gated(x[tokens], tensors[f"{layer}.expert_gate_up"][expert])
            computed = F.linear(activated, tensors[f"{layer}.expert_down"][expert]).float()
            output.index_add_(0, tokens, computed * weights[tokens, places, None])
        return output


def _activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
