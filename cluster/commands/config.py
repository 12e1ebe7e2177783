"""`shoal config`: what a configuration means, whether it is right, and what may be in one.

Invariant: it only reads. Neither Ray nor a model library is imported.
"""

import json
from typing import NoReturn

import click

from configs import load as loading
from configs.describe import field_table
from configs.shoal import ShoalConfig

_DEFAULT = "local-cpu"
_INDENT = 2


@click.group()
def config() -> None:
    """Show, check and describe configurations."""


@config.command()
@click.argument("config", default=_DEFAULT)
@click.option("--json", "as_json", is_flag=True, help="JSON; sizes in bytes, durations in seconds.")
def show(config: str, as_json: bool) -> None:
    """Print the whole of CONFIG, defaults written out.

    CONFIG is a YAML file or the name of a preset: local-cpu (the default), single-gpu, cluster.
    """
    try:
        loaded = loading.load(config)
    except loading.ConfigError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(loaded.model_dump_json(indent=_INDENT))
    else:
        click.echo(loading.dump(loaded), nl=False)


@config.command()
@click.argument("config")
@click.option("--json", "as_json", is_flag=True, help="JSON, on stdout whatever the outcome.")
def check(config: str, as_json: bool) -> None:
    """Check CONFIG; exit code 1, and everything that is wrong with it, if it is refused."""
    try:
        loaded = loading.load(config)
    except loading.ConfigError as error:
        _refused(config, error, as_json)
    names = [model.name for model in loaded.models]
    if as_json:
        click.echo(json.dumps({"ok": True, "config": config, "models": names, "problems": []}))
    else:
        plural = "s" if len(names) > 1 else ""
        click.echo(f"{config}: valid, {len(names)} model{plural}: {', '.join(names)}")


@config.command()
@click.option("--table", is_flag=True, help="A Markdown table instead of the JSON schema.")
def schema(table: bool) -> None:
    """Print the JSON schema of a configuration."""
    if table:
        click.echo(field_table())
    else:
        click.echo(json.dumps(ShoalConfig.model_json_schema(), indent=_INDENT))


def _refused(config: str, error: loading.ConfigError, as_json: bool) -> NoReturn:
    problems = [
        {"file": each.file, "line": each.line, "path": each.path, "message": each.message}
        for each in error.problems
    ]
    if as_json:
        outcome = {"ok": False, "config": config, "models": [], "problems": problems}
        click.echo(json.dumps(outcome))
    else:
        click.echo(str(error), err=True)
        click.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
    raise click.exceptions.Exit(1)
