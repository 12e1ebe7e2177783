"""`shoal bench failover`: its options."""

from pathlib import Path

import click

from bench.figures import json_option, report, show_phase


@click.command(epilog="Example: shoal bench failover --json failover.json")
@click.option("--quick", is_flag=True, help="One wave of few streams and no model: seconds.")
@json_option
def failover(quick: bool, json_path: Path | None) -> None:
    """Streams whose engines are killed and stopped: what clients notice, and for how long."""
    from bench.failover.run import bench_failover

    figures = bench_failover(quick, show_phase)
    report(figures, json_path)
