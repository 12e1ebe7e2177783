"""The op set: all that a model, its cache and its sampler ask of a device beyond torch's products.

Invariant: a caller cannot tell two back ends apart but by speed and by rounding. `TorchOps` runs
anywhere and is the oracle; a back end for a device is imported by `select_ops` alone, and only for
a model on that device.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.reference import AttentionOptions
from engine.kernels.torch_ops import TorchOps

__all__ = ["BlockCopy", "Ops", "TorchOps", "select_ops"]

_log = logging.getLogger(__name__)

BlockCopy = tuple[int, int, int]
"""Source block, destination block, and how many of its first tokens are copied."""


class Ops(Protocol):
    """T packed tokens, S sequences; H query heads and KV key heads of size D; everything computes
    in float32 but for `gumbel_argmax`, and rounds where it says so.

    A batch may be a `PaddedDecodeBatch`: then rows of padding are not written to the cache, and
    attention gives zeros for them.
    """

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Puts this step's keys and values ``[T, KV, D]`` into their slots of the layer's caches
        ``[num_blocks, KV, block_size, D]``, rounded to the caches' dtype; in float8 (e4m3) what is
        beyond ±448 becomes ±448. Writing the same step again changes nothing."""
        ...

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        angles: Angles,
        caches: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Rotates queries ``[T, H, D]`` and keys ``[T, KV, D]``, rounds both to `value`'s dtype,
        and writes keys and values as `write_kv` does. Returns the queries."""
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Causal attention of each query ``[T, H, D]`` to its own sequence, whose keys and values
        are in the caches already, this step's included; query head h reads head ``h // (H / KV)``.
        Nothing at or past a sequence's length has any influence. Returns ``[T, H, D]`` in the
        query's dtype."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """``x / rms(x) * weight`` over the last dimension of `x` (``[T, E]`` or
        ``[T, heads, E]``), rounded to `dtype` (https://arxiv.org/abs/1910.07467)."""
        ...

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Adds `update` to `residual` (float32 ``[T, E]``, changed in place), and returns
        `rms_norm` of the sum; without a weight the sum itself, rounded to `dtype`."""
        ...

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """``activation(gate) * up`` for ``[T, 2 I]``, gate first, rounded to its dtype. `kind` is
        ``silu``, ``gelu`` (by the error function) or ``gelu_tanh``."""
        ...

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each row of ``[N, V]``, NaN if there is one, and its place (int64), of
        equal ones the first."""
        ...

    def gumbel_argmax(self, scaled: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        """A draw from each row of `scaled` (float64 ``[N, V]``, without NaN, may be overwritten):
        where ``scaled + gumbel_noise(keys, all ids)`` is largest, int64 ``[N]``. All in float64."""
        ...

    def copy_blocks(self, storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, in all layers at once, inside ``[layers, 2, num_blocks, KV, block_size,
        D]``. In no particular order: no destination may be another's source or destination."""
        ...


@cache
def select_ops(device: torch.device) -> Ops:
    """The fastest back end for `device`: Triton's on CUDA, torch's elsewhere, and, with a warning,
    on CUDA without Triton."""
    if device.type != "cuda":
        return TorchOps()
    try:
        from engine.kernels.triton.ops import TritonOps
    except ImportError as error:
        _log.warning("no Triton kernels, so plain torch computes on %s, slowly: %s", device, error)
        return TorchOps()
    return TritonOps(device)
