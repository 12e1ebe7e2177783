"""The command `shoal`.

Invariant: a sub-command's module is imported only when that command runs. Sub-commands are found by
entry points, their short help is read from their source, so that `shoal --help` is fast and no
lower layer ever imports a higher one.
"""

import ast
import importlib.util
import inspect
import os
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click

from engine.errors import ShoalError

_GROUP = "shoal.commands"
_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are the entry points of `shoal.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for name, entry in _entries().items() if _source(entry) is not None)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entries().get(cmd_name)
        if entry is None or _source(entry) is None:
            return None
        command = entry.load()
        assert isinstance(command, click.Command), f"{entry.value} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        entries = _entries()
        rows = [(name, _short_help(entries[name])) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _source(entry: EntryPoint) -> Path | None:
    """The module's file, found without importing anything; None for a command whose folder is not
    installed."""
    package, *rest = entry.module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder, *rest).with_suffix(".py")
        if path.is_file():
            return path
    return None


def _short_help(entry: EntryPoint) -> str:
    """First line of the docstring of the command's function."""
    source = _source(entry)
    assert source is not None
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return inspect.cleandoc(ast.get_docstring(node) or "").split("\n")[0]
    return ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("shoal"), prog_name="shoal")
def shoal() -> None:
    """Serves large language models on a Ray cluster."""


def main() -> None:
    """Exit codes: 0 done, 1 failed (one line says why), 2 wrong usage, 130 interrupted."""
    try:
        code = shoal.main(prog_name="shoal", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ShoalError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(_EXIT_FAILED)
    except BrokenPipeError:
        # The reader of our output left (`shoal ... | head`): nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
