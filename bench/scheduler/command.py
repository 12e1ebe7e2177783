"""`shoal bench scheduler`: its options."""

from pathlib import Path

import click

from bench.figures import json_option, report, show_phase

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
@json_option
def scheduler(quick: bool, parts: tuple[str, ...], json_path: Path | None) -> None:
    """The scheduler: cost of a plan, gain of overlap, a burst with classes and without, and what
    chunks, cache and the lack of phases give on the default model."""
    from bench.scheduler.run import bench_scheduler

    figures = bench_scheduler(quick, parts or _PARTS, show_phase)
    report(figures, json_path)
