"""Where each tensor of a checkpoint goes in the tensors that a fused decoder multiplies with.

Invariant: every tensor of the checkpoint has a place, of its shape, and every place is filled; else
`NotFused`. Q, K and V lie in one matrix, gate and up in another. Of what is shared out over ranks
there is a place for the own part alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoint import Shape
from engine.models.decoder_traits import DecoderTraits, ExpertTraits, NotFused
from engine.models.sharding import WHOLE, Shard, Split
from engine.models.traits import ModelTraits

# Computed, not learned; some older checkpoints carry it all the same.
_COMPUTED = ".rotary_emb.inv_freq"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Rows = int | tuple[int, ...]
"""Of a tensor of the checkpoint; several where kinds that are shared out one by one lie in it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a tensor of the checkpoint is held, and where."""

    view: torch.Tensor
    rows: tuple[range, ...]
    columns: range | None

    def read(self, source: Any) -> None:
        """`source`: a slice of safetensors, of which no more is read than is asked for."""
        first = 0
        for rows in self.rows:
            taken = slice(rows.start, rows.stop)
            if self.columns is None:
                part = source[taken]
            else:
                part = source[taken, self.columns.start : self.columns.stop]
            self.view[first : first + len(rows)].copy_(part)
            first += len(rows)


@dataclass
class Places:
    """Where each tensor of the checkpoint goes."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of whole tensors, by the checkpoint's names."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """By the checkpoint's names."""
    own_views: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the names of the model's own class, where they differ from the checkpoint's."""
    own_parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By the same names: the checkpoint's, whose tensors they hold one after the other."""

    def add(
        self, name: str, parts: Mapping[str, Rows], *columns: int, split: Split = Split.COPIED
    ) -> None:
        """Tensor `name`, made of the checkpoint's `parts` by rows, each with so many columns (none:
        of a vector)."""
        sections = {
            part: (rows,) if isinstance(rows, int) else rows for part, rows in parts.items()
        }
        for part, rows in sections.items():
            self.shapes[part] = (sum(rows), *columns)
        if split is Split.FIRST and self.shard.rank > 0:
            return
        row_shard = self.shard if split is Split.ROWS else WHOLE
        column_shard = self.shard if split is Split.COLUMNS else WHOLE
        held = {part: row_shard.parts(rows) for part, rows in sections.items()}
        width = column_shard.part(columns[0]) if columns else None
        num_rows = sum(len(rows) for ranges in held.values() for rows in ranges)
        shape = (num_rows,) if width is None else (num_rows, len(width))
        whole = self.tensors[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        first = 0
        for part, ranges in held.items():
            count = sum(map(len, ranges))
            self.pieces[part] = Piece(whole[first : first + count], ranges, width)
            first += count

    def add_as(
        self, own_name: str, name: str, parts: Mapping[str, Rows], *shape: int, split: Split
    ) -> None:
        """As `add`, of what the model's own class has whole, in `shape`, as `own_name`."""
        self.add(name, parts, shape[-1], split=split)
        tensor = self.tensors[name]
        self.own_views[own_name] = self.tensors[name] = tensor.view(shape[0], -1, tensor.shape[1])
        self.own_parts[own_name] = tuple(parts)


def fitting_places(
    traits: ModelTraits,
    decoder: DecoderTraits,
    files: Mapping[Path, Mapping[str, Shape]],
    device: torch.device,
    shard: Shard,
) -> Places:
    """The places of what lies in `files`; `traits` are the whole model's. Raises `NotFused` for a
    tensor without a place of its shape, or a place without a tensor."""
    present = {name: shape for shapes in files.values() for name, shape in shapes.items()}
    places = laid_out(traits, decoder, set(present), device, shard)
    unknown = sorted(present.keys() - places.shapes.keys())
    # A tied checkpoint may carry its head twice.
    tied = {HEAD} if decoder.tied_embeddings else set()
    if unknown := [name for name in unknown if name not in tied and not name.endswith(_COMPUTED)]:
        raise NotFused(f"the checkpoint has {len(unknown)} tensors it does not know: {unknown[0]}")
    if missing := sorted(places.shapes.keys() - present.keys()):
        raise NotFused(f"the checkpoint lacks {len(missing)} tensors, among them {missing[0]}")
    for name, shape in places.shapes.items():
        if present[name] != shape:
            raise NotFused(f"{name} has shape {present[name]}, not {shape}")
    return places


def laid_out(
    traits: ModelTraits,
    decoder: DecoderTraits,
    present: set[str],
    device: torch.device,
    shard: Shard,
) -> Places:
    """The places of all that the model must have, and of the biases among `present`."""
    places = Places(getattr(torch, traits.dtype), device, shard)
    hidden = decoder.hidden_size
    places.add("embedding", {EMBEDDING: traits.vocab_size}, hidden)
    if not decoder.tied_embeddings:
        places.add("head", {HEAD: traits.vocab_size}, hidden, split=Split.ROWS)
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
    places: Places,
    layer: int,
    traits: ModelTraits,
    decoder: DecoderTraits,
    present: set[str],
) -> None:
    name = f"model.layers.{layer}.self_attn."
    queries, keys = traits.num_heads * traits.head_dim, traits.num_kv_heads * traits.head_dim
    parts: dict[str, Rows]
    if decoder.merged_checkpoint:
        parts = {"qkv_proj": (queries, keys, keys)}
    else:
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}

    def named(kind: str) -> dict[str, Rows]:
        return {f"{name}{part}.{kind}": rows for part, rows in parts.items()}

    hidden = decoder.hidden_size
    places.add(f"{layer}.qkv", named("weight"), hidden, split=Split.ROWS)
    if named("bias").keys() & present:
        places.add(f"{layer}.qkv_bias", named("bias"), split=Split.ROWS)
    output, bias = f"{name}o_proj.weight", f"{name}o_proj.bias"
    places.add(f"{layer}.output", {output: hidden}, queries, split=Split.COLUMNS)
    if bias in present:
        places.add(f"{layer}.output_bias", {bias: hidden}, split=Split.FIRST)


