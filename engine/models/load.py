"""Which model class serves a checkpoint: the fused decoder where it can, else `transformers`.

Invariant: whichever it is, it has the same interface and has passed the same comparison at load.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from engine.collectives import SINGLE, Collectives
from engine.errors import ModelRefused
from engine.models.decoder_traits import NotFused
from engine.models.fused_decoder import FusedDecoder
from engine.models.probe import PagedModel

_log = logging.getLogger(__name__)


class ServedModel(PagedModel, Protocol):
    """What an executor needs of a model."""

    @property
    def weight_bytes(self) -> int: ...

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def close(self) -> None: ...


def load_model(
    folder: Path,
    device: torch.device,
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda message: None,
    collectives: Collectives = SINGLE,
    kv_dtype: str = "auto",
) -> ServedModel:
    """The model, or this rank's part of it; `kv_dtype` as `CacheConfig` has it. Raises
    `ModelRefused` for a checkpoint that cannot be served correctly, or not so."""
    try:
        return FusedDecoder.load(folder, device, dtype, progress, collectives, kv_dtype)
    except NotFused as reason:
        if (count := collectives.shard.count) > 1:
            raise ModelRefused(
                f"tensor_parallel_size is {count}, and only what the fused decoder runs can be "
                f"shared out, not this model: {reason}"
            ) from reason
        _log.info("transformers runs this model, not the fused decoder: %s", reason)
    # Not before it is needed: its import takes longer than all else of a start.
    from engine.models.transformers_model import TransformersModel

    return TransformersModel.load(folder, device, dtype, progress, kv_dtype)
