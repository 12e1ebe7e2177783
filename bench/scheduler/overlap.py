"""What planning a step while another runs gains, over sockets, the engine in a process of its own.

Invariant: efficiency is the share of the control thread's time that overlap hides: (synchronous
step - overlapped step) / (synchronous step - time in the executor). Utilisation is the executor's
time for a step run alone over the wall time of an overlapped one.
"""

import asyncio
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

from configs.engine import CacheConfig, EngineConfig, SchedulerConfig, SimulationConfig
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.launcher import LocalEngine
from engine.wire import SamplingParams

_ROUNDS = 5
_IDLE_S = 10.0


def measure_overlap(gil_share: float) -> dict[str, float]:
    """16 streams on simulated steps of 5 ms, which hold the GIL for this share of them."""
    simulation = SimulationConfig(step_s=0.005, gil_share=gil_share)
    config = EngineConfig(
        executor="simulated", cache=CacheConfig(num_blocks=4096), simulation=simulation
    )
    apart, beside = _both(config, num_streams=16, num_tokens=200)
    return {
        "overlap_efficiency": (apart.step_s - beside.step_s) / (apart.step_s - apart.compute_s),
        "step_ms_synchronous": 1000 * apart.step_s,
        "step_ms_overlapped": 1000 * beside.step_s,
        "step_ms_executor": 1000 * apart.compute_s,
    }


def measure_model() -> dict[str, float]:
    """64 streams of the default model, on all cores."""
    config = EngineConfig(cache=CacheConfig(num_blocks=2048))
    apart, beside = _both(config, num_streams=64, num_tokens=64)
    return {
        "utilisation_pct": 100 * apart.compute_s / beside.step_s,
        "utilisation_pct_synchronous": 100 * apart.compute_s / apart.step_s,
        "itl_p99_over_p50": beside.itl_p99_over_p50,
        "idle_cpu_pct": _idle_cpu_pct(config),
    }


def _idle_cpu_pct(config: EngineConfig) -> float:
    """Of a core, by an engine with an ingress and nothing to do."""

    async def rest(engine: LocalEngine) -> float:
        async with await EngineClient.connect(engine.endpoint) as client:
            await _streams(client, 1, 8, 0)
            before_s = _cpu_s(engine.pid)
            await asyncio.sleep(_IDLE_S)
            return _cpu_s(engine.pid) - before_s

    with LocalEngine.start(config) as engine:
        return 100 * asyncio.run(rest(engine)) / _IDLE_S


def _cpu_s(pid: int) -> float:
    """User and system time of a process (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Run:
    """Seconds of a step, medians over the rounds."""

    def __init__(self, step_s: float, compute_s: float, itl_p99_over_p50: float) -> None:
        self.step_s = step_s
        self.compute_s = compute_s
        self.itl_p99_over_p50 = itl_p99_over_p50


def _both(config: EngineConfig, num_streams: int, num_tokens: int) -> tuple[_Run, _Run]:
    """Without overlap and with it."""
    runs = []
    for overlap in (False, True):
        scheduler = SchedulerConfig(overlap=overlap)
        engine_config = config.model_copy(update={"scheduler": scheduler})
        with LocalEngine.start(engine_config) as engine:
            runs.append(asyncio.run(_run(engine.endpoint, num_streams, num_tokens)))
    return runs[0], runs[1]


async def _run(endpoint: str, num_streams: int, num_tokens: int) -> _Run:
    async with await EngineClient.connect(endpoint) as client:
        await _streams(client, num_streams, 40, 0)
        rounds = [await _streams(client, num_streams, num_tokens, n) for n in range(1, _ROUNDS + 1)]
        return _Run(
            statistics.median(step_s for step_s, _, _ in rounds),
            statistics.median(compute_s for _, compute_s, _ in rounds),
            statistics.median(ratio for _, _, ratio in rounds),
        )


async def _streams(
    client: EngineClient, num_streams: int, num_tokens: int, round_number: int
) -> tuple[float, float, float]:
    """Decodes in step; returns seconds between two tokens, in the executor, and p99 / p50."""
    arrivals: list[list[float]] = [[] for _ in range(num_streams)]
    steps: list[float] = []

    async def one(number: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        prompt = [100 + round_number, 200 + number, 300]
        async for _ in await client.add(EngineRequest(prompt, sampling)):
            arrivals[number].append(time.perf_counter())

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.1)
            if client.follower is not None and client.follower.load is not None:
                load = client.follower.load
                if load.running == num_streams:
                    steps.append(load.step_s)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(one, range(num_streams)))
    watching.cancel()
    gaps = sorted(b - a for times in arrivals for a, b in pairwise(times[1:]))
    begun_s = max(times[1] for times in arrivals)
    ended_s = min(times[-1] for times in arrivals)
    step_s = (ended_s - begun_s) / (num_tokens - 2)
    return step_s, statistics.median(steps), gaps[len(gaps) * 99 // 100] / gaps[len(gaps) // 2]
