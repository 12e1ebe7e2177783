"""`shoal bench scheduler`: its options."""

import json
from pathlib import Path

import click

_PARTS = ("planning", "burst", "overlap", "model", "gains")


@click.command(
    epilog="Examples: shoal bench scheduler --json scheduler.json; "
    "shoal bench scheduler --part planning"
)
@click.option("--quick", is_flag=True, help="Few requests and no model: seconds, for tests.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(_PARTS),
    help="Only this one; may be repeated.  [default: all, ten minutes]",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def scheduler(quick: bool, parts: tuple[str, ...], json_path: Path | None) -> None:
    """The scheduler: cost of a plan, gain of overlap, a burst with classes and without, and what
    chunks, cache and the lack of phases give on the default model."""
    from bench.scheduler.run import bench_scheduler

    figures = bench_scheduler(quick, parts or _PARTS, lambda phase: click.echo(phase, err=True))
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
