"""What is shown depends on the tokens alone, and agrees with decoding and cutting the whole."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.postprocess import (
    Detokenizer,
    OutputDelta,
    OutputEnd,
    OutputRules,
    Postprocessor,
    StopMatcher,
)
from cluster.tokenizer import Tokenizer
from engine.wire import Finish, FinishReason, TokenItem, TokenLogprobs

_EOS = 2
_IDS = st.lists(
    st.one_of(
        st.integers(150, 300),  # mostly single bytes, most of them no character on their own
        st.integers(0, 49151),
    ),
    max_size=60,
)
_LENGTH = Finish(FinishReason.LENGTH)


def _items(ids: list[int], cuts: set[int], finish: Finish) -> list[TokenItem]:
    """The same output as items that end at `cuts`."""
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    spans = list(itertools.pairwise(bounds)) or [(0, 0)]
    return [
        TokenItem(
            request_id="r",
            attempt=0,
            offset=start,
            token_ids=tuple(ids[start:end]),
            finish=finish if end == len(ids) else None,
            logprobs=tuple(TokenLogprobs(-float(ids[i])) for i in range(start, end)),
        )
        for start, end in spans
    ]


def _run(
    tokenizer: Tokenizer, rules: OutputRules, items: list[TokenItem]
) -> tuple[str, list[int], OutputDelta, int]:
    output = Postprocessor(tokenizer, rules)
    text, tokens = "", []
    for item in items:
        delta = output.push(item)
        text += delta.text
        tokens += [token.token_id for token in delta.tokens]
        if delta.end is not None or delta.failure is not None:
            break
    return text, tokens, delta, output.num_tokens


def _detokenise(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=_IDS)
def test_pieces_join_to_the_whole_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(_detokenise(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text())
def test_valid_text_shows_no_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume("\ufffd" not in tokenizer.decode(ids))  # this vocabulary lacks a few bytes
    assert all("\ufffd" not in piece for piece in _detokenise(tokenizer, ids))


def test_emoji_and_cjk_over_several_tokens(tokenizer: Tokenizer) -> None:
    text = "Hi 👩‍👩‍👧 日本語 ñ"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    pieces = _detokenise(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces.count("") > 5
    # Cut inside the last character, the end is shown as what it is.
    assert "".join(_detokenise(tokenizer, ids[:4])) == tokenizer.decode(ids[:4])


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 👩‍👩‍👧\n\x00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_bytes_that_never_make_a_character_are_shown_in_linear_time(
    tokenizer: Tokenizer,
) -> None:
    continuation = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\x80")
    pieces = _detokenise(tokenizer, [continuation] * 5000)
    assert "".join(pieces) == "\ufffd" * 5000
    assert max(len(piece) for piece in pieces) < 8


@given(
    ids=_IDS,
    cuts=st.sets(st.integers(1, 60)),
    stops=st.lists(st.text("abe �\n", min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 20),
)
def test_grouping_changes_nothing(
    tokenizer: Tokenizer, ids: list[int], cuts: set[int], stops: list[str], min_tokens: int
) -> None:
    rules = OutputRules(tuple(stops), min_tokens, frozenset({_EOS}))
    whole = _run(tokenizer, rules, _items(ids, set(), _LENGTH))
    split = _run(tokenizer, rules, _items(ids, cuts, _LENGTH))
    assert (split[0], split[1], split[2].end, split[3]) == (
        whole[0],
        whole[1],
        whole[2].end,
        whole[3],
    )
    assert len(whole[1]) == whole[3]


def _expected(pieces: list[str], stops: list[str], min_pieces: int) -> tuple[str, bool, int]:
    """The definition: the first piece at whose end some stop, ending in it, is complete."""
    text = ""
    for index, piece in enumerate(pieces):
        old, text = len(text), text + piece
        if index + 1 < min_pieces:
            continue
        ends = [
            (end, end - len(stop))
            for stop in stops
            for end in range(max(old + 1, len(stop)), len(text) + 1)
            if text[end - len(stop) : end] == stop
        ]
        if ends:
            return text[: min(ends)[1]], True, index + 1
    return text, False, len(pieces)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    min_pieces=st.integers(0, 8),
)
def test_stop_matcher_against_its_definition(
    pieces: list[str], stops: list[str], min_pieces: int
) -> None:
    matcher = StopMatcher(stops)
    shown, stopped, count = "", False, 0
    for piece in pieces:
        count += 1
        new, stopped = matcher.push(piece, may_stop=count >= min_pieces)
        shown += new
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped, count) == _expected(pieces, stops, min_pieces)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("text <") == ("text ", False)
    assert matcher.push("/e") == ("", False)
    assert matcher.push("lse") == ("</else", False)
    assert matcher.push("</end") == ("", False)
    assert matcher.push("> and more") == ("", True)


def test_of_two_stop_strings_the_first_complete_wins_and_the_longer_of_a_tie() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", True)
    assert StopMatcher(["c", "abc"]).push("xabc") == ("x", True)


def test_usage_counts_the_token_that_completes_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One. Two. Three. Four.", add_special_tokens=False)
    text, tokens, delta, num_tokens = _run(
        tokenizer, OutputRules(("Three",)), _items(ids, set(), _LENGTH)
    )
    assert (text, delta.end) == ("One. Two. ", OutputEnd.STOP)
    assert "Three" in tokenizer.decode(tokens)
    assert "Three" not in tokenizer.decode(tokens[:-1])
    assert num_tokens == len(tokens) < len(ids)


def test_min_tokens_beats_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\n\n\na\n\nb\nc", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    text, _, delta, num_tokens = _run(
        tokenizer, OutputRules(("\n",), min_tokens=len(ids)), _items(ids, set(), _LENGTH)
    )
    assert (text, delta.end, num_tokens) == (whole, OutputEnd.LENGTH, len(ids))


def test_an_end_token_is_billed_and_not_shown(tokenizer: Tokenizer) -> None:
    """Also one that is no special token; the same token elsewhere is text."""
    (end,) = tokenizer.encode("!", add_special_tokens=False)
    ids = [*tokenizer.encode("Hi! there", add_special_tokens=False), end]
    rules = OutputRules(end_token_ids=frozenset({end}))
    text, _, delta, num_tokens = _run(
        tokenizer, rules, _items(ids, set(), Finish(FinishReason.STOP))
    )
    assert (text, delta.end, num_tokens) == ("Hi! there", OutputEnd.STOP, len(ids))
    assert _run(tokenizer, rules, _items(ids, set(), _LENGTH))[0] == "Hi! there!"


def test_a_stop_string_completed_by_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    text, _, delta, _ = _run(tokenizer, OutputRules(("world",)), _items(ids, set(), _LENGTH))
    assert (text, delta.end) == ("Hello ", OutputEnd.STOP)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_given_up_is_a_failure_and_keeps_its_text(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    ids = tokenizer.encode("some text", add_special_tokens=False)
    text, _, delta, _ = _run(tokenizer, OutputRules(), _items(ids, set(), Finish(reason, "why")))
    assert (text, delta.end, delta.failure) == ("some text", None, Finish(reason, "why"))
