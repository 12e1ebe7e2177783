"""A checkpoint read straight into the tensors that a fused decoder multiplies with.

Invariant: every tensor of the checkpoint has a place, of its shape, and every place is filled; else
`NotFused`. Q, K and V lie in one matrix, gate and up in another; the names that the checkpoint uses
stay available as views of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.models.checkpoint import CheckpointUnreadable, Shape, open_safetensors, read_shapes
from engine.models.decoder_traits import DecoderTraits, ExpertTraits, NotFused
from engine.models.traits import ModelTraits

# Computed, not learned; some older checkpoints carry it all the same.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """Weights in the engine's dtype and on its device.

    `tensors` are named ``embedding``, ``head`` (absent where tied), ``final_norm``, and below each
    layer's number ``N.``: ``qkv`` ``[(H + 2 KV) * D, hidden]``, ``output``, ``gate_up``
    ``[2 * intermediate, hidden]``, ``down``, or in a layer of experts ``router``
    ``[experts, hidden]``, ``expert_gate_up`` ``[experts, 2 * intermediate, hidden]``,
    ``expert_down`` ``[experts, hidden, intermediate]``; vectors ``input_norm``,
    ``attention_output_norm``, ``mlp_norm``, ``mlp_output_norm``, ``query_norm``, ``key_norm``,
    ``qkv_bias``, ``output_bias``, ``down_bias``, each where the model has one.
    """

    tensors: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    """By the names of the model's own class, in the memory of `tensors`."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class _Places:
    """Where each tensor of the checkpoint goes."""

    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the checkpoint's names."""
    own_views: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the names of the model's own class, where they differ from the checkpoint's."""
    not_own: set[str] = field(default_factory=set)
    """Names of the checkpoint that the model's own class does not have."""

    def add(self, name: str, parts: dict[str, int], *rest: int) -> None:
        """Tensor `name` of ``[sum(parts), *rest]``, made of the checkpoint's `parts` by rows."""
        whole = torch.empty((sum(parts.values()), *rest), dtype=self.dtype, device=self.device)
        self.tensors[name] = whole
        first = 0
        for part, rows in parts.items():
            self.views[part] = whole[first : first + rows]
            first += rows

    def add_as(self, own_name: str, name: str, parts: dict[str, int], *shape: int) -> None:
        """As `add`, of what the model's own class has whole, in `shape`, as `own_name`."""
        self.add(name, parts, shape[-1])
        self.own_views[own_name] = self.tensors[name] = self.tensors[name].view(shape)
        self.not_own |= parts.keys()

    def merged(self) -> MergedWeights:
        kept = {name: view for name, view in self.views.items() if name not in self.not_own}
        return MergedWeights(self.tensors, kept | self.own_views)


def read_weights(
    folder: Path,
    traits: ModelTraits,
    decoder: DecoderTraits,
    device: torch.device,
    progress: Callable[[str], None] = lambda message: None,
) -> MergedWeights:
    """Reads all safetensors files in `folder`. Raises `NotFused` for a tensor without a place of
    its shape, or a place without a tensor."""
    try:
        files = read_shapes(folder)
    except CheckpointUnreadable as error:
        raise NotFused(str(error)) from error
    places = _fitting_places(traits, decoder, files, device)
    for number, (path, names) in enumerate(files.items(), start=1):
        if len(files) > 1:
            progress(f"weights: file {number} of {len(files)}")
        _read_file(path, names, places.views)
    return places.merged()


def random_weights(
    traits: ModelTraits, decoder: DecoderTraits, device: torch.device, seed: int = 0
) -> MergedWeights:
    """Weights without a checkpoint, made on `device`, for measurements; no biases. Matrices are
    scaled so that activations stay near one, norms are one."""
    source = torch.Generator(device).manual_seed(seed)
    weights = _places(traits, decoder, set(), device).merged()
    for tensor in weights.tensors.values():
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=source)
    return weights


def count_bytes(
    files: Mapping[Path, Mapping[str, Shape]], traits: ModelTraits, decoder: DecoderTraits
) -> int:
    """`MergedWeights.num_bytes` of what `read_weights` would give, by the files' headers. Raises
    `NotFused` as it does."""
    return _fitting_places(traits, decoder, files, torch.device("meta")).merged().num_bytes


def _fitting_places(
    traits: ModelTraits,
    decoder: DecoderTraits,
    files: Mapping[Path, Mapping[str, Shape]],
    device: torch.device,
) -> _Places:
    present = {name: shape for shapes in files.values() for name, shape in shapes.items()}
    places = _places(traits, decoder, set(present), device)
    unknown = sorted(present.keys() - places.views.keys())
    # A tied checkpoint may carry its head twice.
    tied = {"lm_head.weight"} if decoder.tied_embeddings else set()
    if unknown := [name for name in unknown if name not in tied and not name.endswith(_COMPUTED)]:
        raise NotFused(f"the checkpoint has {len(unknown)} tensors it does not know: {unknown[0]}")
    if missing := sorted(places.views.keys() - present.keys()):
        raise NotFused(f"the checkpoint lacks {len(missing)} tensors, among them {missing[0]}")
    for name, view in places.views.items():
        if present[name] != view.shape:
            raise NotFused(f"{name} has shape {present[name]}, not {tuple(view.shape)}")
    return places


