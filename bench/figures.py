"""What every benchmark does with its figures: phases on stderr, a table, and flat JSON."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import click

Figures = dict[str, float | int | str]
"""One metric a key, its unit in its name."""
Progress = Callable[[str], None]
"""Told of each phase as it begins."""

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)


def show_phase(phase: str) -> None:
    click.echo(phase, err=True)


def report(figures: Mapping[str, float | int | str], json_path: Path | None) -> None:
    """Prints the figures, and writes them if they are to be kept."""
    width = max(map(len, figures))
    for key, value in figures.items():
        click.echo(f"{key:<{width}}  {value}")
    if json_path is not None:
        write(figures, json_path)


def write(figures: Mapping[str, float | int | str], json_path: Path) -> None:
    json_path.write_text(json.dumps(figures, indent=2) + "\n")
