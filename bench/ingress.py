"""What the way through HTTP, Serve and the ingress adds to an engine's own time to first token.

Invariant: both sides ask for the same token ids, one after the other, of the same warm engine; the
engine's own time is taken at a client on its socket. The engine is simulated (it sleeps), so that
what is measured is Shoal's code and not a model that competes with it for the cores.
"""

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import Progress
from cluster.preprocess import GenerationRequest, ModelLimits, Preprocessor
from cluster.tokenizer import Tokenizer
from configs.engine import CacheConfig, EngineConfig, SimulationConfig
from configs.secret import write_secret
from configs.shoal import IngressConfig, ModelConfig, ShoalConfig
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.models.resolve import resolve_model
from engine.wire import SamplingParams

_STEP_S = 0.005
_WARM_WORDS = 490
"""With the chat template a little over 512 tokens."""
_STREAM_TOKENS = 400
_CLIENTS = 16
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A running cluster, and its one engine's own address."""

    port: int
    endpoint: str
    model_folder: Path


def bench_ingress(
    proxy: str, requests: int, port: int, progress: Progress
) -> dict[str, float | int | str]:
    """Starts a cluster with one simulated engine behind `proxy` ('python' or 'haproxy')."""
    from cluster.local_ray import LocalRay

    folder = resolve_model("default", progress)
    engine = EngineConfig(
        executor="simulated",
        cache=CacheConfig(num_blocks=8192),
        simulation=SimulationConfig(vocab_size=49152, max_model_len=8192, step_s=_STEP_S),
    )
    local_ray = LocalRay(use_haproxy=proxy == "haproxy")
    progress("Ray")
    with local_ray.started(num_cpus=8):
        import ray

        from cluster.launch import Cluster
        from replicas.registry import find_registry

        secret_file = local_ray.folder / "secret"
        write_secret(secret_file)
        config = ShoalConfig(
            models=[ModelConfig(name="simulated", engine=engine)],
            ingress=IngressConfig(port=port),
            cluster_secret_file=str(secret_file),
        )
        cluster = Cluster(config, local_ray.socket_folder)
        progress("engine and ingress")
        cluster.start_engines()
        cluster.start_ingress()
        end_s = time.monotonic() + _START_TIMEOUT_S
        while cluster.ready_report().get("simulated", {}).get("state") != "ready":
            if time.monotonic() > end_s:
                raise TimeoutError("the cluster did not become ready")
            time.sleep(0.2)
        (entry,) = ray.get(find_registry().view.remote()).engines
        target = Target(port, entry.endpoint, folder)
        figures = asyncio.run(_measure(target, requests, progress))
        figures |= asyncio.run(_measure_cpu(target, _ingress_pid(local_ray.folder), progress))
    return {
        "benchmark": "ingress",
        "executor": "simulated",
        "proxy": proxy,
        "requests": requests,
        "step_s": _STEP_S,
        **{key: round(value, 4) for key, value in figures.items()},
    }


