"""`shoal bench router`: what a decision costs, and what the index behind it takes.

Invariant: the router is warm and the chains are known to it: each of them is held by every replica
to a depth of its own, drawn anew for each chain and replica, so that no two replicas tie and every
block of a walk loses some. A figure is over many chains, so that their masks come from memory.
"""

import random
import signal
import time
import tracemalloc
from collections import deque
from pathlib import Path

import click
import numpy as np

from bench.figures import Figures, Progress, json_option, report, show_phase
from bench.router_index import measure_capped
from cache.events import BlockKey, Tier
from cluster.routing.decision import RouteRequest
from cluster.routing.index import PrefixIndex
from cluster.routing.router import Router
from configs.shoal import RouterConfig
from engine.wire import LoadReport

_BLOCK_SIZE = 16
_NUM_BLOCKS = 128
_CHAINS = 64
_SEED = 8
_OPEN = 100
"""Decisions that are booked at a time."""
_ROOM = 8 << 30
_BLOOM_KEYS = 8192
"""Of a replica that is known by a Bloom filter: of the chains a half, and others."""
_BLOOM_BYTES = 125 << 10
"""Of memory for each of them: a tenth of what their keys would take exactly."""
_PEER_REQUESTS = 200


@click.command(
    epilog="Examples: shoal bench router --json router.json; "
    "shoal bench router --peers --requests 300 --json peers.json"
)
@click.option("--quick", is_flag=True, help="Few decisions and replicas: seconds, for tests.")
@json_option
@click.option(
    "--peers",
    is_flag=True,
    help="Instead: what Shoal's whole HTTP front adds to its engine's time to first token, beside "
    "vllm-router and vLLM's server; installs them on first use (7 GB).",
)
@click.option(
    "--requests",
    type=click.IntRange(20, 100_000),
    help=f"With --peers: how many, to each front.  [default: {_PEER_REQUESTS}]",
)
@click.option(
    "--peers-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --peers: where they are installed.  [default: ~/.cache/shoal/peers]",
)
def router(
    quick: bool,
    json_path: Path | None,
    peers: bool,
    requests: int | None,
    peers_dir: Path | None,
) -> None:
    """The router: time of a decision by blocks and replicas, and memory of its index."""
    if peers and quick:
        raise click.UsageError("--quick does not go with --peers")
    if not peers and (requests is not None or peers_dir is not None):
        raise click.UsageError("--requests and --peers-dir go with --peers")
    if peers:
        report(_beside_peers(requests or _PEER_REQUESTS, peers_dir), json_path)
    else:
        report(bench_router(quick, show_phase), json_path)


def _beside_peers(requests: int, root: Path | None) -> Figures:
    from bench.peers.fronts import bench_fronts
    from bench.peers.setup import PeerMissing
    from engine.user_cache import user_cache

    # By its default action no `finally` would run, and servers would stay.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    root = root or user_cache() / "peers"
    try:
        return bench_fronts(requests, root, show_phase)
    except PeerMissing as reason:
        raise click.ClickException(f"{reason} (its log is in {root})") from reason


def bench_router(quick: bool, progress: Progress) -> Figures:
    figures: Figures = {"benchmark": "router", "chains": _CHAINS, "depths": "uniform"}
    rounds = 5 if quick else 40
    sizes = (8, 64) if quick else (8, 64, 1000)
    for num_replicas, is_bloom in [*[(size, False) for size in sizes], (sizes[-1], True)]:
        kind = "_bloom" if is_bloom else ""
        progress(f"{_NUM_BLOCKS} blocks, {num_replicas} replicas{kind}")
        router, chains = _warm_router(num_replicas, is_bloom)
        times_us = _route_us(router, chains, rounds)
        for percent in (50, 99):
            value = float(np.percentile(times_us, percent))
            figures[f"route_us_p{percent}_{_NUM_BLOCKS}x{num_replicas}{kind}"] = round(value, 1)
        if is_bloom:
            figures["route_bloom_replicas"] = router.index.num_rough
    num_keys = 2_000 if quick else 50_000
    for holders in (1, 8):
        progress(f"memory of {num_keys} keys that {holders} replicas hold")
        held = _index_bytes(num_keys, holders) / (num_keys * holders)
        figures[f"index_bytes_per_held_key_{holders}"] = round(held, 1)
    progress("an index with ten times the blocks that it could follow exactly")
    key_bytes = float(figures["index_bytes_per_held_key_1"])
    return figures | measure_capped(num_keys, key_bytes, 100 * rounds)


def _warm_router(num_replicas: int, is_bloom: bool) -> tuple[Router, list[list[BlockKey]]]:
    """With the chains that it knows. Given too little memory, nearly all replicas are known by
    filters, as large and as full as of replicas of that size."""
    rng = random.Random(_SEED)
    memory_bytes = num_replicas * _BLOOM_BYTES if is_bloom else _ROOM
    router = Router(RouterConfig(index_memory_bytes=memory_bytes), "bench")
    chains = [_chain(rng, _NUM_BLOCKS) for _ in range(_CHAINS)]
    for number in range(num_replicas):
        name = f"replica-{number}"
        view = router.add_replica(name, _BLOCK_SIZE)
        router.on_load(name, _report(rng))
        for chain in chains:
            for key in chain[: rng.randrange(_NUM_BLOCKS + 1)]:
                view.add(key, Tier.DEVICE)
        for _ in range(_BLOOM_KEYS - len(view) if is_bloom else 0):
            view.add(rng.randbytes(16), Tier.DEVICE)
    return router, chains


def _route_us(router: Router, chains: list[list[BlockKey]], rounds: int) -> list[float]:
    """Of every decision, on the wall clock. Each is booked, so that loads differ as they would."""
    times_us: list[float] = []
    booked: deque[tuple[str, int]] = deque()
    for number in range(rounds * _CHAINS):
        chain = chains[number % _CHAINS]
        request = RouteRequest(f"request-{number}", chain, len(chain) * _BLOCK_SIZE + 5, 64)
        start_s = time.perf_counter()
        decision = router.route(request)
        times_us.append((time.perf_counter() - start_s) * 1e6)
        router.book(decision, number)
        booked.append((decision.replica_id, number))
        if len(booked) > _OPEN:
            router.unbook(*booked.popleft())
    return times_us


def _report(rng: random.Random) -> LoadReport:
    return LoadReport(
        running=rng.randrange(40),
        waiting=0,
        waiting_tokens=rng.randrange(4000),
        max_num_seqs=256,
        num_blocks=8192,
        used_blocks=rng.randrange(6000),
        prefill_tokens_per_s=9000.0,
        decode_tokens_per_s=600.0,
        step_s=0.03,
        step_age_s=0.01,
        preemptions=0,
        seen={},
    )


def _index_bytes(num_keys: int, holders: int) -> int:
    """Traced memory of an index in which as many replicas hold the same keys, each told of them in
    a message of its own, as off the wire."""
    keys = _chain(random.Random(_SEED), num_keys)
    tracemalloc.start()
    index = PrefixIndex(_ROOM)
    for number in range(holders):
        view = index.view(f"replica-{number}")
        for key in keys:
            view.add(bytes(bytearray(key)), Tier.DEVICE)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def _chain(rng: random.Random, num_blocks: int) -> list[BlockKey]:
    return [rng.randbytes(16) for _ in range(num_blocks)]
