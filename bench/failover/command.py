"""`shoal bench failover`: its options."""

import json
from pathlib import Path

import click


@click.command(epilog="Example: shoal bench failover --json failover.json")
@click.option("--quick", is_flag=True, help="One wave of few streams and no model: seconds.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def failover(quick: bool, json_path: Path | None) -> None:
    """Streams whose engines are killed and stopped: what clients notice, and for how long."""
    from bench.failover.run import bench_failover

    figures = bench_failover(quick, lambda phase: click.echo(phase, err=True))
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
