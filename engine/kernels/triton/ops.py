"""The op set over the Triton kernels.

Invariant: it checks nothing and waits for nothing; see `engine.kernels.ops.Ops` for what each op
does, and the modules beside this one for how.
"""

from collections.abc import Sequence

import torch

from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.ops import BlockCopy
from engine.kernels.reference import AttentionOptions
from engine.kernels.triton import activation, attention, copy, norm, rope, sample
from engine.kernels.triton.tuning import Tuning, tuning_for


class TritonOps:
    """See `engine.kernels.ops.Ops`."""

    def __init__(self, device: torch.device, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or tuning_for(device)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        with torch.cuda.device_of(key):
            rope.write_kv(key, value, (key_cache, value_cache), batch, self._tuning)

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        angles: Angles,
        caches: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        with torch.cuda.device_of(query):
            return rope.rope_and_write_kv((query, key, value), angles, caches, batch, self._tuning)

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> torch.Tensor:
        with torch.cuda.device_of(query):
            return attention.paged_attention(
                query, key_cache, value_cache, batch, options, self._tuning
            )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        with torch.cuda.device_of(x):
            return norm.rms_norm(x, weight, eps, dtype)

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        with torch.cuda.device_of(residual):
            return norm.add_rms_norm(residual, update, weight, eps, dtype)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        with torch.cuda.device_of(gate_up):
            return activation.gated_activation(gate_up, kind)

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.device_of(logits):
            return sample.row_max(logits)

    def gumbel_argmax(self, scaled: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        with torch.cuda.device_of(scaled):
            return sample.gumbel_argmax(scaled, keys)

    def copy_blocks(self, storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        with torch.cuda.device_of(storage):
            copy.copy_blocks(storage, copies)
