"""`shoal bench cluster`: its options."""

from pathlib import Path

import click

from bench.figures import json_option, report, show_phase


@click.command(epilog="Example: shoal bench cluster --json cluster.json")
@click.option("--quick", is_flag=True, help="A small shape and few requests: a minute, for tests.")
@json_option
def cluster(quick: bool, json_path: Path | None) -> None:
    """Routing policies against each other: real routers, schedulers and caches on a simulated
    clock under a published shape, then a few simulated engines over real sockets."""
    from bench.cluster.run import bench_cluster

    figures = bench_cluster(quick, show_phase)
    report(figures, json_path)
