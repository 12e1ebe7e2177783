"""EngineCore over real sockets: its client, and peers that misbehave."""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from engine import wire
from engine.attempt import EngineRequest, EngineStream
from engine.client import EngineClient
from engine.core import EngineCore
from engine.errors import EngineLost, RequestRejected
from engine.executors.simulated import SimulatedExecutor
from engine.launcher import LocalEngine
from engine.plan import StepPlan, StepResult
from engine.wire import FinishReason, RefuseCode, RejectCode, SamplingParams
from tests.engine.rig import reference_output, running_engine, simulated_config, wait_until


class RawPeer:
    """A DEALER that sends whatever it is told."""

    def __init__(self, endpoint: str, ingress_id: str = "raw", receive_limit: int = 1000) -> None:
        self.ingress_id = ingress_id
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, ingress_id.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_limit)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    def ask(self, frame: bytes | wire.Message) -> wire.ToIngress:
        self.tell(frame)
        return wire.decode_to_ingress(self.socket.recv())

    def tell(self, frame: bytes | wire.Message) -> None:
        self.socket.send(frame if isinstance(frame, bytes) else wire.encode(frame))

    def hello(self) -> wire.HelloReply:
        reply = self.ask(wire.Hello(wire.WIRE_VERSION, self.ingress_id))
        assert isinstance(reply, wire.HelloReply)
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def peer_and_core() -> Iterator[tuple[RawPeer, EngineCore]]:
    with running_engine(simulated_config(max_message_bytes=4096)) as core:
        peer = RawPeer(core.endpoint)
        yield peer, core
        peer.close()


def add_request(incarnation: int, **changes: object) -> wire.AddRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": 0,
        "number": 1,
        "incarnation": incarnation,
        "prompt_ids": (1, 2, 3),
        "sampling": SamplingParams(max_tokens=4),
    }
    return wire.AddRequest(**{**fields, **changes})  # type: ignore[arg-type]


def with_client(
    core: EngineCore, use: Callable[[EngineClient], Awaitable[None]], timeout_s: float = 30
) -> None:
    async def run() -> None:
        async with asyncio.timeout(timeout_s), await EngineClient.connect(core.endpoint) as client:
            await use(client)

    asyncio.run(run())


async def collect(stream: EngineStream) -> tuple[list[int], wire.Finish | None]:
    output: list[int] = []
    finish = None
    async for item in stream:
        assert item.offset == len(output)
        output += item.token_ids
        finish = item.finish
    return output, finish


# ------------------------------------------------------------------ the client


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


def test_no_engine_is_an_error_that_names_the_address() -> None:
    with pytest.raises(EngineLost, match=r"tcp://127\.0\.0\.1:9: no answer"):
        asyncio.run(EngineClient.connect("tcp://127.0.0.1:9", timeout_s=0.2))


# ------------------------------------------------------------------ requests that are refused


@pytest.mark.parametrize(
    ("sampling", "prompt", "code", "text"),
    [
        (SamplingParams(max_tokens=1000), [1] * 30, RejectCode.CONTEXT_LENGTH, "1025.*1030"),
        (SamplingParams(logit_bias={1000: -100.0}), [1], RejectCode.INVALID, "logit_bias.*1000"),
        (SamplingParams(stop_token_ids=(5000,)), [1], RejectCode.INVALID, "stop_token_ids.*5000"),
        (SamplingParams(bad_words=((1, 7000),)), [1], RejectCode.INVALID, "bad_words.*7000"),
        (SamplingParams(), [1, 1000], RejectCode.INVALID, "prompt_ids.*1000"),
        (SamplingParams(max_tokens=2, min_tokens=3), [1], RejectCode.INVALID, "min_tokens.*3"),
    ],
)
def test_what_cannot_run_is_refused_with_field_limit_and_value(
    sampling: SamplingParams, prompt: list[int], code: RejectCode, text: str
) -> None:
    async def use(client: EngineClient) -> None:
        with pytest.raises(RequestRejected, match=text) as caught:
            await client.add(EngineRequest(prompt, sampling))
        assert caught.value.code is code
        output, _ = await collect(await client.add(EngineRequest([1], SamplingParams())))
        assert len(output) == 16

    with running_engine() as core:
        with_client(core, use)


