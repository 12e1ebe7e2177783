"""Conversations of the stated shape, the same every time."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serve.prompts import Piece, WordRenderer
from bench.serve.traces import TraceEntry
from bench.serve.workloads import (
    Conversation,
    Lengths,
    arriving,
    from_trace,
    multi_turn,
    poisson_arrivals,
    random_prompts,
    shared_prefixes,
    take_requests,
)

_LENGTHS = Lengths(100, 20, 0.5)


@pytest.mark.parametrize(
    "workload",
    [
        lambda seed: random_prompts(_LENGTHS, seed),
        lambda seed: shared_prefixes(_LENGTHS, 50, 4, 3, seed),
        lambda seed: multi_turn(_LENGTHS, 50, 3, seed),
    ],
)
def test_deterministic_and_lengths_in_range(
    workload: Callable[[int], Iterator[Conversation]],
) -> None:
    first, again, other = (list(itertools.islice(workload(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    turns = [turn for conversation in first for turn in conversation.turns]
    assert all(50 <= turn.input_tokens <= 150 for turn in turns)
    assert all(10 <= turn.output_tokens <= 30 for turn in turns)
    assert len({turn.input_tokens for turn in turns}) > 10
    own = [piece.key for turn in turns for piece in turn.pieces]
    assert len(set(own)) == len(own), "what is a request's own is never asked twice"


@given(st.integers(1, 5000), st.floats(0, 1), st.integers())
def test_lengths(center: int, spread: float, seed: int) -> None:
    drawn, output = Lengths(center, 10, spread).draw(random.Random(seed))
    assert max(1, round(center * (1 - spread))) <= drawn <= max(1, round(center * (1 + spread)))
    assert 1 <= output <= 20


def test_shared_prefixes_are_equal_text() -> None:
    conversations = list(itertools.islice(shared_prefixes(Lengths(30, 5), 200, 3, 4, seed=1), 24))
    render = WordRenderer("1").render
    systems = [render(conversation.system) for conversation in conversations]
    assert all(len(system.split()) == 200 for system in systems)
    counts = {system: systems.count(system) for system in systems}
    assert sorted(counts.values()) == [8, 8, 8], "two rounds of three groups with four users"
    first_round = {conversation.turns[0].pieces[0].key for conversation in conversations[:12]}
    assert first_round == {f"question/{g}/{u}/0" for g in range(3) for u in range(4)}
    questions = {render(conversation.turns[0].pieces) for conversation in conversations}
    assert len(questions) == 24


def test_multi_turn_shares_only_its_system_prompt() -> None:
    first, second = itertools.islice(multi_turn(Lengths(30, 5), 64, 3, seed=1), 2)
    assert first.system == second.system == (Piece("system", 64),)
    assert len(first.turns) == 3
    assert next(multi_turn(Lengths(30, 5), 0, 3, seed=1)).system == ()


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(0, 60))
def test_take_requests(sizes: list[int], limit: int) -> None:
    conversations = [next(multi_turn(Lengths(3, 3), 0, size, 1)) for size in sizes]
    taken = list(take_requests(conversations, limit))
    assert sum(len(conversation.turns) for conversation in taken) == min(limit, sum(sizes))
    assert all(conversation.turns for conversation in taken)
    assert list(take_requests(conversations, None)) == conversations


def test_poisson_arrivals() -> None:
    offsets_s = list(itertools.islice(poisson_arrivals(20.0, seed=3), 4001))
    assert offsets_s == list(itertools.islice(poisson_arrivals(20.0, seed=3), 4001))
    gaps_s = [after - before for before, after in itertools.pairwise(offsets_s)]
    assert offsets_s[0] == 0
    assert sum(gaps_s) / 4000 == pytest.approx(1 / 20, rel=0.05)
    # Of an exponential distribution, deviation equals mean, and e^-1 lies beyond it.
    assert sum(gap_s > 1 / 20 for gap_s in gaps_s) / 4000 == pytest.approx(0.368, abs=0.03)
    assert list(itertools.islice(poisson_arrivals(float("inf"), 1), 3)) == [0, 0, 0]
    at = arriving(random_prompts(_LENGTHS, 1), offsets_s)
    assert [conversation.offset_s for conversation in at] == offsets_s


def test_a_trace_repeats_its_blocks_exactly() -> None:
    entries = [
        TraceEntry(10.0, 1200, 7, (4, 5, 6)),
        TraceEntry(10.5, 1100, 8, (4, 5, 9)),
        TraceEntry(12.0, 600, 9, (4,)),
        TraceEntry(12.0, 40, 9),
    ]
    conversations = list(from_trace(entries, time_scale=0.5))
    assert [conversation.offset_s for conversation in conversations] == [0, 0.25, 1.0, 1.0]
    words = [WordRenderer("1").render(c.turns[0].pieces).split() for c in conversations]
    assert [len(prompt) for prompt in words] == [1200, 1100, 600, 40]
    assert words[0][:1024] == words[1][:1024]
    assert words[0][1024:1034] != words[1][1024:1034]
    assert words[2][:512] == words[0][:512]
    assert words[2][512:522] != words[0][512:522], "past its blocks a prompt is its own"
