"""The attention function that a `transformers` model calls in place of its own.

Invariant: it belongs to one model instance and holds that instance's cache and current batch;
nothing is shared between two models in one process but the registry of names, where each instance
has a name of its own until `close`.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from engine.errors import ModelRefused
from engine.kernels.batch import AttentionBatch
from engine.kernels.ops import Ops
from engine.kernels.reference import AttentionOptions
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits

# What models hand down that has no bearing on the result.
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "cache_position"})


class PagedAttentionHook:
    """Registered by name with `AttentionInterface`; called once a layer in each forward."""

    def __init__(self, traits: ModelTraits, ops: Ops) -> None:
        self.name = f"shoal_{uuid.uuid4().hex}"
        self.calls: list[int] = []
        """Layers that have called since the current batch began."""
        self._traits = traits
        self._ops = ops
        self._step: tuple[AttentionBatch, KVCache] | None = None
        AttentionInterface.register(self.name, self._attend)

    def close(self) -> None:
        """Gives the name back, and with it the registry's reference to this model's memory."""
        AttentionInterface._global_mapping.pop(self.name, None)

    @contextmanager
    def step(self, batch: AttentionBatch, cache: KVCache) -> Iterator[None]:
        """While it is open, a forward of the model works on `batch` and `cache`."""
        self._step = (batch, cache)
        self.calls = []
        try:
            yield
        finally:
            self._step = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query` is ``[1, H, T, D]``, `key` and `value` ``[1, KV, T, D]``, after the rotary
        embedding; returns ``[1, T, H, D]``. Raises `ModelRefused` for what it cannot honour."""
        if self._step is None:
            raise RuntimeError("paged attention called outside of a step")
        batch, cache = self._step
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < self._traits.num_layers:
            raise ModelRefused(f"{type(module).__name__} does not say which layer it is")
        self.calls.append(layer)
        self._check_shapes(query, key, value)
        options = self._options(module, layer, attention_mask, kwargs)
        key_cache, value_cache = cache.layers[layer]
        self._ops.write_kv(
            key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, batch
        )
        output = self._ops.paged_attention(
            query[0].transpose(0, 1).contiguous(), key_cache, value_cache, batch, options
        )
        return output[None], None

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        traits = self._traits
        tokens = query.shape[2]
        expected_query = (1, traits.num_heads, tokens, traits.head_dim)
        expected_kv = (1, traits.num_kv_heads, tokens, traits.head_dim)
        if tuple(query.shape) != expected_query or not (
            tuple(key.shape) == tuple(value.shape) == expected_kv
        ):
            raise ModelRefused(
                f"attention was called with shapes {tuple(query.shape)}, {tuple(key.shape)}, "
                f"{tuple(value.shape)} where the config promises {expected_query}, {expected_kv}"
            )

    def _options(
        self,
        module: torch.nn.Module,
        layer: int,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> AttentionOptions:
        """Reads a layer's wishes; one that is not understood is refused, not ignored."""
        scale = kwargs.pop("scaling", None)
        window = kwargs.pop("sliding_window", None)
        softcap = kwargs.pop("softcap", None)
        sinks = kwargs.pop("s_aux", None)
        dropout = kwargs.pop("dropout", 0.0)
        is_causal = kwargs.pop("is_causal", None)
        if attention_mask is not None:
            raise ModelRefused("it passes an attention mask of its own")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise ModelRefused("its attention is not causal")
        if dropout:
            raise ModelRefused("it asks for dropout while serving")
        if window != self._traits.sliding_windows[layer]:
            raise ModelRefused(
                f"layer {layer} asks for a sliding window of {window} where the config promises "
                f"{self._traits.sliding_windows[layer]}"
            )
        for name, value in kwargs.items():
            if name not in _WITHOUT_EFFECT and value is not None and value is not False:
                raise ModelRefused(f"it passes {name!r} to attention, which is not understood")
        return AttentionOptions(
            scale=self._traits.head_dim**-0.5 if scale is None else float(scale),
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
        )