def test_stale_incarnations_and_attempts_are_refused(
    peer_and_core: tuple[RawPeer, EngineCore],
) -> None:
    peer, core = peer_and_core
    incarnation = peer.hello().incarnation
    reply = peer.ask(add_request(incarnation + 1))
    assert isinstance(reply, wire.Rejected)
    assert reply.code is RejectCode.STALE_INCARNATION
    long = SamplingParams(max_tokens=900)
    assert isinstance(peer.ask(add_request(incarnation, attempt=2, sampling=long)), wire.Accepted)
    peer.tell(add_request(incarnation, attempt=1))
    peer.tell(add_request(incarnation, attempt=3))
    replies: list[wire.ToIngress] = []
    last: wire.ToIngress | None = None
    while not (isinstance(last, wire.TokenBatch) and last.items[-1].finish):
        last = wire.decode_to_ingress(peer.socket.recv())
        replies.append(last)
    refused = [reply for reply in replies if isinstance(reply, wire.Rejected)]
    assert [(reply.attempt, reply.code) for reply in refused] == [(1, RejectCode.STALE_ATTEMPT)]
    assert last.items[-1].attempt == 3
    assert core.stats()["running"] == 0


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", RefuseCode.MALFORMED),
        (b"\xff\x00rubbish", RefuseCode.MALFORMED),
        (wire.encode(wire.Heartbeat())[:-1], RefuseCode.MALFORMED),
        (b"\x91\xa4None", RefuseCode.MALFORMED),
        (wire.encode(wire.Accepted("r", 0)), RefuseCode.MALFORMED),
        (wire.encode(add_request(0, prompt_ids=())), RefuseCode.MALFORMED),
        (wire.encode(add_request(0, prompt_ids=(-1,))), RefuseCode.MALFORMED),
        (wire.encode(add_request(0, attempt=-1)), RefuseCode.MALFORMED),
        (
            wire.encode(add_request(0, sampling=SamplingParams(temperature=-1.0))),
            RefuseCode.MALFORMED,
        ),
        (wire.encode(wire.Hello(99, "raw")), RefuseCode.VERSION),
        (wire.encode(wire.Hello(wire.WIRE_VERSION, "someone else")), RefuseCode.MALFORMED),
        (wire.encode(wire.Heartbeat()), RefuseCode.NO_SESSION),
        (wire.encode(add_request(0)), RefuseCode.NO_SESSION),
        (wire.encode(add_request(0, prompt_ids=(1,) * 5000)), RefuseCode.OVERSIZED),
    ],
)
def test_bad_messages_are_refused_and_the_engine_lives(
    peer_and_core: tuple[RawPeer, EngineCore],
    frame: bytes,
    code: RefuseCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer, core = peer_and_core
    reply = peer.ask(frame)
    assert isinstance(reply, wire.Refused)
    assert reply.code is code
    assert f"{code}" in caplog.text
    assert peer.hello().incarnation == core.incarnation


def test_a_message_beyond_any_limit_costs_its_sender_the_connection(
    peer_and_core: tuple[RawPeer, EngineCore],
) -> None:
    peer, core = peer_and_core
    peer.hello()
    peer.tell(b"x" * 100_000)
    peer.socket.setsockopt(zmq.RCVTIMEO, 300)
    with pytest.raises(zmq.Again):
        peer.socket.recv()
    other = RawPeer(core.endpoint, "other")
    assert other.hello().incarnation == core.incarnation
    other.close()


# ------------------------------------------------------------------ peers that go away


def test_one_runs_fault_ends_that_request_alone() -> None:
    config = simulated_config()

    class Faulty(SimulatedExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            bad = [s.run_id for s in plan.slices if self._runs[s.run_id].sampling.seed == 13]
            sampled = {run: item for run, item in result.sampled.items() if run not in bad}
            return StepResult(plan.step, sampled, dict.fromkeys(bad, "unlucky"))

    async def use(client: EngineClient) -> None:
        streams = [
            await client.add(EngineRequest([1, 2], SamplingParams(max_tokens=50, seed=seed)))
            for seed in (12, 13, 14)
        ]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert [len(output) for output, _ in results] == [50, 0, 50]
        assert results[1][1] == wire.Finish(FinishReason.ERROR, "unlucky")

    with running_engine(config, Faulty(config)) as core:
        with_client(core, use)
        assert core.stats()["held_blocks"] == 0


def test_an_ingress_that_does_not_read_loses_its_session_and_nobody_else_notices(
    tmp_path: Path,
) -> None:
    # Over ipc, because the kernel keeps megabytes for a TCP peer.
    listen = f"ipc://{tmp_path}/engine"
    config = simulated_config(num_blocks=32768, lease_s=60, outbox_messages=8, listen=listen)
    with running_engine(config, SimulatedExecutor(config)) as core:
        peer = RawPeer(core.endpoint, "deaf", receive_limit=1)
        incarnation = peer.hello().incarnation
        for number in range(100):
            params = SamplingParams(max_tokens=1000)
            peer.tell(
                add_request(incarnation, request_id=str(number), number=number, sampling=params)
            )

        async def use(client: EngineClient) -> None:
            output, _ = await collect(
                await client.add(EngineRequest([1], SamplingParams(max_tokens=300)))
            )
            assert len(output) == 300

        with_client(core, use)
        wait_until(lambda: "deaf" not in core._transport.sessions, 20)
        wait_until(lambda: core.stats()["held_blocks"] == 0)
        peer.close()


HUNGRY_CLIENT = """
import asyncio, sys
from engine.client import EngineClient, EngineRequest
from engine.wire import SamplingParams

async def main():
    client = await EngineClient.connect(sys.argv[1], "hungry")
    params = SamplingParams(max_tokens=3000)
    streams = [await client.add(EngineRequest([1, 2, n], params)) for n in range(8)]
    print("running", flush=True)
    async def read(stream):
        async for _ in stream: pass
    await asyncio.gather(*map(read, streams))

asyncio.run(main())
"""


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_client_stopped_or_killed_frees_its_blocks_and_disturbs_nobody(
    fate: signal.Signals,
) -> None:
    lease_s = 1.0
    config = simulated_config(num_blocks=8192, lease_s=lease_s, step_s=0.004)
    with running_engine(config, SimulatedExecutor(config)) as core:
        victim = subprocess.Popen(
            [sys.executable, "-c", HUNGRY_CLIENT, core.endpoint], stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        try:

            async def use(client: EngineClient) -> None:
                assert victim.stdout is not None
                await asyncio.to_thread(victim.stdout.readline)
                stream = await client.add(EngineRequest([9], SamplingParams(max_tokens=700)))
                gaps: dict[bool, list[float]] = {False: [], True: []}
                struck_s, freed_s, last_s = 0.0, 0.0, time.monotonic()
                async for item in stream:
                    now = time.monotonic()
                    gaps[bool(struck_s)].append(now - last_s)
                    last_s = now
                    if item.offset == 150:
                        os.kill(victim.pid, fate)
                        struck_s = now
                    if struck_s and not freed_s and core.stats()["running"] == 1:
                        freed_s = now
                assert 0 < freed_s - struck_s < lease_s + 1
                before, after = (statistics.median(gaps[struck]) for struck in (False, True))
                assert after < 1.5 * before
                assert max(gaps[True]) < max(0.1, 2 * max(gaps[False]))

            with_client(core, use)
            wait_until(lambda: core.stats()["held_blocks"] == 0)
        finally:
            victim.kill()
            victim.wait()
            victim.stdout.close()


def test_an_idle_engine_uses_almost_no_cpu() -> None:
    with running_engine():
        time.sleep(0.3)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.03
