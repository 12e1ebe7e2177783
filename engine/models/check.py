"""Which path a checkpoint would take and what it needs, without loading it.

Invariant: it asks the functions that loading asks, in their order, so that the two agree. What only
a run can tell, the comparison at load, is left to the load.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import torch

from configs.engine import CacheConfig
from engine.errors import ModelRefused
from engine.kernels.cpu.build import why_no_kernels
from engine.models.checkpoint import CheckpointUnreadable, Shape, read_shapes, stored_bytes
from engine.models.decoder_traits import DecoderTraits, NotFused, read_decoder_traits
from engine.models.gguf_file import read_gguf
from engine.models.kv_cache import available_bytes
from engine.models.merged_weights import count_bytes
from engine.models.native_decoder import why_not_native
from engine.models.quantisation import Quantisation, plan_quantisation
from engine.models.resolve import find_model
from engine.models.support import causal_lm_class, load_config
from engine.models.traits import DTYPE_BYTES, ModelTraits, read_traits, with_kv_dtype


class ServingPath(StrEnum):
    """What runs a model, the fastest first."""

    NATIVE = "native"
    """The fused decoder, a step in one call of the C++ kernels."""
    FUSED = "fused"
    """The fused decoder, op by op in torch."""
    TRANSFORMERS = "transformers"
    """Its own modules, our attention."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes, in bytes."""

    model_type: str
    dtype: str
    weight_bytes: int
    """In the memory of an engine."""
    stored_bytes: int
    """In the checkpoint's files."""
    kv_dtype: str
    kv_bytes_per_token: int
    max_model_len: int

    def tokens_in(self, memory_bytes: int, block_size: int) -> int:
        """Tokens of KV, in whole blocks, that `memory_bytes` hold beside the weights."""
        block_bytes = block_size * self.kv_bytes_per_token
        return max(0, memory_bytes - self.weight_bytes) // block_bytes * block_size


@dataclass(frozen=True, slots=True)
class ModelCheck:
    path: ServingPath
    reason: str | None
    """Why it is refused, or takes no faster path; none on the fastest."""
    need: Need | None
    """None where it is refused."""
    is_converted_first: bool = False
    """It is a GGUF file, whose conversion happens on first use."""


def check_model(
    model: str,
    device: torch.device,
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda message: None,
    kv_dtype: str = "auto",
) -> ModelCheck:
    """Reads config and headers of `model`, which is named as `find_model` has it. A hub id is
    looked up in the local hub cache, and never downloaded."""
    try:
        found = find_model(model, progress, download=False)
        if isinstance(found, Path):
            return _check_folder(found, device, dtype, kv_dtype)
        return _check_gguf(found.source, device, dtype, kv_dtype)
    except ModelRefused as refusal:
        return ModelCheck(ServingPath.REFUSED, str(refusal), None)


def free_bytes(device: torch.device) -> int:
    """What an engine that started now would find free; 0 where it cannot be told."""
    return available_bytes(device) or 0


def default_block_size() -> int:
    return CacheConfig().block_size


def _check_folder(folder: Path, device: torch.device, dtype: str, kv_dtype: str) -> ModelCheck:
    config = load_config(folder)
    model_class = causal_lm_class(config)
    traits = with_kv_dtype(read_traits(config, folder, dtype), kv_dtype)
    quantised = plan_quantisation(config, device, traits.dtype)
    try:
        files = read_shapes(folder)
    except CheckpointUnreadable as error:
        raise ModelRefused(str(error)) from error
    stored = stored_bytes(files)
    if quantised is not None:
        return _quantised(quantised, model_class, config, traits, stored)
    try:
        decoder = read_decoder_traits(config, traits)
        weight_bytes = count_bytes(files, traits, decoder)
    except NotFused as error:
        tied = bool(getattr(config, "tie_word_embeddings", False))
        need = _need(traits, _count_all(files, traits, tied), stored)
        return ModelCheck(ServingPath.TRANSFORMERS, str(error), need)
    return _fused(traits, decoder, device, weight_bytes, stored)


def _check_gguf(source: Path, device: torch.device, dtype: str, kv_dtype: str) -> ModelCheck:
    """Of the folder that will be made of it."""
    model = read_gguf(source)
    traits = read_traits(model.config, source.parent, model.dtype if dtype == "auto" else dtype)
    traits = with_kv_dtype(traits, kv_dtype)
    weight_bytes = model.num_elements * DTYPE_BYTES[traits.dtype]
    stored = source.stat().st_size
    try:
        decoder = read_decoder_traits(model.config, traits)
    except NotFused as error:
        need = _need(traits, weight_bytes, stored)
        found = ModelCheck(ServingPath.TRANSFORMERS, str(error), need)
    else:
        found = _fused(traits, decoder, device, weight_bytes, stored)
    return replace(found, is_converted_first=True)


def _quantised(
    quantised: Quantisation, model_class: Any, config: Any, traits: ModelTraits, stored: int
) -> ModelCheck:
    traits = replace(traits, dtype=quantised.dtype)
    is_unpacked = quantised.reason_unpacked is not None
    weight_bytes = _unpacked_bytes(model_class, config, traits) if is_unpacked else stored
    need = _need(traits, weight_bytes, stored)
    return ModelCheck(ServingPath.TRANSFORMERS, str(quantised), need)


def _unpacked_bytes(model_class: Any, config: Any, traits: ModelTraits) -> int:
    """Of the same model, had it not been quantised."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)
    del config.quantization_config
    with init_empty_weights():
        module = model_class._from_config(config)
    module.tie_weights()
    elements = sum(parameter.numel() for parameter in module.parameters())
    return int(elements) * DTYPE_BYTES[traits.dtype]


def _fused(
    traits: ModelTraits,
    decoder: DecoderTraits,
    device: torch.device,
    weight_bytes: int,
    stored: int,
) -> ModelCheck:
    reason = why_not_native(traits, decoder, device) or why_no_kernels()
    path = ServingPath.NATIVE if reason is None else ServingPath.FUSED
    return ModelCheck(path, reason, _need(traits, weight_bytes, stored))


def _need(traits: ModelTraits, weight_bytes: int, stored: int) -> Need:
    return Need(
        traits.model_type,
        traits.dtype,
        weight_bytes,
        stored,
        traits.cache_dtype,
        traits.kv_bytes_per_token,
        traits.max_model_len,
    )


def _count_all(files: Mapping[Path, Mapping[str, Shape]], traits: ModelTraits, tied: bool) -> int:
    """Bytes of all tensors in the engine's dtype."""
    shapes = {name: shape for names in files.values() for name, shape in names.items()}
    if tied:
        shapes.pop("lm_head.weight", None)
    return sum(map(prod, shapes.values())) * DTYPE_BYTES[traits.dtype]
