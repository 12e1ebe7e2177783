"""What is asked: conversations of one or more turns, as structure without content.

Invariant: a workload is a pure function of its specification: the same one yields the same
conversations, wherever and however often it is asked, and yields them lazily, so that an endless
one can be cut by a count or by the clock. Which tokens requests share is stated by the keys of
their pieces (`prompts.py`), never left to chance.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bench.serve.prompts import Piece
from bench.serve.traces import BLOCK_TOKENS, TraceEntry


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the user says, after the answers so far, and how much is to come back."""

    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        """Of this turn alone."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another; each prompt is all that was said before."""

    turns: tuple[Turn, ...]
    system: tuple[Piece, ...] = ()
    offset_s: float | None = None
    """When it begins, in seconds from the start; None where the workload doesn't say."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of new input and of output, in tokens; each is drawn uniformly from
    `[n * (1 - spread), n * (1 + spread)]`, at least 1."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def draw(self, source: random.Random) -> tuple[int, int]:
        return self._one(source, self.input_tokens), self._one(source, self.output_tokens)

    def _one(self, source: random.Random, center: int) -> int:
        low = max(1, round(center * (1 - self.spread)))
        return source.randint(low, max(low, round(center * (1 + self.spread))))


def random_prompts(lengths: Lengths, seed: int) -> Iterator[Conversation]:
    """Prompts that share nothing."""
    source = random.Random(f"random/{seed}")
    for number in itertools.count():
        input_tokens, output_tokens = lengths.draw(source)
        turn = Turn((Piece(f"random/{number}", input_tokens),), output_tokens)
        yield Conversation((turn,))


def shared_prefixes(
    lengths: Lengths, shared_tokens: int, groups: int, users: int, seed: int
) -> Iterator[Conversation]:
    """Each group has a system prompt of `shared_tokens`; its users ask questions of their own.

    In each round every user of every group asks once, in an order drawn anew; no question is ever
    asked twice, so that the system prompt is all there is to find in a cache."""
    source = random.Random(f"shared-prefix/{seed}")
    everyone = [(group, user) for group in range(groups) for user in range(users)]
    for round_number in itertools.count():
        for group, user in source.sample(everyone, len(everyone)):
            input_tokens, output_tokens = lengths.draw(source)
            question = Piece(f"question/{group}/{user}/{round_number}", input_tokens)
            system = (Piece(f"group/{group}", shared_tokens),)
            yield Conversation((Turn((question,), output_tokens),), system)


def multi_turn(
    lengths: Lengths, shared_tokens: int, turns: int, seed: int
) -> Iterator[Conversation]:
    """Conversations of `turns` turns under one system prompt of `shared_tokens` (none when 0)."""
    source = random.Random(f"multi-turn/{seed}")
    system = (Piece("system", shared_tokens),) if shared_tokens else ()
    for number in itertools.count():
        said = []
        for turn in range(turns):
            input_tokens, output_tokens = lengths.draw(source)
            said.append(Turn((Piece(f"turn/{number}/{turn}", input_tokens),), output_tokens))
        yield Conversation(tuple(said), system)


def from_trace(entries: Iterable[TraceEntry], time_scale: float) -> Iterator[Conversation]:
    """A request an entry, at its time after the first one, times `time_scale`.

    Blocks of equal hash id have equal content; what no hash id covers is the request's own."""
    first_s: float | None = None
    for number, entry in enumerate(entries):
        first_s = entry.timestamp_s if first_s is None else first_s
        pieces, left = [], entry.input_tokens
        for hash_id in entry.hash_ids:
            if not left:
                break
            pieces.append(Piece(f"block/{hash_id}", min(BLOCK_TOKENS, left)))
            left -= pieces[-1].num_tokens
        if left:
            pieces.append(Piece(f"own/{number}", left))
        offset_s = (entry.timestamp_s - first_s) * time_scale
        yield Conversation((Turn(tuple(pieces), entry.output_tokens),), offset_s=offset_s)


def take_requests(
    conversations: Iterable[Conversation], num_requests: int | None
) -> Iterator[Conversation]:
    """The first conversations, with `num_requests` turns in all: the last one may be cut short."""
    left = num_requests
    for conversation in conversations:
        if left is None:
            yield conversation
            continue
        if left <= 0:
            return
        yield replace(conversation, turns=conversation.turns[:left])
        left -= len(conversation.turns)


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive; all of them at 0 when the rate is
    infinite."""
    source = random.Random(f"arrivals/{seed}")
    offset_s = 0.0
    while True:
        yield offset_s
        offset_s += source.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0


def arriving(
    conversations: Iterable[Conversation], offsets_s: Iterable[float]
) -> Iterator[Conversation]:
    """The conversations at these times instead of their own."""
    for offset_s, conversation in zip(offsets_s, conversations, strict=False):
        yield replace(conversation, offset_s=offset_s)
