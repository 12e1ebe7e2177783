"""One decoder for the architectures that `decoder_traits` describes, over merged weights.

Invariant: it serves only what it has been compared with: at the first load a packed, paged run is
held against the `transformers` module of the same checkpoint, which reads the same memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelRefused
from engine.kernels.batch import Angles, AttentionBatch
from engine.kernels.ops import select_ops
from engine.models.decoder_traits import DecoderTraits, NotFused, read_decoder_traits
from engine.models.kv_cache import KVCache
from engine.models.merged_weights import MergedWeights, read_weights
from engine.models.native_decoder import NativeDecoder, try_native_decoder
from engine.models.op_decoder import OpDecoder
from engine.models.probe import verify_model
from engine.models.records import Record, find_record, keep_record
from engine.models.support import causal_lm_class, load_config
from engine.models.traits import ModelTraits, read_traits


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
    ) -> "FusedDecoder":
        """Loads the checkpoint in `folder`. Raises `NotFused` where another model class has to, and
        `ModelRefused` where none can."""
        if (record := find_record(folder, dtype, device)) is not None:
            return cls._assemble(record, folder, device, progress)[0]
        config = load_config(folder)
        model_class = causal_lm_class(config)
        traits = read_traits(config, folder, dtype)
        record = Record(traits, read_decoder_traits(config, traits))
        model, weights = cls._assemble(record, folder, device, progress)
        progress("comparing packed, paged attention with the model's own")
        with torch.inference_mode():
            try:
                verify_model(_Comparison(model, _oracle(model_class, config, weights)))
            except ModelRefused as error:
                raise NotFused(str(error)) from error
        keep_record(record, folder, dtype, device)
        return model

    @classmethod
    def _assemble(
        cls, record: Record, folder: Path, device: torch.device, progress: Callable[[str], None]
    ) -> tuple["FusedDecoder", MergedWeights]:
        traits, decoder = record.traits, record.decoder
        progress(f"loading {traits.num_layers} layers in {traits.dtype} on {device}")
        weights = read_weights(folder, traits, decoder, device, progress)
        return cls.over_weights(traits, decoder, weights, device, progress), weights

    @classmethod
    def over_weights(
        cls,
        traits: ModelTraits,
        decoder: DecoderTraits,
        weights: MergedWeights,
        device: torch.device,
        progress: Callable[[str], None] = lambda message: None,
    ) -> "FusedDecoder":
        """Over weights that are on `device`, with its fastest back end; not compared with anything
        yet."""
        tensors = _with_norm_offset(weights, decoder)
        native = try_native_decoder(traits, decoder, tensors, device, progress)
        backend = native or OpDecoder(traits, decoder, tensors, select_ops(device))
        return cls(traits, decoder, backend, device, weights.num_bytes)

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


def _oracle(model_class: Any, config: Any, weights: MergedWeights) -> Any:
    """The `transformers` module over views of the same weights: it takes no memory of its own."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = model_class._from_config(config, attn_implementation="eager")
    module.load_state_dict(weights.views, strict=False, assign=True)
    module.tie_weights()
    if left := [name for name, tensor in module.named_parameters() if tensor.is_meta]:
        raise NotFused(f"the model's own class has weights that it does not know: {left[0]}")
    return module.to(weights.tensors["embedding"].device).eval().requires_grad_(False)