async def _measure(target: Target, requests: int, progress: Progress) -> dict[str, float]:
    messages = [{"role": "user", "content": "word " * _WARM_WORDS}]
    body: dict[str, Any] = {
        "model": "simulated",
        "messages": messages,
        "stream": True,
        "max_tokens": 2,
        "temperature": 0,
    }
    figures: dict[str, float] = {}
    async with await EngineClient.connect(target.endpoint) as client:
        ids = await _prompt_ids(client, target.model_folder, messages)
        figures["prompt_tokens"] = len(ids)
        for clients in (1, _CLIENTS):
            progress(f"time to first token, {clients} client(s)")
            share = max(8, requests // clients)

            async def alternate(count: int) -> list[tuple[float, float]]:
                pairs = []
                connection = await _Connection.open(target.port)
                for _ in range(count):
                    direct = await _engine_ttft_s(client, ids)
                    pairs.append((direct, await connection.ttft_s(body)))
                connection.writer.close()
                return pairs

            await alternate(5)
            before = await _stage_totals(target.port)
            runs = await asyncio.gather(*(alternate(share) for _ in range(clients)))
            pairs = np.array([pair for run in runs for pair in run]) * 1000
            for index, name in enumerate(("engine", "http")):
                for percent in (50, 99):
                    key = f"{name}_ttft_ms_p{percent}_{clients}"
                    figures[key] = float(np.percentile(pairs[:, index], percent))
            for percent in (50, 99):
                added = np.percentile(pairs[:, 1], percent) - np.percentile(pairs[:, 0], percent)
                figures[f"added_ttft_ms_p{percent}_{clients}"] = float(added)
            for stage, (seconds, count) in (await _stage_totals(target.port)).items():
                mean_s = (seconds - before[stage][0]) / (count - before[stage][1])
                figures[f"stage_ms_{stage}_{clients}"] = mean_s * 1000
        progress("disconnects")
        for kind, stream in (("streamed", True), ("whole", False)):
            asked = {**body, "stream": stream}
            freed_ms = [await _disconnect_ms(client, target.port, asked) for _ in range(20)]
            figures[f"disconnect_to_free_ms_p50_{kind}"] = float(np.median(freed_ms))
            figures[f"disconnect_to_free_ms_max_{kind}"] = max(freed_ms)
    return figures


async def _prompt_ids(
    client: EngineClient, folder: Path, messages: list[dict[str, str]]
) -> list[int]:
    assert client.info is not None
    preprocessor = Preprocessor(Tokenizer.load(folder), num_threads=1)
    request = GenerationRequest(messages, SamplingParams())
    prepared = await preprocessor.prepare("ids", request, ModelLimits.of(client.info))
    preprocessor.close()
    return list(prepared.choices[0].prompt_ids)


async def _engine_ttft_s(client: EngineClient, ids: list[int]) -> float:
    start_s = time.perf_counter()
    stream = await client.add(EngineRequest(ids, SamplingParams(max_tokens=2, ignore_eos=True)))
    await anext(stream)
    seconds = time.perf_counter() - start_s
    async for _ in stream:
        pass
    return seconds


class _Connection:
    """One client's connection, kept over its requests, as HTTP clients do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> "_Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def post(self, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: shoal\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
        )

    async def ttft_s(self, body: dict[str, Any]) -> float:
        """From sending a request until its first event with content; reads the whole answer."""
        start_s = time.perf_counter()
        self.post(body)
        seconds = 0.0
        while (line := await self.reader.readline()) != b"0\r\n":
            if not line:
                raise RuntimeError("the answer was broken off")
            if not seconds and b'"content"' in line:
                seconds = time.perf_counter() - start_s
        await self.reader.readline()
        if not seconds:
            raise RuntimeError("an answer without content")
        return seconds


async def _disconnect_ms(client: EngineClient, port: int, body: dict[str, Any]) -> float:
    """From closing the connection in the middle of an answer until the engine reports that no
    block is held."""
    connection = await _Connection.open(port)
    connection.post({**body, "max_tokens": 1000, "ignore_eos": True})
    if body["stream"]:
        await connection.reader.readline()
    follower = client.follower
    assert follower is not None
    while follower.load is None or not follower.load.used_blocks:
        await asyncio.sleep(0.001)
    start_s = time.perf_counter()
    connection.writer.close()
    while follower.load is None or follower.load.used_blocks:
        await asyncio.sleep(0.001)
    return (time.perf_counter() - start_s) * 1000


async def _stage_totals(port: int) -> dict[str, tuple[float, float]]:
    """Of each of the ingress's stages, from its metrics: seconds in all, and requests."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: shoal\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for line in text.splitlines():
        for kind, values in found.items():
            if line.startswith(f"shoal_stage_seconds_{kind}{{"):
                stage = line.split('stage="')[1].split('"')[0]
                values[stage] = float(line.rsplit(" ", 1)[1])
    return {stage: (found["sum"][stage], found["count"][stage]) for stage in found["sum"]}


async def _measure_cpu(target: Target, ingress_pid: int, progress: Progress) -> dict[str, float]:
    """CPU that the ingress process spends on each token that it streams."""
    progress(f"CPU of {_CLIENTS} streams")
    body = {
        "model": "simulated",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": _STREAM_TOKENS,
        "ignore_eos": True,
    }
    before_s = _cpu_s(ingress_pid)
    connections = [await _Connection.open(target.port) for _ in range(_CLIENTS)]
    await asyncio.gather(*(connection.ttft_s(body) for connection in connections))
    spent_s = _cpu_s(ingress_pid) - before_s
    return {"ingress_cpu_us_per_token": spent_s / (_CLIENTS * _STREAM_TOKENS) * 1e6}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ingress_pid(folder: Path) -> int:
    from cluster.reaper import marked

    for pid in marked(f"RAY_AUTH_TOKEN_PATH={folder}/token"):
        if b"ray::ServeReplica:ingress" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RuntimeError("the ingress's process is not there")
