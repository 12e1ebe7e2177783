"""Equal keys, equal content; and a word is a token."""

from hypothesis import given
from hypothesis import strategies as st

from bench.serve.prompts import _WORDS, Piece, TokenIdRenderer, WordRenderer
from cluster.tokenizer import Tokenizer
from engine.models.resolve import resolve_model

_KEYS = st.text(max_size=8)
_LENGTHS = st.integers(0, 300)


@given(_KEYS, _LENGTHS, _LENGTHS)
def test_a_shorter_piece_begins_a_longer_one(key: str, first: int, second: int) -> None:
    short, long = sorted((first, second))
    words = WordRenderer("7")
    all_words = words.render((Piece(key, long),)).split()
    assert len(all_words) == long
    assert words.render((Piece(key, short),)).split() == all_words[:short]
    ids = TokenIdRenderer("7", 5000)
    assert ids.render((Piece(key, short),)) == ids.render((Piece(key, long),))[:short]


@given(st.lists(st.tuples(_KEYS, _LENGTHS), max_size=5), st.integers(2, 1 << 20))
def test_lengths_and_ranges(keys: list[tuple[str, int]], vocab_size: int) -> None:
    pieces = tuple(Piece(key, length) for key, length in keys)
    total = sum(piece.num_tokens for piece in pieces)
    assert len(WordRenderer("1").render(pieces).split()) == total
    ids = TokenIdRenderer("1", vocab_size).render(pieces)
    assert len(ids) == total
    assert all(min(1000, vocab_size // 2) <= token_id < vocab_size for token_id in ids)


def test_seed_and_key_decide() -> None:
    texts = {
        WordRenderer(seed).render((Piece(key, 20),)) for seed in ("1", "2") for key in ("a", "b")
    }
    assert len(texts) == 4
    assert WordRenderer("1").render((Piece("a", 6),)) == "were who large old body peace"


def test_words_are_single_tokens() -> None:
    assert len(set(_WORDS)) == 256
    tokenizer = Tokenizer.load(resolve_model("default"))
    text = WordRenderer("3").render((Piece("a", 500), Piece("b", 500)))
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 1000
