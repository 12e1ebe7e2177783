"""`shoal bench`: measures Shoal."""

import json
import os
from pathlib import Path

import click

from bench.cache.command import cache
from bench.cluster.command import cluster
from bench.router import router
from bench.scheduler.command import scheduler
from bench.serve.command import serve


@click.group()
def bench() -> None:
    """Measure Shoal; figures come out as flat JSON, one metric a key."""


bench.add_command(cache)
bench.add_command(cluster)
bench.add_command(router)
bench.add_command(scheduler)
bench.add_command(serve)


@bench.command(
    epilog="Example: shoal bench engine --rounds 5 --json engine.json",
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
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def engine(
    model: str,
    dtype: str,
    threads: int | None,
    rounds: int,
    simulated: bool,
    json_path: Path | None,
) -> None:
    """One engine by itself: W1 (one stream), W2 (prefill), W3 (64 requests on one prefix)."""
    from bench.engine import bench_engine
    from configs.engine import EngineConfig

    config = EngineConfig.model_validate(
        {
            "model": model,
            "dtype": dtype,
            "threads": threads or len(os.sched_getaffinity(0)),
            "executor": "simulated" if simulated else "model",
        }
    )
    figures = bench_engine(config, rounds, lambda phase: click.echo(phase, err=True))
    _report(figures, json_path)


@bench.command(epilog="Example: shoal bench ingress --proxy haproxy --json ingress.json")
@click.option(
    "--proxy", type=click.Choice(["python", "haproxy"]), default="python", show_default=True
)
@click.option("--requests", type=click.IntRange(16, 100_000), default=200, show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8765, show_default=True)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def ingress(proxy: str, requests: int, port: int, json_path: Path | None) -> None:
    """What HTTP, Serve and the ingress add to an engine's time to first token."""
    from bench.ingress import bench_ingress

    figures = bench_ingress(proxy, requests, port, lambda phase: click.echo(phase, err=True))
    _report(figures, json_path)


def _report(figures: dict[str, float | int | str], json_path: Path | None) -> None:
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
