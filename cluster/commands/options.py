"""Options that every command with an engine has, and the engine configuration they make."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from configs.engine import EngineConfig

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model",
        default="default",
        show_default=True,
        help="Local folder, hub id, or 'default' for the bundled model.",
    ),
    click.option("--device", default="auto", show_default=True, help="torch device."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Weights and KV; 'auto' is the checkpoint's own.",
    ),
    click.option("--threads", type=int, help="CPU threads of the engine.  [default: all cores]"),
    click.option(
        "--max-model-len", type=int, help="Longest prompt plus output.  [default: what fits]"
    ),
)


def engine_options(command: _F) -> _F:
    """Adds the options that `engine_config` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config(**options: Any) -> EngineConfig:
    """Raises `click.UsageError` with the field, the limit and the value."""
    names = ("model", "device", "dtype", "threads", "max_model_len")
    try:
        return EngineConfig(**{name: options[name] for name in names})
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-")
        raise click.UsageError(f"{name}: {first['msg']}, got {first['input']!r}") from None