def _read_file(path: Path, names: Iterable[str], views: dict[str, torch.Tensor]) -> None:
    with open_safetensors(path) as file:
        for name in names:
            if name in views:
                views[name].copy_(file.get_tensor(name))


def _places(
    traits: ModelTraits, decoder: DecoderTraits, present: set[str], device: torch.device
) -> _Places:
    places = _Places(getattr(torch, traits.dtype), device)
    hidden = decoder.hidden_size
    places.add("embedding", {"model.embed_tokens.weight": traits.vocab_size}, hidden)
    if not decoder.tied_embeddings:
        places.add("head", {"lm_head.weight": traits.vocab_size}, hidden)
    places.add("final_norm", {"model.norm.weight": hidden})
    for layer in range(traits.num_layers):
        _place_attention(places, layer, traits, decoder, present)
        if decoder.experts is not None and layer in decoder.experts.layers:
            _place_experts(places, layer, decoder.hidden_size, decoder.experts)
        else:
            _place_mlp(places, layer, decoder, present)
        _place_norms(places, layer, traits, decoder)
    return places


def _place_attention(
    places: _Places,
    layer: int,
    traits: ModelTraits,
    decoder: DecoderTraits,
    present: set[str],
) -> None:
    name = f"model.layers.{layer}.self_attn."
    queries, keys = traits.num_heads * traits.head_dim, traits.num_kv_heads * traits.head_dim
    if decoder.merged_checkpoint:
        parts = {"qkv_proj": queries + 2 * keys}
    else:
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}

    def named(kind: str) -> dict[str, int]:
        return {f"{name}{part}.{kind}": rows for part, rows in parts.items()}

    places.add(f"{layer}.qkv", named("weight"), decoder.hidden_size)
    if named("bias").keys() & present:
        places.add(f"{layer}.qkv_bias", named("bias"))
    places.add(f"{layer}.output", {f"{name}o_proj.weight": decoder.hidden_size}, queries)
    if f"{name}o_proj.bias" in present:
        places.add(f"{layer}.output_bias", {f"{name}o_proj.bias": decoder.hidden_size})


def _place_mlp(places: _Places, layer: int, decoder: DecoderTraits, present: set[str]) -> None:
    name = f"model.layers.{layer}.mlp."
    hidden, width = decoder.hidden_size, decoder.intermediate_size
    if decoder.merged_checkpoint:
        parts = {f"{name}gate_up_proj.weight": 2 * width}
    else:
        parts = {f"{name}gate_proj.weight": width, f"{name}up_proj.weight": width}
    places.add(f"{layer}.gate_up", parts, hidden)
    places.add(f"{layer}.down", {f"{name}down_proj.weight": hidden}, width)
    if f"{name}down_proj.bias" in present:
        places.add(f"{layer}.down_bias", {f"{name}down_proj.bias": hidden})


def _place_experts(places: _Places, layer: int, hidden: int, experts: ExpertTraits) -> None:
    """An expert's gate and up lie together, and all experts in one tensor, as the model's own class
    has them."""
    checkpoint, own = f"model.layers.{layer}.", f"model.layers.{layer}.mlp."
    names, width, numbers = experts.names, experts.intermediate_size, range(experts.num_experts)

    def parts(rows: int, *patterns: str) -> dict[str, int]:
        return {checkpoint + name.format(n): rows for n in numbers for name in patterns}

    count = experts.num_experts
    router = {checkpoint + names.router: count}
    places.add_as(own + "gate.weight", f"{layer}.router", router, count, hidden)
    places.add_as(
        own + "experts.gate_up_proj",
        f"{layer}.expert_gate_up",
        parts(width, names.gate, names.up),
        *(count, 2 * width, hidden),
    )
    places.add_as(
        own + "experts.down_proj",
        f"{layer}.expert_down",
        parts(hidden, names.down),
        *(count, hidden, width),
    )


def _place_norms(places: _Places, layer: int, traits: ModelTraits, decoder: DecoderTraits) -> None:
    norms = decoder.norms
    for name, source in (
        ("input_norm", norms.input),
        ("attention_output_norm", norms.attention_output),
        ("mlp_norm", norms.mlp),
        ("mlp_output_norm", norms.mlp_output),
    ):
        if source is not None:
            part = f"model.layers.{layer}.{source}.weight"
            places.add(f"{layer}.{name}", {part: decoder.hidden_size})
    if decoder.head_norm == "none":
        return
    for name, heads in (("query", traits.num_heads), ("key", traits.num_kv_heads)):
        size = traits.head_dim * (heads if decoder.head_norm == "all" else 1)
        part = f"model.layers.{layer}.self_attn.{name[0]}_norm.weight"
        places.add(f"{layer}.{name}_norm", {part: size})
