"""What an engine refuses, and peers that misbehave, stop or go away."""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine import wire
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.core import EngineCore
from engine.errors import RequestRejected
from engine.executors.simulated import SimulatedExecutor
from engine.plan import StepPlan, StepResult
from engine.wire import FinishReason, RefuseCode, RejectCode, SamplingParams
from tests.engine.rig import running_engine, simulated_config, wait_until
from tests.engine.wire_rig import RawPeer, add_request, collect, with_client


@pytest.fixture
def peer_and_core() -> Iterator[tuple[RawPeer, EngineCore]]:
    with running_engine(simulated_config(max_message_bytes=4096)) as core:
        peer = RawPeer(core.endpoint)
        yield peer, core
        peer.close()


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
            run_ids = [*(item.run_id for item in plan.slices), *plan.decodes]
            bad = [run for run in run_ids if self._runs[run].sampling.seed == 13]
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
