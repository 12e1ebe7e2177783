"""Options that every command with an engine has, and the engine configuration they make."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from configs.engine import EngineConfig

_F = TypeVar("_F", bound=Callable[..., Any])

DTYPE_OPTION = click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Weights and KV; 'auto' is the checkpoint's own.",
)

_OPTIONS = (
    click.option(
        "--model",
        default="default",
        show_default=True,
        help="Local folder, GGUF file, hub id, or 'default' for the bundled model.",
    ),
    click.option("--device", default="auto", show_default=True, help="torch device."),
    DTYPE_OPTION,
    click.option("--threads", type=int, help="CPU threads of the engine.  [default: all cores]"),
    click.option(
        "--max-model-len", type=int, help="Longest prompt plus output.  [default: what fits]"
    ),
)

_CACHE_OPTIONS = {
    "host_memory_bytes": "--kv-host",
    "disk_path": "--kv-disk",
    "cache": "--kv-host, --kv-disk",
}


def engine_options(command: _F) -> _F:
    """Adds the options that `engine_config` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config(
    kv_host: str | None = None, kv_disk: str | None = None, **options: Any
) -> EngineConfig:
    """Raises `click.UsageError` with the field, the limit and the value."""
    names = ("model", "device", "dtype", "threads", "max_model_len")
    cache = {"host_memory_bytes": kv_host, "disk_path": kv_disk}
    try:
        return EngineConfig.model_validate({**{n: options[n] for n in names}, "cache": cache})
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][-1])
        name = _CACHE_OPTIONS.get(where, "--" + where.replace("_", "-"))
        raise click.UsageError(f"{name}: {first['msg']}, got {first['input']!r}") from None
