"""`shoal status`: what a running Shoal serves, and how busy it is."""

import json
import sys
from typing import Any

import click

from cluster.http_client import DEFAULT_URL, get_json

_EXIT_NOT_READY = 3
_COLUMNS = ("MODEL", "ENGINE", "STATE", "RUNNING", "WAITING", "KV BLOCKS", "RESTARTS", "DETAIL")


@click.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where Shoal serves.")
@click.option("--json", "as_json", is_flag=True, help="The server's own report.")
def status(url: str, as_json: bool) -> None:
    """Show each model, its engines and their load.

    Exit codes: 0 every model is ready, 3 some is not, 1 there is no answer.

    \b
    Example:
      shoal status --url http://127.0.0.1:8000
    """
    report = get_json(url, "/ready")
    models: dict[str, Any] = report["models"]
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        rows = [_COLUMNS, *(row for name, model in models.items() for row in _rows(name, model))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(cells).rstrip())
    if any(model["state"] != "ready" for model in models.values()):
        sys.exit(_EXIT_NOT_READY)


def _rows(name: str, model: dict[str, Any]) -> list[tuple[str, ...]]:
    engines = model["engines"]
    if not engines:
        return [(name, "-", model["state"], "-", "-", "-", "-", model["detail"])]
    return [
        (
            name,
            engine["id"],
            engine["state"],
            str(engine.get("running", "-")),
            str(engine.get("waiting", "-")),
            f"{engine['used_blocks']}/{engine['num_blocks']}" if "num_blocks" in engine else "-",
            str(engine["restarts"]),
            engine["detail"] or engine["last_error"] or model["detail"],
        )
        for engine in engines
    ]
