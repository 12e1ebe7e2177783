"""When requests go out: pacing, turns, limits and stops."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.serve.client import Client, Target
from bench.serve.dialect import BodyOptions
from bench.serve.load import Load, LoadResult, Pacing
from bench.serve.prompts import WordRenderer
from bench.serve.records import INTERRUPTED
from bench.serve.workloads import (
    Conversation,
    Lengths,
    arriving,
    multi_turn,
    random_prompts,
    take_requests,
)
from tests.bench.serve.scripted import (
    DONE,
    HEAD,
    Respond,
    ScriptedServer,
    chunked,
    content,
    plain,
    scripted,
    usage,
    whole_answer,
)

_LENGTHS = Lengths(8, 2)


def _run(
    conversations: Iterator[Conversation],
    pacing: Pacing,
    respond: Respond = whole_answer,
    stop_after_s: float | None = None,
) -> tuple[LoadResult, ScriptedServer]:
    async def run() -> tuple[LoadResult, ScriptedServer]:
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        async with scripted(respond) as server:
            with Client(Target(server.url)) as client:
                load = Load(client, WordRenderer("1"), BodyOptions("chat", "m"), pacing)
                result = await load.run(conversations, stop)
            assert load.running == 0
            assert load.done + load.failed == len(result.records)
            return result, server

    return asyncio.run(run())


class _Slow:
    """Answers after `delay_s`, and sees how many it has at a time."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.now = 0
        self.most = 0

    async def __call__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        await whole_answer(body, writer)


def _requests(count: int) -> Iterator[Conversation]:
    return take_requests(random_prompts(_LENGTHS, 1), count)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    slow = _Slow(0.02)
    result, server = _run(_requests(20), Pacing(concurrency=4), slow)
    assert (len(result.records), slow.most) == (20, 4)
    assert not result.interrupted
    assert server.num_connections == 4
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    expected = [WordRenderer("1").render(c.turns[0].pieces) for c in _requests(20)]
    assert sorted(prompts) == sorted(expected)
    assert all(record.asked_input_tokens == 8 for record in result.records)


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """Three requests due at once, then a client that is held up for 0.2 s."""
    held_up = False

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal held_up
        if not held_up:
            held_up = True
            time.sleep(0.2)  # Holds up the client too: one event loop has both.
        await whole_answer(body, writer)

    offsets_s = [0.0, 0.05, 0.1]
    result, _ = _run(arriving(_requests(3), offsets_s), Pacing(concurrency=None), respond)
    assert [record.scheduled_s for record in result.records] == offsets_s
    for record in result.records[1:]:
        assert record.sent_s > 0.19
        assert record.ttft_s is not None
        assert record.ttft_s > 0.09
    assert result.client.lag_max_s > 0.1


def test_an_open_loop_does_not_wait_for_answers() -> None:
    slow = _Slow(0.5)
    offsets_s = [0.01 * number for number in range(10)]
    result, _ = _run(arriving(_requests(10), offsets_s), Pacing(concurrency=None), slow)
    assert slow.most == 10
    assert all(record.failure is None for record in result.records)
    lags_s = [record.sent_s - record.scheduled_s for record in result.records]
    assert min(lags_s) >= 0


def test_turns_follow_one_another_with_the_real_answers() -> None:
    conversations = take_requests(multi_turn(_LENGTHS, 4, 3, seed=1), 6)
    result, server = _run(conversations, Pacing(concurrency=1, think_s=0.03))
    assert len(result.records) == 6
    first, second, third = (body["messages"] for body in server.bodies[:3])
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in third] == [
        *("system", "user", "assistant", "user", "assistant", "user")
    ]
    assert second[:2] == first
    assert third[:4] == second
    assert second[2]["content"] == third[4]["content"] == "Hello you"
    assert [record.asked_input_tokens for record in result.records[:3]] == [12, 22, 32]
    for before, after in itertools.pairwise(result.records[:3]):
        assert before.end_s is not None
        assert after.scheduled_s - before.end_s >= 0.03


def test_a_failed_turn_ends_its_conversation() -> None:
    async def refuse(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(plain(503, b"{}"))

    conversations = take_requests(multi_turn(_LENGTHS, 0, 3, seed=1), 6)
    result, _ = _run(conversations, Pacing(concurrency=2), refuse)
    assert [record.failure for record in result.records] == ["status_503"] * 2


@pytest.mark.parametrize("is_open", [False, True])
def test_a_duration_begins_nothing_new_and_waits_for_the_rest(is_open: bool) -> None:
    conversations: Iterator[Conversation] = random_prompts(_LENGTHS, 1)
    if is_open:
        conversations = arriving(conversations, itertools.count(0.0, 0.04))
    pacing = Pacing(concurrency=None if is_open else 2, duration_s=0.2)
    result, _ = _run(conversations, pacing, _Slow(0.09))
    assert len(result.records) in ([5] if is_open else range(3, 7))
    assert all(record.failure is None for record in result.records)
    assert all(record.scheduled_s < 0.2 for record in result.records)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_stop_keeps_what_there_is(is_open: bool) -> None:
    async def stream(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(content("a")))
        await asyncio.sleep(30 if len(started) else 0)
        started.append(1)
        writer.write(chunked(content("b") + usage(3, 2) + DONE) + b"0\r\n\r\n")

    started: list[int] = []
    conversations: Iterator[Conversation] = random_prompts(_LENGTHS, 1)
    if is_open:
        conversations = arriving(conversations, itertools.count(0.0, 0.1))
    pacing = Pacing(concurrency=None if is_open else 1)
    result, _ = _run(conversations, pacing, stream, stop_after_s=0.35)
    assert result.interrupted
    failures = [record.failure for record in result.records]
    assert failures[0] is None
    assert set(failures[1:]) == {INTERRUPTED}
