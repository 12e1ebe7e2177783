"""The op set in plain torch, on any device: what other back ends are compared with.

Invariant: it rounds exactly where `engine.kernels.ops.Ops` says, and nowhere else.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.kernels import reference
from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.reference import AttentionOptions
from engine.sampling.noise import gumbel_noise


class TorchOps:
    """See `engine.kernels.ops.Ops`."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        if isinstance(batch, PaddedDecodeBatch):
            batch, rows = batch.unpadded()
            key, value = key[rows], value[rows]
        reference.write_kv(key, value, key_cache, value_cache, batch)

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        angles: Angles,
        caches: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        self.write_kv(_rotate(key, angles).to(value.dtype), value, *caches, batch)
        return _rotate(query, angles).to(value.dtype)

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if not isinstance(batch, PaddedDecodeBatch):
            return reference.paged_attention(query, key_cache, value_cache, batch, options)
        real, rows = batch.unpadded()
        output = torch.zeros_like(query)
        output[rows] = reference.paged_attention(query[rows], key_cache, value_cache, real, options)
        return output

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * scale * weight.float()).to(dtype)

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        residual += update
        if weight is None:
            return residual.to(dtype)
        return self.rms_norm(residual, weight, eps, dtype)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if kind == "silu":
            activated = F.silu(gate)
        else:
            activated = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
        return (activated * up).to(gate_up.dtype)

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.row_max(logits)

    def gumbel_argmax(self, scaled: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        vocabulary = torch.arange(scaled.shape[1], device=scaled.device)
        scaled += gumbel_noise(keys, vocabulary)
        return scaled.argmax(dim=-1)

    def copy_blocks(self, storage: torch.Tensor, copies: Sequence[tuple[int, int, int]]) -> None:
        for count in sorted({num_tokens for _, _, num_tokens in copies}):
            pairs = [(source, target) for source, target, n in copies if n == count]
            index = torch.tensor(pairs, device=storage.device)
            storage[:, :, index[:, 1], :, :count] = storage[:, :, index[:, 0], :, :count]


def _rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotates the pairs ``(i, i + rotated / 2)`` of each head of `x` ``[T, heads, D]``."""
    half = angles.cos.shape[1]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[2] - 2 * half], dim=2)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)
