"""`shoal bench scheduler`: its options."""

import json
from pathlib import Path

import click


@click.command(epilog="Example: shoal bench scheduler --json scheduler.json")
@click.option("--quick", is_flag=True, help="Few requests and no model: seconds, for tests.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def scheduler(quick: bool, json_path: Path | None) -> None:
    """The scheduler: cost of a plan, gain of overlap, and a burst with classes and without."""
    from bench.scheduler.run import bench_scheduler

    figures = bench_scheduler(quick, lambda phase: click.echo(phase, err=True))
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
