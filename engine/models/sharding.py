"""Which part of a model each rank of a tensor-parallel engine holds.

Invariant: of everything that is shared out, the ranks' parts are disjoint, in order, and together
the whole. What one matrix gives by its rows the next takes by its columns
(https://arxiv.org/abs/1909.08053), so a layer needs two sums over the ranks and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from engine.errors import ModelRefused
from engine.models.decoder_traits import DecoderTraits
from engine.models.traits import ModelTraits


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `count`."""

    rank: int
    count: int

    def part(self, size: int) -> range:
        """Of `size` things what this rank holds. The ranks' parts are equally large, but for the
        last ones where `size` is no multiple of `count`."""
        share = -(-size // self.count)
        return range(min(self.rank * share, size), min((self.rank + 1) * share, size))

    def parts(self, sections: Sequence[int]) -> tuple[range, ...]:
        """Of sections that lie one after the other, each shared out by itself: what this rank
        holds of each, counted from the beginning of the first."""
        found, begin = [], 0
        for size in sections:
            part = self.part(size)
            found.append(range(begin + part.start, begin + part.stop))
            begin += size
        return tuple(found)


WHOLE = Shard(0, 1)


class Split(Enum):
    """How a weight is shared out."""

    COPIED = auto()
    """Every rank holds all of it."""
    ROWS = auto()
    """By what it gives."""
    COLUMNS = auto()
    """By what it takes; its outputs are summed over the ranks."""
    FIRST = auto()
    """Rank 0 alone holds it: added to an output that is summed, it must be added once."""


def shard_traits(traits: ModelTraits, decoder: DecoderTraits, count: int) -> ModelTraits:
    """What each of `count` ranks computes and caches: its heads. Raises `ModelRefused` for a model
    that cannot be shared out so."""
    if count == 1:
        return traits
    sizes = [
        (traits.num_heads, "attention heads"),
        (traits.num_kv_heads, "KV heads"),
        (decoder.intermediate_size, "intermediate elements"),
    ]
    if decoder.experts is not None:
        sizes.append((decoder.experts.intermediate_size, "intermediate elements of an expert"))
    for size, what in sizes:
        if size % count:
            raise ModelRefused(
                f"tensor_parallel_size is {count}, which does not divide the model's {size} {what}"
            )
    if decoder.head_norm == "all":
        raise ModelRefused(
            f"tensor_parallel_size is {count}, and this model normalises queries and keys over all "
            "heads, of which a rank has a part"
        )
    return replace(
        traits,
        num_heads=traits.num_heads // count,
        num_kv_heads=traits.num_kv_heads // count,
    )
