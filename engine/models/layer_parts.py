"""What a fused decoder's layer computes before and after its attention.

Invariant: a part depends on its tensors alone, neither on the cache nor on the layout of the step,
and not on which layer it is.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.collectives import SINGLE, Collectives
from engine.kernels.ops import Ops
from engine.models.decoder_traits import DecoderTraits
from engine.models.mixture import ExpertWeights, mixture, mixture_on_device
from engine.models.traits import ModelTraits

LayerTensors = Mapping[str, torch.Tensor]
"""Of one layer, named as `MergedWeights` has it, without the layer's number."""


class Parts(Protocol):
    """T packed tokens; H query heads and KV key heads of size D. `hidden` is the residual stream,
    float32 ``[T, E]``, which each part that takes it adds to in place."""

    def attention_inputs(
        self, hidden: torch.Tensor, update: torch.Tensor, tensors: LayerTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds `update`, what the layer before gave, to `hidden`; queries ``[T, H, D]``, keys and
        values ``[T, KV, D]`` of the sum, before their rotary embedding."""
        ...

    def attention_output(
        self, context: torch.Tensor, hidden: torch.Tensor, tensors: LayerTensors
    ) -> torch.Tensor:
        """Adds what follows from attention's result ``[T, H, D]`` to `hidden`; what the MLP takes,
        ``[T, E]``."""
        ...

    def mlp(self, x: torch.Tensor, tensors: LayerTensors, on_device: bool) -> torch.Tensor:
        """What the layer gives, to be added to `hidden`; with `on_device` by launches that depend
        on shapes alone."""
        ...


class LayerParts:
    """`Parts` over one back end's ops."""

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        ops: Ops,
        collectives: Collectives = SINGLE,
    ) -> None:
        self._ops = ops
        self._collectives = collectives
        self._experts = decoder.experts
        self._activation = decoder.activation
        self._eps = decoder.rms_norm_eps
        self._norms_all_heads = decoder.head_norm == "all"
        self._heads = [traits.num_heads, traits.num_kv_heads, traits.num_kv_heads]
        self._head_dim = traits.head_dim
        self._dtype = getattr(torch, traits.dtype)

    def attention_inputs(
        self, hidden: torch.Tensor, update: torch.Tensor, tensors: LayerTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.add_norm(hidden, update, tensors.get("input_norm"))
        qkv = F.linear(x, tensors["qkv"], tensors.get("qkv_bias"))
        heads = qkv.view(len(x), -1, self._head_dim)
        query, key, value = torch.split(heads, self._heads, dim=1)
        query = self._head_norm(query, tensors.get("query_norm"))
        key = self._head_norm(key, tensors.get("key_norm"))
        return query, key, value

    def attention_output(
        self, context: torch.Tensor, hidden: torch.Tensor, tensors: LayerTensors
    ) -> torch.Tensor:
        output = F.linear(context.flatten(1), tensors["output"], tensors.get("output_bias"))
        output = self._collectives.all_reduce(output)
        output = self._norm(output, tensors.get("attention_output_norm"))
        return self.add_norm(hidden, output, tensors.get("mlp_norm"))

    def mlp(self, x: torch.Tensor, tensors: LayerTensors, on_device: bool) -> torch.Tensor:
        if self._experts is not None and "router" in tensors:
            weights = ExpertWeights(
                tensors["router"], tensors["expert_gate_up"], tensors["expert_down"]
            )
            compute = mixture_on_device if on_device else mixture
            output = compute(x, weights, self._experts, self._gated)
        else:
            activated = self._gated(F.linear(x, tensors["gate_up"]))
            output = F.linear(activated, tensors["down"], tensors.get("down_bias"))
        output = self._collectives.all_reduce(output)
        return self._norm(output, tensors.get("mlp_output_norm"))

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Adds `update` to `hidden` in place; the sum after a norm, or as it is without a weight,
        in the model's dtype."""
        return self._ops.add_rms_norm(hidden, update, weight, self._eps, self._dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """`x` after a norm, float32, or as it is without a weight."""
        if weight is None:
            return x
        return self._ops.rms_norm(x, weight, self._eps, torch.float32)

    def _head_norm(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if self._norms_all_heads:
            return self._norm(heads.flatten(1), weight).view(heads.shape)
        return self._norm(heads, weight)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._ops.gated_activation(gate_up, self._activation)
