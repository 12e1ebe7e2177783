"""Prefill by `torch.compile`: what lies between two attentions of a fused decoder, as one function
for all its layers.

Invariant: what is compiled depends on tensors alone, and for any number of tokens: no batch that
comes along is compiled for. Where compiling fails everything is as without it, with one warning.

The parts are traced over the ops in plain torch, which the compiler joins with each other. Rotary
embedding, cache and attention, whose layout is no tensor, stay outside, by the back end's own ops:
that needs neither a custom operator for each of them nor what a compiler knows of Triton, and so it
holds in any version of torch. Layers with experts keep their MLP as it is.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.torch_ops import TorchOps
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.layer_parts import LayerTensors, Parts
from engine.models.load import ServedModel
from engine.models.op_decoder import OpDecoder

_log = logging.getLogger(__name__)

_WARM_UP_LENGTHS = (16, 3)
_BLOCK_SIZE = 16

Backend = str | Callable[..., Any]
"""Of `torch.compile`."""


class CompiledParts:
    """`Parts` of steps of two tokens or more: the results of `eager`, by compiled code until that
    fails. `traced` are the same parts over ops that a compiler can look into."""

    def __init__(self, eager: Parts, traced: Parts, backend: Backend) -> None:
        self.has_failed = False
        self._eager = eager
        self._inputs = _compiled(traced.attention_inputs, backend)
        self._output = _compiled(traced.attention_output, backend)
        self._mlp = _compiled(traced.mlp, backend)

    def attention_inputs(
        self, hidden: torch.Tensor, update: torch.Tensor, tensors: LayerTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._either(
            self._inputs, self._eager.attention_inputs, (hidden, update), tensors
        )
        return found

    def attention_output(
        self, context: torch.Tensor, hidden: torch.Tensor, tensors: LayerTensors
    ) -> torch.Tensor:
        found: torch.Tensor = self._either(
            self._output, self._eager.attention_output, (context, hidden), tensors
        )
        return found

    def mlp(self, x: torch.Tensor, tensors: LayerTensors, on_device: bool) -> torch.Tensor:
        if "router" in tensors:
            return self._eager.mlp(x, tensors, on_device)
        found: torch.Tensor = self._either(self._mlp, self._eager.mlp, (x,), tensors, on_device)
        return found

    def give_up(self, error: Exception) -> None:
        """From now on nothing compiled is run."""
        if not self.has_failed:
            _log.warning("prefill is not compiled, and runs op by op: %s", error)
        self.has_failed = True

    def _either(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        inputs: tuple[torch.Tensor, ...],
        *rest: Any,
    ) -> Any:
        if not self.has_failed:
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
            try:
                return compiled(*inputs, *rest)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                # They come before anything is computed: the residual stream is as it was.
                self.give_up(error)
        return eager(*inputs, *rest)


def _compiled(part: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(part, backend=backend, fullgraph=True)
    return found


@torch.inference_mode()
def compile_prefill(
    model: ServedModel,
    progress: Callable[[str], None] = lambda message: None,
    backend: Backend = "inductor",
) -> bool:
    """Has `model` compute its prefill by compiled code, all of which is there when this returns.
    Returns False, and has logged why, where nothing is compiled."""
    decoder = model.backend if isinstance(model, FusedDecoder) else model
    if not isinstance(decoder, OpDecoder):
        name = type(decoder).__name__
        _log.warning("compile_prefill has no effect: %s runs this model, not OpDecoder", name)
        return False
    progress("compiling prefill")
    parts = CompiledParts(decoder.parts, decoder.parts_over(TorchOps()), backend)
    decoder.prefill_parts = parts
    cache = KVCache(model.traits, len(_WARM_UP_LENGTHS), _BLOCK_SIZE, model.device)
    slices = [
        SequenceSlice(0, length, np.array([block], dtype=np.int32))
        for block, length in enumerate(_WARM_UP_LENGTHS)
    ]
    batch = AttentionBatch.build(slices, _BLOCK_SIZE, model.device)
    token_ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=model.device)
    try:
        model.forward(token_ids, batch, token_ids[:1], cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever it is: without compiled code the model computes all the same.
        parts.give_up(error)
    return not parts.has_failed
