"""A tiny run at load that compares the model packed and paged with the model on its own.

Invariant: no request is served by a model that has not passed it.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from engine.errors import ModelRefused
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.models.kv_cache import KVCache
from engine.models.traits import ModelTraits

# Largest difference of logits, relative to their length. In float32 at the worst position: rounding
# leaves about 1e-6. In the shorter types in the median, since there rounding can send single tokens
# to other experts; a wrong mask, scale or position moves every one by tens of per cent.
_WORST_FLOAT32 = 1e-3
_MEDIAN = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
_BLOCK_SIZE = 4
_SHORT, _LONG = 5, 20
# A window longer than this is not crossed by the probe; its value is checked against the config.
_LONGEST_WINDOW_PROBED = 64


class PagedModel(Protocol):
    """A model over our paged cache."""

    @property
    def traits(self) -> ModelTraits: ...

    @property
    def device(self) -> torch.device: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """See `TransformersModel.forward`."""
        ...


class Probed(PagedModel, Protocol):
    """What the probe needs of one."""

    def forward_alone(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def attention_calls(self) -> list[int]: ...


def verify_model(model: Probed) -> None:
    """Raises `ModelRefused` unless each layer called attention exactly once, and two sequences,
    packed, the longer in two chunks, have the logits that each has alone."""
    sequences = _sequences(model)
    found = _packed_logits(model, sequences)
    expected = torch.cat([model.forward_alone(sequence) for sequence in sequences])
    _compare(found.double(), expected.double(), model.traits)


def take_part(model: Probed) -> None:
    """What of `verify_model` every rank of a model computes with the one that compares."""
    _packed_logits(model, _sequences(model))


def _sequences(model: Probed) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the longer and of the shorter one."""
    traits, device = model.traits, model.device
    windows = [w for w in traits.sliding_windows if w is not None and w <= _LONGEST_WINDOW_PROBED]
    long = max([_LONG, *(window + 8 for window in windows)])
    long = min(long, traits.max_model_len)
    short = min(_SHORT, traits.max_model_len)
    return _probe_ids(long, 1, traits, device), _probe_ids(short, 2, traits, device)


def _packed_logits(model: Probed, ids: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of all tokens of the first sequence, then of the second."""
    traits, device = model.traits, model.device
    long, short = map(len, ids)
    num_blocks = -(-long // _BLOCK_SIZE) + -(-short // _BLOCK_SIZE)
    # In the dtype of the model: the rounding of a shorter one would hide what is looked for.
    cache = KVCache(replace(traits, kv_dtype=None), num_blocks, _BLOCK_SIZE, device)
    # Backwards, so that no block lies where its number in the sequence would put it.
    blocks = np.arange(num_blocks, dtype=np.int32)[::-1]
    tables = blocks[: -(-long // _BLOCK_SIZE)], blocks[-(-long // _BLOCK_SIZE) :]
    first = max(1, long // 2)

    def run(slices: list[tuple[int, int, int]]) -> torch.Tensor:
        batch = AttentionBatch.build(
            [SequenceSlice(start, length, tables[s]) for s, start, length in slices],
            _BLOCK_SIZE,
            device,
        )
        tokens = torch.cat([ids[s][start : start + length] for s, start, length in slices])
        rows = torch.arange(len(tokens), device=device)
        logits = model.forward(tokens, batch, rows, cache)
        calls = model.attention_calls()
        if sorted(calls) != list(range(traits.num_layers)):
            raise ModelRefused(
                f"its {traits.num_layers} layers called attention {len(calls)} times, not once each"
            )
        return logits

    packed = run([(0, 0, first), (1, 0, short)])
    rest = run([(0, first, long - first)]) if long > first else packed[:0]
    return torch.cat([packed[:first], rest, packed[first:]])


def _probe_ids(length: int, salt: int, traits: ModelTraits, device: torch.device) -> torch.Tensor:
    """Ids that hardly repeat, spread over the vocabulary."""
    places = torch.arange(length, dtype=torch.int64, device=device)
    return (places * 7919 + salt * 104729 + 11) % traits.vocab_size


def _compare(found: torch.Tensor, expected: torch.Tensor, traits: ModelTraits) -> None:
    if expected.shape[1] != traits.vocab_size or found.shape != expected.shape:
        raise ModelRefused(
            f"logits have shape {tuple(found.shape)} where {len(expected)} tokens and a vocabulary "
            f"of {traits.vocab_size} were expected"
        )
    if not torch.isfinite(expected).all():
        raise ModelRefused(f"its own logits are not finite in {traits.dtype}")
    scale = expected.norm(dim=1).clamp_min(1e-12)
    errors = ((found - expected).norm(dim=1) / scale).nan_to_num(nan=float("inf"))
    worst, median = errors.max().item(), errors.median().item()
    if median > _MEDIAN[traits.dtype] or (traits.dtype == "float32" and worst > _WORST_FLOAT32):
        raise ModelRefused(
            "packed and paged it gives other logits than alone: relative error "
            f"{median:.2g} in the median, {worst:.2g} at worst ({traits.dtype})"
        )
