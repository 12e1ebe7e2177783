"""A fused decoder's step, op by op: what runs on accelerators, what runs on a CPU without kernels,
and what the native decoder is compared with.

Invariant: the residual stream is float32; what a product reads and the cache holds is rounded to
the model's dtype, once. The native decoder rounds in the same places or later.
"""

import torch
import torch.nn.functional as F

from engine.collectives import SINGLE, Collectives
from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.ops import Ops
from engine.kernels.reference import AttentionOptions
from engine.models.decoder_traits import DecoderTraits, ExpertTraits
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits


class OpDecoder:
    """See `MergedWeights` for the names of its tensors. Norm weights come with their offset. With
    several ranks `traits` and `tensors` are this rank's part."""

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        tensors: dict[str, torch.Tensor],
        ops: Ops,
        collectives: Collectives = SINGLE,
    ) -> None:
        self._traits = traits
        self._decoder = decoder
        self._tensors = tensors
        self._ops = ops
        self._collectives = collectives
        self._dtype = getattr(torch, traits.dtype)
        self._embedding_scale = torch.tensor(
            decoder.embedding_scale, dtype=self._dtype, device=tensors["embedding"].device
        )
        self._attention_options = [
            AttentionOptions(decoder.attention_scale, window, decoder.attention_softcap)
            for window in traits.sliding_windows
        ]

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
        hidden = (tensors["embedding"][token_ids] * self._embedding_scale).float()
        # What a layer adds to `hidden` is added together with the norm that follows it.
        update = torch.zeros_like(hidden)
        for layer in range(self._traits.num_layers):
            x = self._add_norm(hidden, update, f"{layer}.input_norm")
            update = self._attention(x, layer, batch, angles, cache)
            x = self._add_norm(hidden, update, f"{layer}.mlp_norm")
            update = self._mlp(x, layer)
        final = self._add_norm(hidden[rows], update[rows], "final_norm")
        logits = F.linear(final, tensors.get("head", tensors["embedding"])).float()
        logits = self._collectives.all_gather(logits, self._traits.vocab_size)
        if decoder.final_softcap is not None:
            logits = torch.tanh(logits / decoder.final_softcap) * decoder.final_softcap
        return logits

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row and its place."""
        return self._ops.row_max(logits)

    def _add_norm(self, hidden: torch.Tensor, update: torch.Tensor, name: str) -> torch.Tensor:
        """Adds `update` to `hidden` in place; the sum after the norm `name`, or as it is where the
        model has none, in the model's dtype."""
        weight = self._tensors.get(name)
        return self._ops.add_rms_norm(
            hidden, update, weight, self._decoder.rms_norm_eps, self._dtype
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """`x` after the norm `name`, float32, or as it is where the model has none."""
        weight = self._tensors.get(name)
        if weight is None:
            return x
        return self._ops.rms_norm(x, weight, self._decoder.rms_norm_eps, torch.float32)

    def _attention(
        self,
        x: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        angles: Angles,
        cache: KVCache,
    ) -> torch.Tensor:
        traits, tensors = self._traits, self._tensors
        qkv = F.linear(x, tensors[f"{layer}.qkv"], tensors.get(f"{layer}.qkv_bias"))
        sizes = [traits.num_heads, traits.num_kv_heads, traits.num_kv_heads]
        query, key, value = torch.split(qkv.view(len(x), -1, traits.head_dim), sizes, dim=1)
        query = self._head_norm(query, f"{layer}.query_norm")
        key = self._head_norm(key, f"{layer}.key_norm")
        caches = cache.layers[layer]
        query = self._ops.rope_and_write_kv(query, key, value, angles, caches, batch)
        context = self._ops.paged_attention(query, *caches, batch, self._attention_options[layer])
        output = F.linear(
            context.flatten(1), tensors[f"{layer}.output"], tensors.get(f"{layer}.output_bias")
        )
        output = self._collectives.all_reduce(output)
        return self._norm(output, f"{layer}.attention_output_norm")

    def _head_norm(self, heads: torch.Tensor, name: str) -> torch.Tensor:
        if self._decoder.head_norm == "all":
            return self._norm(heads.flatten(1), name).view(heads.shape)
        return self._norm(heads, name)

    def _mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        tensors, experts = self._tensors, self._decoder.experts
        if experts is not None and layer in experts.layers:
            output = self._mixture(x, layer, experts)
        else:
            activated = self._gated(x, tensors[f"{layer}.gate_up"])
            output = F.linear(
                activated, tensors[f"{layer}.down"], tensors.get(f"{layer}.down_bias")
            )
        output = self._collectives.all_reduce(output)
        return self._norm(output, f"{layer}.mlp_output_norm")

    def _gated(self, x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        return self._ops.gated_activation(F.linear(x, gate_up), self._decoder.activation)

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
