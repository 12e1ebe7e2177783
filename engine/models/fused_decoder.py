"""One decoder for the architectures that `decoder_traits` describes, over merged weights.

Invariant: it serves only what it has been compared with: at load a packed, paged run is held
against the `transformers` module of the same checkpoint. Of several ranks all take part in the run,
and the first compares.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.collectives import SINGLE, Collectives
from engine.errors import ModelRefused
from engine.kernels.batch import AttentionBatch
from engine.models.decoder_traits import DecoderTraits, NotFused, read_decoder_traits
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import MergedWeights, WholeTensors, read_weights
from engine.models.native_decoder import NativeDecoder, try_native_decoder
from engine.models.oracle import oracle_from, oracle_over
from engine.models.probe import take_part, verify_model
from engine.models.reference_decoder import Angles, ReferenceDecoder
from engine.models.sharding import Shard, shard_traits
from engine.models.support import causal_lm_class, load_config
from engine.models.traits import ModelTraits, read_traits


class FusedDecoder:
    """A loaded and verified model, with the interface of `TransformersModel`."""

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        backend: NativeDecoder | ReferenceDecoder,
        device: torch.device,
        weight_bytes: int,
    ) -> None:
        self.traits = traits
        self.device = device
        self.weight_bytes = weight_bytes
        self.backend = backend
        self._rotary_scale = decoder.rotary_scale
        self._frequencies = torch.tensor(decoder.inverse_frequencies, device=device)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device,
        dtype: str = "auto",
        progress: Callable[[str], None] = lambda message: None,
        collectives: Collectives = SINGLE,
    ) -> "FusedDecoder":
        """Loads the checkpoint in `folder`, of several ranks each its own part, and connects them.
        Raises `NotFused` where another model class has to, and `ModelRefused` where none can."""
        config = load_config(folder)
        model_class = causal_lm_class(config)
        whole = read_traits(config, folder, dtype)
        decoder = read_decoder_traits(config, whole)
        shard = collectives.shard
        traits = shard_traits(whole, decoder, shard.count)
        progress(f"loading {traits.num_layers} layers in {traits.dtype} on {device}")
        weights = read_weights(folder, whole, decoder, device, progress, shard)
        tensors = _with_own_head(_with_norm_offset(weights, decoder), shard)
        backend = None
        if shard.count == 1:
            backend = try_native_decoder(traits, decoder, tensors, device, progress)
        model = cls(
            traits,
            decoder,
            backend or ReferenceDecoder(traits, decoder, tensors, collectives),
            device,
            weights.num_bytes,
        )
        progress("comparing packed, paged attention with the model's own")
        oracle = None
        if shard.count == 1:
            oracle = oracle_over(weights, model_class, config)
        elif shard.rank == 0:
            of_whole = WholeTensors(folder, whole, decoder, device)
            oracle = oracle_from(of_whole, model_class, config)
        collectives.connect(device)
        with torch.inference_mode():
            try:
                (verify_model if shard.rank == 0 else take_part)(_Comparison(model, oracle))
            except ModelRefused as error:
                raise NotFused(str(error)) from error
        return model

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """Computes the T packed tokens of `batch` (`token_ids` int64 ``[T]``), writing their KV to
        `cache`. Returns logits, float32 ``[len(rows), vocab_size]``, of the packed rows asked
        for."""
        turns = batch.positions.float()[:, None] * self._frequencies
        angles = Angles(turns.cos() * self._rotary_scale, turns.sin() * self._rotary_scale)
        return self.backend.forward(token_ids, batch, angles, rows, cache)

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each row of `forward`'s logits, and its place."""
        return self.backend.row_max(logits)

    def close(self) -> None:
        """Nothing to give back: its memory goes with it."""


class _Comparison:
    """What `verify_model` holds against each other."""

    def __init__(self, model: FusedDecoder, oracle: Any) -> None:
        self.traits = model.traits
        self.device = model.device
        self.forward = model.forward
        self._oracle = oracle

    def forward_alone(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._oracle(input_ids=token_ids[None], use_cache=False).logits
        return logits[0]

    def attention_calls(self) -> list[int]:
        return list(range(self.traits.num_layers))


def _with_norm_offset(weights: MergedWeights, decoder: DecoderTraits) -> dict[str, torch.Tensor]:
    if decoder.norm_offset == 0.0:
        return weights.tensors
    return {
        # In float32: most of 1 + weight would not survive rounding.
        name: tensor.float() + decoder.norm_offset if name.endswith("norm") else tensor
        for name, tensor in weights.tensors.items()
    }


def _with_own_head(tensors: dict[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    """Of several ranks each has a head for its part of the vocabulary; where it is tied, that is a
    part of the embedding."""
    if shard.count == 1 or "head" in tensors:
        return tensors
    rows = shard.part(len(tensors["embedding"]))
    return {**tensors, "head": tensors["embedding"][rows.start : rows.stop]}
