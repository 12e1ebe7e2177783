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
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.reference import AttentionOptions
from engine.models.decoder_traits import DecoderTraits
from engine.models.kv_cache import KVCache
from engine.models.layer_parts import LayerParts, Parts
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
        self._ops = ops
        self._collectives = collectives
        self._traits = traits
        self._decoder = decoder
        self.parts = self.parts_over(ops)
        """Of every layer, before and after its attention."""
        self.prefill_parts: Parts = self.parts
        """Likewise, in steps in which a sequence has several tokens."""
        self._embedding = tensors["embedding"]
        self._embedding_scale = torch.tensor(
            decoder.embedding_scale,
            dtype=getattr(torch, traits.dtype),
            device=self._embedding.device,
        )
        self._final_norm = tensors["final_norm"]
        self._head = tensors.get("head", self._embedding)
        self._layers = [_of_layer(tensors, layer) for layer in range(traits.num_layers)]
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
        ops = self._ops
        parts = self.parts if batch.max_query_len == 1 else self.prefill_parts
        # Such a batch is there to be captured: nothing may be read on the host.
        on_device = isinstance(batch, PaddedDecodeBatch)
        hidden = (self._embedding[token_ids] * self._embedding_scale).float()
        # What a layer adds to `hidden` is added together with the norm that follows it.
        update = torch.zeros_like(hidden)
        for tensors, caches, options in zip(
            self._layers, cache.layers, self._attention_options, strict=True
        ):
            query, key, value = parts.attention_inputs(hidden, update, tensors)
            query = ops.rope_and_write_kv(query, key, value, angles, caches, batch)
            context = ops.paged_attention(query, *caches, batch, options)
            x = parts.attention_output(context, hidden, tensors)
            update = parts.mlp(x, tensors, on_device)
        final = self.parts.add_norm(hidden[rows], update[rows], self._final_norm)
        logits = F.linear(final, self._head).float()
        logits = self._collectives.all_gather(logits, self._traits.vocab_size)
        if (softcap := self._decoder.final_softcap) is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    def parts_over(self, ops: Ops) -> LayerParts:
        """What a layer of this model computes beside its attention, by `ops`."""
        return LayerParts(self._traits, self._decoder, ops, self._collectives)

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row and its place."""
        return self._ops.row_max(logits)


def _of_layer(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    prefix = f"{layer}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
