"""`shoal models`: what a model would run on, before it is served.

Invariant: config and file headers are read, no weight, and nothing is downloaded.
"""

import json
from typing import TYPE_CHECKING, Any

import click

from cluster.commands.options import DTYPE_OPTION
from configs.units import parse_bytes

if TYPE_CHECKING:
    from engine.models.check import ModelCheck

_WORDS = {
    "native": "the fused decoder, on C++ kernels",
    "fused": "the fused decoder, op by op in torch",
    "transformers": "its own modules of transformers, with Shoal's attention",
}


@click.group()
def models() -> None:
    """Say what a model would run on, and what it needs."""


def _memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"{error}; write it like 8GiB", ctx, param) from None


@models.command(
    epilog="Examples: shoal models check default --memory 8GiB; "
    "shoal models check ./Qwen3-0.6B --json"
)
@click.argument("model")
@click.option("--device", default="auto", show_default=True, help="torch device.")
@DTYPE_OPTION
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="As cache.kv_dtype: the dtype of the model, or 8-bit floats.",
)
@click.option(
    "--memory",
    callback=_memory,
    help="Memory for weights and KV, like 8GiB.  [default: what is free on the device]",
)
@click.option("--json", "as_json", is_flag=True, help="JSON; sizes in bytes.")
def check(
    model: str, device: str, dtype: str, kv_dtype: str, memory: int | None, as_json: bool
) -> None:
    """Check MODEL: which path it takes, why, and how many tokens fit. Exit code 1: it is refused.

    MODEL is a local folder, a GGUF file, a hub id that is in the local hub cache, or 'default'."""
    from engine.models.check import check_model, default_block_size, free_bytes
    from engine.models.device import usable_device

    target = usable_device(device)
    found = check_model(
        model, target, dtype, lambda phase: click.echo(phase, err=True), kv_dtype=kv_dtype
    )
    memory = free_bytes(target) if memory is None else memory
    figures = _figures(model, found, memory, default_block_size())
    if as_json:
        click.echo(json.dumps(figures, ensure_ascii=False))
    elif found.need is None:
        click.echo(f"Error: {model} is refused: {found.reason}", err=True)
    else:
        _show(figures)
    if found.need is None:
        raise click.exceptions.Exit(1)


def _figures(model: str, found: "ModelCheck", memory: int, block_size: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "model": model,
        "served": found.need is not None,
        "path": found.path.value,
        "reason": found.reason,
    }
    if found.need is not None:
        figures |= {
            "model_type": found.need.model_type,
            "dtype": found.need.dtype,
            "weight_bytes": found.need.weight_bytes,
            "stored_bytes": found.need.stored_bytes,
            "kv_dtype": found.need.kv_dtype,
            "kv_bytes_per_token": found.need.kv_bytes_per_token,
            "max_model_len": found.need.max_model_len,
            "memory_bytes": memory,
            "is_converted_first": found.is_converted_first,
            "kv_tokens": found.need.tokens_in(memory, block_size),
        }
    return figures


def _show(figures: dict[str, Any]) -> None:
    rows = [("served by", _WORDS[figures["path"]])]
    if figures["reason"] is not None:
        rows.append(("no faster, as", figures["reason"]))
    rows += [
        ("type, dtype", f"{figures['model_type']}, {figures['dtype']}"),
        ("weights", _size(figures["weight_bytes"])),
        ("as stored", _size(figures["stored_bytes"])),
        ("KV a token", f"{_size(figures['kv_bytes_per_token'])} in {figures['kv_dtype']}"),
        ("longest request", f"{figures['max_model_len']:,} tokens"),
        ("fit beside weights", f"{figures['kv_tokens']:,} tokens of KV in "
                               f"{_size(figures['memory_bytes'])}"),
    ]  # fmt: skip
    if figures["is_converted_first"]:
        rows.append(("first", "on first use the GGUF file is converted to safetensors, once"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")


def _size(value: int) -> str:
    amount, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit} ({value:,} B)"
