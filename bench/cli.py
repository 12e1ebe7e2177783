"""`shoal bench`: measures Shoal."""

import os
from pathlib import Path
from typing import Any

import click

from bench.cache.command import cache
from bench.cluster.command import cluster
from bench.failover.command import failover
from bench.figures import json_option, report, show_phase
from bench.router import router
from bench.scheduler.command import scheduler
from bench.serve.command import serve


@click.group()
def bench() -> None:
    """Measure Shoal; figures come out as flat JSON, one metric a key."""


bench.add_command(cache)
bench.add_command(failover)
bench.add_command(cluster)
bench.add_command(router)
bench.add_command(scheduler)
bench.add_command(serve)


@bench.command(
    epilog="Examples: shoal bench engine --rounds 5 --json engine.json; "
    "shoal bench engine --peers --json peers.json --plot peers.png",
)
@click.option("--model", default="default", show_default=True, help="Folder, hub id or 'default'.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads; default: all cores.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--simulated", is_flag=True, help="Simulated executor: the engine without a model.")
@json_option
@click.option(
    "--peers",
    is_flag=True,
    help="Beside vLLM and llama.cpp, alternating; installs them on first use (6 GB, half an hour).",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --peers: a bar chart as PNG.",
)
@click.option(
    "--peers-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --peers: where they are installed.  [default: ~/.cache/shoal/peers]",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(["vllm", "vllm_all_cores", "vllm_eager", "llamacpp"]),
    help="With --peers: not to be measured; llama.cpp takes half of a round. Repeatable.",
)
def engine(threads: int | None, rounds: int, json_path: Path | None, **options: Any) -> None:
    """One engine by itself: W1 (one stream), W2 (prefill), W3 (64 requests on one prefix)."""
    threads = threads or len(os.sched_getaffinity(0))
    plot_path, peers_dir = options.pop("plot_path"), options.pop("peers_dir")
    without = options.pop("without")
    if options.pop("peers"):
        _only_the_default_model(**options)
        from bench.peers.command import bench_peers
        from bench.serve.plot import require_matplotlib

        if plot_path is not None:
            require_matplotlib("--plot")
        bench_peers(rounds, threads, json_path, plot_path, peers_dir, without)
        return
    if plot_path is not None or peers_dir is not None or without:
        raise click.UsageError("--plot, --peers-dir and --without go with --peers")
    _one_engine(threads, rounds, json_path, **options)


def _only_the_default_model(model: str, dtype: str, simulated: bool) -> None:
    if (model, dtype, simulated) != ("default", "auto", False):
        raise click.UsageError("--peers compares on the default model in its own dtype")


def _one_engine(
    threads: int,
    rounds: int,
    json_path: Path | None,
    model: str,
    dtype: str,
    simulated: bool,
) -> None:
    from bench.engine import bench_engine
    from configs.engine import EngineConfig

    config = EngineConfig.model_validate(
        {
            "model": model,
            "dtype": dtype,
            "threads": threads,
            "executor": "simulated" if simulated else "model",
        }
    )
    figures = bench_engine(config, rounds, show_phase)
    report(figures, json_path)


@bench.command(epilog="Example: shoal bench ingress --proxy haproxy --json ingress.json")
@click.option(
    "--proxy", type=click.Choice(["python", "haproxy"]), default="python", show_default=True
)
@click.option("--requests", type=click.IntRange(16, 100_000), default=200, show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8765, show_default=True)
@json_option
def ingress(proxy: str, requests: int, port: int, json_path: Path | None) -> None:
    """What HTTP, Serve and the ingress add to an engine's time to first token."""
    from bench.ingress import bench_ingress

    figures = bench_ingress(proxy, requests, port, show_phase)
    report(figures, json_path)
