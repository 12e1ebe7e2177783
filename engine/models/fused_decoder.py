"""One decoder for the architectures that `decoder_traits` describes, over merged weights.

Invariant: it serves only what it has been compared with: at the first load a packed, paged run is
held against the `transformers` module of the same checkpoint. Of several ranks all take part in the
run, at every load, and the first compares.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.collectives import SINGLE, Collectives
from engine.errors import ModelRefused
from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.ops import select_ops
from engine.models.decoder_traits import DecoderTraits, NotFused, read_decoder_traits
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import MergedWeights, WholeTensors, read_weights
from engine.models.native_decoder import NativeDecoder, try_native_decoder
from engine.models.op_decoder import OpDecoder
from engine.models.probe import take_part, verify_model
from engine.models.records import Record, find_record, keep_record
from engine.models.sharding import Shard, shard_traits
from engine.models.support import causal_lm_class, load_config
from engine.models.traits import ModelTraits, read_traits, with_kv_dtype


class FusedDecoder:
    """A loaded and verified model, with the interface of `TransformersModel`."""

    def __init__(
        self,
        traits: ModelTraits,
        decoder: DecoderTraits,
        backend: NativeDecoder | OpDecoder,
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
        kv_dtype: str = "auto",
    ) -> "FusedDecoder":
        """Loads the checkpoint in `folder`, of several ranks each its own part, and connects them.
        Raises `NotFused` where another model class has to, and `ModelRefused` where none can."""
        is_alone = collectives.shard.count == 1
        record = find_record(folder, dtype, device, kv_dtype) if is_alone else None
        if record is not None:
            return cls._assemble(record, folder, device, progress, SINGLE)[0]
        config = load_config(folder)
        model_class = causal_lm_class(config)
        traits = with_kv_dtype(read_traits(config, folder, dtype), kv_dtype)
        record = Record(traits, read_decoder_traits(config, traits))
        model, weights = cls._assemble(record, folder, device, progress, collectives)
        progress("comparing packed, paged attention with the model's own")
        # Not before it is needed: what it imports takes longer than all else of a start.
        from engine.models.oracle import oracle_from, oracle_over

        oracle = None
        if is_alone:
            oracle = oracle_over(weights, model_class, config)
        elif collectives.shard.rank == 0:
            of_whole = WholeTensors(folder, traits, record.decoder, device)
            oracle = oracle_from(of_whole, model_class, config)
        collectives.connect(device)
        verify = verify_model if collectives.shard.rank == 0 else take_part
        with torch.inference_mode():
            try:
                verify(_Comparison(model, oracle))
            except ModelRefused as error:
                raise NotFused(str(error)) from error
        if is_alone:
            keep_record(record, folder, dtype, device, kv_dtype)
        return model

    @classmethod
    def _assemble(
        cls,
        record: Record,
        folder: Path,
        device: torch.device,
        progress: Callable[[str], None],
        collectives: Collectives,
    ) -> tuple["FusedDecoder", MergedWeights]:
        """`record` is of the whole model."""
        shard, decoder = collectives.shard, record.decoder
        traits = shard_traits(record.traits, decoder, shard.count)
        progress(f"loading {traits.num_layers} layers in {traits.dtype} on {device}")
        weights = read_weights(folder, record.traits, decoder, device, progress, shard)
        model = cls.over_weights(traits, decoder, weights, device, progress, collectives)
        return model, weights

    @classmethod
    def over_weights(
        cls,
        traits: ModelTraits,
        decoder: DecoderTraits,
        weights: MergedWeights,
        device: torch.device,
        progress: Callable[[str], None] = lambda message: None,
        collectives: Collectives = SINGLE,
    ) -> "FusedDecoder":
        """Over weights that are on `device`, with its fastest back end; not compared with anything
        yet. Of several ranks, `traits` and `weights` are this one's part."""
        shard = collectives.shard
        tensors = _with_own_head(_with_norm_offset(weights, decoder), shard)
        native = None
        if shard.count == 1:
            native = try_native_decoder(traits, decoder, tensors, device, progress)
        ops = OpDecoder(traits, decoder, tensors, select_ops(device), collectives)
        return cls(traits, decoder, native or ops, device, weights.num_bytes)

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
