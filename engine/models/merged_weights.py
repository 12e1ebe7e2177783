"""A checkpoint read straight into the tensors that a fused decoder multiplies with.

Invariant: what is read fits (`weight_places`), and no more is read than is held. The names that the
checkpoint uses stay available: of a whole model as views of the same memory, of a part of one by
reading tensors again, one at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.models.checkpoint import CheckpointUnreadable, Shape, open_safetensors, read_shapes
from engine.models.decoder_traits import DecoderTraits, NotFused
from engine.models.sharding import WHOLE, Shard
from engine.models.traits import ModelTraits
from engine.models.weight_places import EMBEDDING, HEAD, Places, fitting_places, laid_out


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """Weights in the engine's dtype and on its device.

    `tensors` are named ``embedding``, ``head`` (absent where tied), ``final_norm``, and below each
    layer's number ``N.``: ``qkv`` ``[(H + 2 KV) * D, hidden]``, ``output``, ``gate_up``
    ``[2 * intermediate, hidden]``, ``down``, or in a layer of experts ``router``
    ``[experts, hidden]``, ``expert_gate_up`` ``[experts, 2 * intermediate, hidden]``,
    ``expert_down`` ``[experts, hidden, intermediate]``; vectors ``input_norm``,
    ``attention_output_norm``, ``mlp_norm``, ``mlp_output_norm``, ``query_norm``, ``key_norm``,
    ``qkv_bias``, ``output_bias``, ``down_bias``, each where the model has one. One of several ranks
    has its share of H, KV, intermediate and the head's rows.
    """

    tensors: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    """By the names of the model's own class, in the memory of `tensors`; empty on one of several
    ranks."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_weights(
    folder: Path,
    traits: ModelTraits,
    decoder: DecoderTraits,
    device: torch.device,
    progress: Callable[[str], None] = lambda message: None,
    shard: Shard = WHOLE,
) -> MergedWeights:
    """Reads all safetensors files in `folder`, of which `traits` are the whole model's. Raises
    `NotFused` as `fitting_places` does."""
    files = _files(folder)
    places = fitting_places(traits, decoder, files, device, shard)
    for number, (path, names) in enumerate(files.items(), start=1):
        if len(files) > 1:
            progress(f"weights: file {number} of {len(files)}")
        with open_safetensors(path) as file:
            for name in names:
                if name in places.pieces:
                    places.pieces[name].read(file.get_slice(name))
    return _merged(places)


def random_weights(
    traits: ModelTraits, decoder: DecoderTraits, device: torch.device, seed: int = 0
) -> MergedWeights:
    """Weights without a checkpoint, made on `device`, for measurements; no biases. Matrices are
    scaled so that activations stay near one, norms are one."""
    source = torch.Generator(device).manual_seed(seed)
    weights = _merged(laid_out(traits, decoder, set(), device, WHOLE))
    for tensor in weights.tensors.values():
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=source)
    return weights


def count_bytes(
    files: Mapping[Path, Mapping[str, Shape]],
    traits: ModelTraits,
    decoder: DecoderTraits,
    shard: Shard = WHOLE,
) -> int:
    """`MergedWeights.num_bytes` of what `read_weights` would give, by the files' headers. Raises
    `NotFused` as it does."""
    return _merged(fitting_places(traits, decoder, files, torch.device("meta"), shard)).num_bytes


class WholeTensors:
    """Tensors of a checkpoint by the names of the model's own class, each read when it is asked for
    and kept by nobody here."""

    def __init__(
        self, folder: Path, traits: ModelTraits, decoder: DecoderTraits, device: torch.device
    ) -> None:
        """Raises `NotFused` as `read_weights` does."""
        files = _files(folder)
        places = fitting_places(traits, decoder, files, torch.device("meta"), WHOLE)
        self.device = device
        self._like = _merged(places).views
        self._parts = {name: (name,) for name in self._like} | places.own_parts
        if decoder.tied_embeddings:
            self._like[HEAD], self._parts[HEAD] = self._like[EMBEDDING], (EMBEDDING,)
        opened = {path: open_safetensors(path) for path in files}
        self._files = {name: opened[path] for path, names in files.items() for name in names}

    def __contains__(self, name: object) -> bool:
        return name in self._like

    def read(self, name: str) -> torch.Tensor:
        """In the engine's dtype, on its device."""
        tensor = torch.empty_like(self._like[name], device=self.device)
        rows = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        first = 0
        for part in self._parts[name]:
            source = self._files[part].get_tensor(part)
            rows[first : first + len(source)].copy_(source)
            first += len(source)
        return tensor


def _files(folder: Path) -> dict[Path, dict[str, Shape]]:
    try:
        return read_shapes(folder)
    except CheckpointUnreadable as error:
        raise NotFused(str(error)) from error


def _merged(places: Places) -> MergedWeights:
    if places.shard.count > 1:
        return MergedWeights(places.tensors, {})
    inner = {part for parts in places.own_parts.values() for part in parts}
    views = {name: piece.view for name, piece in places.pieces.items() if name not in inner}
    return MergedWeights(places.tensors, views | places.own_views)
