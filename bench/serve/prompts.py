"""The content of prompts: what a piece of a prompt is made of, as words or as token ids.

Invariant: the content of a piece depends on the seed and the piece's key only, and a shorter piece
is the beginning of a longer one of the same key. Pieces of different keys have nothing in common
but chance. So two prompts share exactly what their pieces share, on every machine and in every run.
The bytes behind the content are SHAKE-128 of seed and key.
"""

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

import numpy as np

_WORDS: tuple[str, ...] = tuple(json.loads((files("bench") / "serve" / "words.json").read_text()))
"""One for each value of a byte. Each is a single token in the usual byte-pair vocabularies, with
and without a space before it, so that words count tokens; what the server counts is reported."""

_FIRST_ORDINARY_ID = 1000
"""The lowest ids of a vocabulary are often special tokens, which a server may treat apart."""

Content = str | list[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens that any other piece of the same key shares."""

    key: str
    num_tokens: int


class Renderer(Protocol):
    """Turns pieces into what a request carries."""

    def render(self, pieces: tuple[Piece, ...]) -> Content: ...


@dataclass(frozen=True, slots=True)
class WordRenderer:
    """Pieces as words with a space between them."""

    seed: str

    def render(self, pieces: tuple[Piece, ...]) -> str:
        word = _WORDS.__getitem__
        return " ".join(
            " ".join(map(word, _content_bytes(self.seed, piece.key, piece.num_tokens)))
            for piece in pieces
            if piece.num_tokens
        )


@dataclass(frozen=True, slots=True)
class TokenIdRenderer:
    """Pieces as token ids below `vocab_size`, above the lowest ones."""

    seed: str
    vocab_size: int

    def render(self, pieces: tuple[Piece, ...]) -> list[int]:
        first = min(_FIRST_ORDINARY_ID, self.vocab_size // 2)
        ids: list[int] = []
        for piece in pieces:
            content = _content_bytes(self.seed, piece.key, 4 * piece.num_tokens)
            numbers = np.frombuffer(content, dtype="<u4")
            ids += (numbers % (self.vocab_size - first) + first).tolist()
        return ids


def _content_bytes(seed: str, key: str, count: int) -> bytes:
    return hashlib.shake_128(f"{seed}\0{key}".encode()).digest(count)
