"""`shoal bench cluster`: its options."""

import json
from pathlib import Path

import click


@click.command(epilog="Example: shoal bench cluster --json cluster.json")
@click.option("--quick", is_flag=True, help="A small shape and few requests: a minute, for tests.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def cluster(quick: bool, json_path: Path | None) -> None:
    """Routing policies against each other: real routers, schedulers and caches on a simulated
    clock under a published shape, then a few simulated engines over real sockets."""
    from bench.cluster.run import bench_cluster

    figures = bench_cluster(quick, lambda phase: click.echo(phase, err=True))
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
