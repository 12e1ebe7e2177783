"""A stream outlives its engine: what was delivered stays, and what follows is what would have."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.errors import failure_of
from cluster.generation import Usage
from cluster.placing import RequestCondemned
from engine.errors import EngineLost
from engine.wire import SamplingParams
from replicas.directory import EngineState
from tests.cluster.failover_rig import (
    POISON,
    SIMULATION,
    Output,
    Pool,
    read,
    read_some,
    serving,
    where,
)
from tests.engine.rig import reference_output


def with_engines(
    *names: str, **simulation: Any
) -> Callable[[Callable[[Pool], Awaitable[None]]], Callable[[], None]]:
    """Runs a test on engines of these names; afterwards nothing may be left of it."""

    def decorate(test: Callable[[Pool], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            async with serving(*names, **simulation) as pool:
                await test(pool)
                await pool.assert_idle()

        # Not `wraps`, whose signature pytest would take for fixtures.
        def synchronous() -> None:
            asyncio.run(run())

        synchronous.__name__ = test.__name__
        synchronous.__doc__ = test.__doc__
        return synchronous

    return decorate


@with_engines("a", "b", "c")
async def test_a_killed_engine_costs_no_token(pool: Pool) -> None:
    prompts = [[number + 1, 2, 3, 4, 5] for number in range(12)]
    started = [await pool.start(prompt) for prompt in prompts]
    assert len(set().union(*map(where, started))) > 1
    first = [await read_some(one.generation, 5) for one in started]
    (victim,) = where(started[0])
    pool.kill(victim)
    outputs = await asyncio.gather(
        *(read(one.generation, had) for one, had in zip(started, first, strict=True))
    )
    for prompt, one, output in zip(prompts, started, outputs, strict=True):
        assert output.tokens[0] == pool.expected(prompt)
        assert one.generation.usage == Usage(5, 100, 0)
    assert pool.model.placer.counts["resumed"] >= 1


@with_engines("a", "b")
async def test_a_hung_engine_is_left_when_its_lease_runs_out(pool: Pool) -> None:
    started = await pool.start([1, 2, 3])
    output = await read_some(started.generation, 5)
    (victim,) = where(started)
    pool.kill(victim, signal.SIGSTOP)
    await read(started.generation, output)
    assert output.tokens[0] == pool.expected([1, 2, 3])
    # It wakes, and must find that nobody wants what it had.
    pool.kill(victim, signal.SIGCONT)
    await pool.ready(2)


@with_engines("a", "b")
async def test_a_stalled_engine_is_left_at_once(pool: Pool) -> None:
    started = await pool.start([1, 2, 3], 400)
    output = await read_some(started.generation, 5)
    (victim,) = where(started)
    pool.kill(victim, signal.SIGSTOP)
    began_s = time.monotonic()
    pool.say(victim, EngineState.STALLED)
    while len(output.tokens[0]) < 40:
        output.add(*(await started.generation.next_delta()))  # type: ignore[misc]
    assert time.monotonic() - began_s < 0.6
    assert where(started) != {victim}
    assert where(await _asked(pool)) == where(started)
    pool.kill(victim, signal.SIGCONT)
    await read(started.generation, output)
    assert output.tokens[0] == pool.expected([1, 2, 3], 400)


async def _asked(pool: Pool) -> Any:
    started = await pool.start([9], 2)
    await read(started.generation)
    return started


@with_engines("a", "b")
async def test_what_runs_moves_off_an_engine_that_drains(pool: Pool) -> None:
    """However many deaths it may survive: this is none."""
    pool.set(max_failovers=0)
    started = [await pool.start([number + 1, 5], 600) for number in range(8)]
    outputs = [await read_some(one.generation, 3) for one in started]
    (victim,) = where(started[0])
    reading = asyncio.gather(
        *(read(one.generation, had) for one, had in zip(started, outputs, strict=True))
    )
    pool.say(victim, EngineState.DRAINING)
    await pool.until(lambda: all(victim not in where(one) for one in started), 2)
    pool.kill(victim)
    for number, output in enumerate(await reading):
        assert output.tokens[0] == pool.expected([number + 1, 5], 600)
    assert pool.model.placer.counts.keys() == {"moved"}


@with_engines("a")
async def test_it_stays_while_there_is_nowhere_to_go(pool: Pool) -> None:
    started = await pool.start([1, 2], 500)
    output = await read_some(started.generation, 3)
    reading = asyncio.ensure_future(read(started.generation, output))
    pool.say("a", EngineState.DRAINING)
    had = len(output.tokens[0])
    await pool.until(lambda: len(output.tokens[0]) > had + 20)
    assert where(started) == {"a"}
    await pool.begin("b")
    await pool.until(lambda: where(started) == {"b"}, 2)
    assert (await reading).tokens[0] == pool.expected([1, 2], 500)


@with_engines("a", "b")
async def test_choices_logprobs_and_usage_go_on(pool: Pool) -> None:
    fields: dict[str, Any] = {"num_choices": 3, "sampling": SamplingParams(logprobs=2)}
    prompt = list(range(1, 21))
    undisturbed = await pool.ask(prompt, **fields)
    started = await pool.start(prompt, name="again", **fields)
    output = await read_some(started.generation, 12)
    cached_tokens = started.generation.usage.cached_tokens
    pool.kill(*where(started))
    await read(started.generation, output)
    for choice in range(3):
        assert output.tokens[choice] == pool.expected(prompt, choice=choice)
        assert output.logprobs[choice] == undisturbed.logprobs[choice]
    # Not what was computed again elsewhere.
    assert started.generation.usage == Usage(20, 300, cached_tokens)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_over_the_place_of_failover(cut: int) -> None:
    """Held back when the engine dies, and found where the next one goes on."""

    async def use() -> None:
        async with serving("a", "b") as pool:
            whole = await pool.ask([1, 2, 3])
            text = whole.texts[0]
            at = next(i for i in range(20, 60) if text.find(text[i : i + 4]) == i)
            stop = text[at : at + 4]
            started = await pool.start([1, 2, 3], stops=(stop,), name="stopped")
            output = await read_some(started.generation, at + cut)
            assert output.texts[0] == text[:at]
            pool.kill(*where(started))
            await read(started.generation, output)
            assert output.texts[0] == text[:at]
            assert output.tokens[0] == whole.tokens[0][: at + 4]
            assert started.generation.usage.completion_tokens == at + 4
            await pool.assert_idle()

    asyncio.run(use())


@with_engines("a", "b", "c", "d")
async def test_a_poisoned_request_kills_two_engines_and_nobody_else(pool: Pool) -> None:
    good = [[number, number, 3] for number in range(1, 31)]
    started = [await pool.start(prompt, 200) for prompt in good]
    reading = [asyncio.ensure_future(read(one.generation)) for one in started]
    await asyncio.sleep(0.2)
    poisoned = asyncio.ensure_future(pool.ask([5, POISON, 6], 200, name="poisoned"))
    with pytest.raises(RequestCondemned) as condemned:
        await poisoned
    assert failure_of(condemned.value).status == 500
    assert "two engines died" in failure_of(condemned.value).message
    outputs = await asyncio.gather(*reading)
    for prompt, output in zip(good, outputs, strict=True):
        assert output.tokens[0] == pool.expected(prompt, 200)
    assert await pool.num_dead() == 2


def test_poison_that_comes_late_and_in_one_choice_kills_three() -> None:
    """The token that kills is one that the request itself draws, after it has run well."""
    prompt, num_choices = [11, 12], 3
    drawn = [
        reference_output(prompt, SamplingParams(max_tokens=60, seed=7, choice=choice), SIMULATION)
        for choice in range(num_choices)
    ]
    others = {*drawn[0], *drawn[1][:30], *drawn[2]}
    poison = next(token for token in drawn[1][30:50] if token not in others)

    async def use() -> None:
        async with serving("a", "b", "c", "d", poison_token_id=poison) as pool:
            started = await pool.start(prompt, 60, num_choices=num_choices)
            with pytest.raises(RequestCondemned):
                await read(started.generation)
            assert await pool.num_dead() == 3
            await pool.assert_idle()

    asyncio.run(use())


@with_engines("a", "b", "c", "d")
async def test_a_third_death_is_one_too_many(pool: Pool) -> None:
    started = await pool.start([1, 2, 3], 2000)
    output = Output()
    for _ in range(2):
        pool.kill(*where(started))
        for _ in range(10):
            output.add(*(await started.generation.next_delta()))  # type: ignore[misc]
    assert output.tokens[0] == pool.expected([1, 2, 3], 2000)[: len(output.tokens[0])]
    pool.kill(*where(started))
    with pytest.raises(EngineLost, match="3 engines ended under a request"):
        await read(started.generation)


@with_engines("a")
async def test_the_last_engine_is_waited_for(pool: Pool) -> None:
    started = await pool.start([1, 2, 3])
    output = await read_some(started.generation, 5)
    pool.kill("a")
    reading = asyncio.ensure_future(read(started.generation, output))
    await pool.until(lambda: pool.model.num_held == 1)
    assert not reading.done()
    assert len(pool.model.router.index) == 0, "its blocks are gone with it"
    await pool.begin("a")
    assert (await reading).tokens[0] == pool.expected([1, 2, 3])


@with_engines("a")
async def test_none_comes_and_the_stream_fails_in_time(pool: Pool) -> None:
    pool.set(hold_s=0.3)
    started = await pool.start([1, 2, 3])
    await read_some(started.generation, 5)
    pool.kill("a")
    with pytest.raises(EngineLost, match="has broken"):
        await read(started.generation)


@with_engines("a", "b")
async def test_a_client_that_leaves_meanwhile_leaves_nothing(pool: Pool) -> None:
    started = [await pool.start([number + 1], 500, num_choices=2) for number in range(6)]
    for one in started:
        await read_some(one.generation, 4)
    pool.kill("a")
    pool.kill("b")
    reading = [asyncio.ensure_future(read(one.generation)) for one in started]
    await pool.until(lambda: pool.model.num_held == 12)
    for one in reading[:3]:
        one.cancel()
    await pool.until(lambda: pool.model.num_held == 6)
    await pool.begin("a")
    await asyncio.sleep(0.03)
    for one in reading[3:]:
        one.cancel()
    await asyncio.gather(*reading, return_exceptions=True)


@with_engines("a", "b")
async def test_an_engine_that_is_taken_out_is_not_chosen_from_then_on(pool: Pool) -> None:
    started = await pool.start([1, 2, 3], 300)
    output = await read_some(started.generation, 5)
    (gone,) = where(started)
    entry = pool.entries.pop(gone)
    pool.update()
    after = await pool.start([1, 2, 3], 300, name="after")
    assert where(after) == set(pool.entries)
    for one, had in ((started, output), (after, None)):
        assert (await read(one.generation, had)).tokens[0] == pool.expected([1, 2, 3], 300)
    pool.entries[gone] = entry


@with_engines("a", "b")
async def test_it_can_be_switched_off(pool: Pool) -> None:
    pool.set(enabled=False)
    started = await pool.start([1, 2, 3])
    await read_some(started.generation, 5)
    pool.kill(*where(started))
    with pytest.raises(EngineLost, match="has broken"):
        await read(started.generation)
