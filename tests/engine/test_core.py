"""EngineCore over real sockets, through its client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from configs.engine import EngineConfig, SchedulerConfig
from engine import wire
from engine.attempt import EngineRequest, EngineStream
from engine.client import EngineClient
from engine.errors import EngineLost, RequestRejected
from engine.launcher import LocalEngine
from engine.wire import FinishReason, SamplingParams
from tests.engine.rig import reference_output, running_engine, simulated_config, wait_until
from tests.engine.wire_rig import collect, with_client


def test_a_hundred_streams_at_once_are_each_the_models_own() -> None:
    config = simulated_config(num_blocks=64)

    async def use(client: EngineClient) -> None:
        async def one(number: int) -> None:
            params = SamplingParams(max_tokens=20, seed=number)
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, number]
            output, finish = await collect(await client.add(EngineRequest(prompt, params)))
            assert output == reference_output(prompt, params, config.simulation)
            assert finish == wire.Finish(FinishReason.LENGTH)

        await asyncio.gather(*(one(number) for number in range(100)))

    with running_engine(config) as core:
        with_client(core, use)
        assert core.stats()["preemptions"] > 0
        assert core.stats()["held_blocks"] == 0


def test_a_request_moved_half_way_goes_on_with_the_next_token() -> None:
    params = SamplingParams(max_tokens=12, seed=3)

    async def use(client: EngineClient) -> None:
        whole, _ = await collect(await client.add(EngineRequest([5, 6, 7], params)))
        rest = await client.add(EngineRequest([5, 6, 7], params, attempt=1, output_ids=whole[:5]))
        items = [item async for item in rest]
        assert items[0].offset == 5
        assert [token for item in items for token in item.token_ids] == whole[5:]

    with running_engine() as core:
        with_client(core, use)


def test_an_abort_frees_everything_and_others_go_on() -> None:
    async def use(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=500)
        gone = await client.add(EngineRequest([1, 2, 3], params))
        stays = await client.add(EngineRequest([4, 5, 6], params))
        await anext(gone)
        gone.abort()
        gone.abort()
        output, _ = await collect(stays)
        assert len(output) == 500
        assert len([item async for item in gone]) < 500

    with running_engine() as core:
        with_client(core, use)
        wait_until(lambda: core.is_idle and core.stats()["held_blocks"] == 0)


def test_the_client_follows_the_cache_and_the_load() -> None:
    async def use(client: EngineClient) -> None:
        await collect(await client.add(EngineRequest(range(40), SamplingParams(max_tokens=9))))
        # 40 tokens in and 9 out: all but the last are computed, which fills 12 blocks.
        while client.follower is None or len(client.follower.keys) != 48 // 4:
            await asyncio.sleep(0.02)
        assert client.follower.in_sync
        while client.follower.load is None or client.follower.load.seen != {client.ingress_id: 1}:
            await asyncio.sleep(0.02)
        assert client.follower.load.running == 0

    with running_engine() as core:
        with_client(core, use)


def test_output_that_overlaps_is_trimmed_and_a_hole_is_a_failure() -> None:
    async def use(client: EngineClient) -> None:
        stream = EngineStream(client, EngineRequest([1], SamplingParams(), request_id="x"))
        client._streams["x"] = stream
        stream.put(wire.TokenItem("x", 0, 0, (10, 11)))
        stream.put(wire.TokenItem("x", 0, 1, (11, 12)))
        stream.put(wire.TokenItem("x", 0, 0, (10,)))
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(10, 11), (12,)]
        stream.put(wire.TokenItem("x", 0, 4, (14,)))
        with pytest.raises(EngineLost, match="gap"):
            await anext(stream)

    with running_engine() as core:
        with_client(core, use)


def test_when_the_engine_stops_its_streams_say_so() -> None:
    with running_engine(simulated_config(step_s=0.01)) as core:

        async def use(client: EngineClient) -> None:
            stream = await client.add(EngineRequest([1], SamplingParams(max_tokens=500)))
            await anext(stream)
            core.stop()
            with pytest.raises(EngineLost, match="stopping"):
                await collect(stream)
            with pytest.raises(EngineLost):
                await client.add(EngineRequest([1], SamplingParams()))

        with_client(core, use)


def test_a_client_finds_the_engine_that_came_after(tmp_path: Path) -> None:
    config = simulated_config(listen=f"ipc://{tmp_path}/engine")

    async def ask(client: EngineClient) -> int:
        await collect(await client.add(EngineRequest([1], SamplingParams(max_tokens=2))))
        assert client.info is not None
        return client.info.incarnation

    async def run() -> None:
        with running_engine(config) as core:
            client = await EngineClient.connect(core.endpoint)
            first = await ask(client)
        with running_engine(config):
            while client.info is None or client.info.incarnation == first:
                await asyncio.sleep(0.05)
            assert await ask(client) != first
            await client.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_killed_engine_is_noticed_by_its_broken_connection() -> None:
    config = simulated_config(lease_s=60, step_s=0.01)

    async def run(engine: LocalEngine) -> None:
        async with await EngineClient.connect(engine.endpoint) as client:
            stream = await client.add(EngineRequest([1], SamplingParams(max_tokens=900)))
            await anext(stream)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="has broken"):
                await asyncio.wait_for(collect_rest(stream), 2)

    async def collect_rest(stream: EngineStream) -> None:
        async for _ in stream:
            pass

    with LocalEngine.start(config) as engine:
        asyncio.run(run(engine))


def test_an_engine_that_is_told_to_end_while_it_loads_loads_no_further() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(EngineConfig().model_dump_json() + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"phase": "torch"}
        process.terminate()
        assert process.stdout.read() == ""
    assert process.returncode == 0


def test_no_engine_is_an_error_that_names_the_address() -> None:
    with pytest.raises(EngineLost, match=r"tcp://127\.0\.0\.1:9: no answer"):
        asyncio.run(EngineClient.connect("tcp://127.0.0.1:9", timeout_s=0.2))


def test_settings_change_between_two_steps() -> None:
    async def use(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=200)
        core.configure(SchedulerConfig(max_num_seqs=2))
        streams = [await client.add(EngineRequest([n, 2, 3], params)) for n in range(5)]
        await anext(streams[0])
        assert core.stats()["running"] == 2
        core.configure(SchedulerConfig(max_num_seqs=4))
        assert [len(await collect_rest(stream)) for stream in streams[1:]] == [200] * 4

    async def collect_rest(stream: EngineStream) -> list[int]:
        return [token async for item in stream for token in item.token_ids]

    with running_engine() as core:
        with_client(core, use)
        assert core.stats()["max_num_seqs"] == 4


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing_new() -> None:
    async def use(client: EngineClient) -> None:
        stream = await client.add(EngineRequest([1, 2, 3], SamplingParams(max_tokens=300)))
        await anext(stream)
        core.drain()
        wait_until(lambda: bool(core.stats()["is_draining"]))
        with pytest.raises(RequestRejected) as refusal:
            await client.add(EngineRequest([4, 5, 6], SamplingParams(max_tokens=4)))
        assert refusal.value.code is wire.RejectCode.DRAINING
        items = [item async for item in stream]
        assert items[-1].finish == wire.Finish(FinishReason.LENGTH)

    with running_engine() as core:
        with_client(core, use)
        assert core.is_idle