def _place_mlp(places: Places, layer: int, decoder: DecoderTraits, present: set[str]) -> None:
    name = f"model.layers.{layer}.mlp."
    hidden, width = decoder.hidden_size, decoder.intermediate_size
    parts: dict[str, Rows]
    if decoder.merged_checkpoint:
        parts = {f"{name}gate_up_proj.weight": (width, width)}
    else:
        parts = {f"{name}gate_proj.weight": width, f"{name}up_proj.weight": width}
    places.add(f"{layer}.gate_up", parts, hidden, split=Split.ROWS)
    down, bias = f"{name}down_proj.weight", f"{name}down_proj.bias"
    places.add(f"{layer}.down", {down: hidden}, width, split=Split.COLUMNS)
    if bias in present:
        places.add(f"{layer}.down_bias", {bias: hidden}, split=Split.FIRST)


def _place_experts(places: Places, layer: int, hidden: int, experts: ExpertTraits) -> None:
    """An expert's gate and up lie together, and all experts in one tensor, as the model's own class
    has them. Each is shared out as the one MLP of another layer is."""
    checkpoint, own = f"model.layers.{layer}.", f"model.layers.{layer}.mlp."
    names, width, numbers = experts.names, experts.intermediate_size, range(experts.num_experts)

    def parts(rows: int, *patterns: str) -> dict[str, Rows]:
        return {checkpoint + name.format(n): rows for n in numbers for name in patterns}

    count = experts.num_experts
    router, own_router = checkpoint + names.router, own + "gate.weight"
    places.add(f"{layer}.router", {router: count}, hidden)
    places.own_views[own_router] = places.pieces[router].view
    places.own_parts[own_router] = (router,)
    places.add_as(
        own + "experts.gate_up_proj",
        f"{layer}.expert_gate_up",
        parts(width, names.gate, names.up),
        *(count, 2 * width, hidden),
        split=Split.ROWS,
    )
    places.add_as(
        own + "experts.down_proj",
        f"{layer}.expert_down",
        parts(hidden, names.down),
        *(count, hidden, width),
        split=Split.COLUMNS,
    )


def _place_norms(places: Places, layer: int, traits: ModelTraits, decoder: DecoderTraits) -> None:
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
