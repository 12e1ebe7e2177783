"""`shoal bench serve`: the options, and the order of a run.

Invariant: figures come out however the run ends, by itself, by Ctrl-C or with every request failed,
as soon as one request was measured; the exit code says which.
"""

import asyncio
import gc
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from bench.serve.client import Client
    from bench.serve.load import Load, LoadResult
    from bench.serve.settings import Settings
    from bench.serve.traces import TraceEntry

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_PROGRESS_PERIOD_S = 0.25
_F = TypeVar("_F", bound=Callable[..., Any])
_POSITIVE = click.IntRange(1)
_SECONDS = click.FloatRange(0, min_open=True)
_FILE = click.Path(path_type=Path)
_INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _apply_preset(context: click.Context, _: click.Parameter, name: str | None) -> str | None:
    from bench.serve.settings import SettingsError, read_preset

    if name is None:
        return None
    try:
        preset = dict(read_preset(name))
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    names = {parameter.name for parameter in context.command.params}
    if unknown := sorted(preset.keys() - names):
        raise click.UsageError(f"--preset {name}: no such option: {', '.join(unknown)}")
    context.default_map = {**(context.default_map or {}), **preset}
    return name


def _option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


_OPTIONS = (
    # ---- server
    _option("--url", default="http://127.0.0.1:8000", help="The server, with or without /v1."),
    _option("--api", type=click.Choice(["chat", "completions"]), default="chat"),
    _option("--model", help="As the server calls it.  [default: first of /v1/models]"),
    _option("--api-key-file", type=_INPUT_FILE, help="Sent as a bearer token."),
    _option("--timeout", "timeout_s", type=_SECONDS, default=600.0, metavar="S", help="A request."),
    # ---- workload
    _option(
        "--preset",
        is_eager=True,
        callback=_apply_preset,
        expose_value=False,
        help="Options from a JSON file, or by name from bench/workloads/serve; others go first.",
    ),
    _option(
        "--workload",
        type=click.Choice(["random", "shared-prefix", "multi-turn", "trace"]),
        default="random",
    ),
    _option(
        "--input-tokens",
        type=_POSITIVE,
        default=512,
        help="New ones in each prompt: after the shared ones, or in each turn.",
    ),
    _option("--output-tokens", type=_POSITIVE, default=128),
    _option(
        "--length-spread",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Lengths are uniform within this share around the above.",
    ),
    _option(
        "--shared-tokens",
        type=click.IntRange(0),
        default=1024,
        help="System prompt, of each group or of all conversations.",
    ),
    _option("--groups", type=_POSITIVE, default=8, help="shared-prefix: system prompts."),
    _option("--users", type=_POSITIVE, default=8, help="shared-prefix: users of each group."),
    _option("--turns", type=_POSITIVE, default=4, help="multi-turn: of a conversation."),
    _option(
        "--think-time",
        "think_time_s",
        type=click.FloatRange(0),
        default=0.0,
        metavar="S",
        help="multi-turn: between an answer and the next turn.",
    ),
    _option("--trace", type=_INPUT_FILE, help="Mooncake JSONL or Azure CSV, may be gzipped."),
    _option(
        "--time-scale",
        type=click.FloatRange(0),
        default=1.0,
        help="trace: gaps are multiplied by this; 0.1 is ten times the pace.",
    ),
    _option("--max-input-tokens", type=_POSITIVE, help="trace: cut longer prompts to this."),
    _option("--max-output-tokens", type=_POSITIVE, help="trace: cut longer outputs to this."),
    _option("--token-ids", is_flag=True, help="Prompts of token ids, where the server takes them."),
    _option("--vocab-size", type=click.IntRange(2), default=32000, help="--token-ids: below this."),
    _option("--seed", type=int, default=0, help="Another one finds nothing in any cache."),
    # ---- load
    _option(
        "--concurrency", type=_POSITIVE, help="Closed loop: conversations at a time.  [default: 8]"
    ),
    _option(
        "--rate",
        type=click.FloatRange(0, min_open=True),
        help="Open loop: conversations begun a second, Poisson; 'inf': all at once.",
    ),
    _option("--requests", type=_POSITIVE, help="[default: 100; or all of the trace]"),
    _option("--duration", "duration_s", type=_SECONDS, metavar="S", help="None begins after it."),
    _option(
        "--warmup", type=click.IntRange(0), default=0, help="Requests before, of other content."
    ),
    # ---- requests
    _option(
        "--ignore-eos/--no-ignore-eos", default=True, help="Ask for outputs of their full length."
    ),
    _option("--temperature", type=click.FloatRange(0), default=0.0),
    _option("--extra-body", metavar="JSON", help="More fields for each request."),
    # ---- report
    _option("--slo-ttft", "slo_ttft_ms", type=_SECONDS, metavar="MS", help="For goodput."),
    _option("--slo-tpot", "slo_tpot_ms", type=_SECONDS, metavar="MS", help="For goodput."),
    _option("--json", "json_path", type=_FILE, help="Write the figures here, one a key."),
    _option("--png", "png_path", type=_FILE, help="Draw them here; needs matplotlib."),
)


def _all_options(command: _F) -> _F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    epilog="Example: shoal bench serve --workload shared-prefix --rate 4 --json serve.json",
)
@_all_options
def serve(json_path: Path | None, png_path: Path | None, **options: Any) -> None:
    """Load any OpenAI-compatible server, and measure it at the client.

    Exit codes: 0 measured, 1 the server can't be reached or every request failed, 2 wrong usage,
    130 interrupted; the figures until then are shown."""
    from bench.serve import plot
    from bench.serve.settings import Settings, SettingsError
    from bench.serve.traces import TraceError, read_trace

    context = click.get_current_context()
    settings = Settings(**options)
    given = {
        name
        for name in options
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    try:
        settings.check(given)
        trace = read_trace(settings.trace) if settings.trace is not None else []
    except (SettingsError, TraceError) as error:
        raise click.UsageError(str(error)) from None
    if png_path is not None:
        plot.require_matplotlib()
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path}: no such folder")
    model, result = asyncio.run(_run(settings, trace))
    _report(settings, model, result, json_path)
    if png_path is not None:
        plot.draw(result.records, settings.titles(model), png_path)
    if result.interrupted:
        context.exit(_EXIT_INTERRUPTED)
    if not any(record.failure is None for record in result.records):
        context.exit(_EXIT_FAILED)


async def _run(settings: "Settings", trace: "list[TraceEntry]") -> "tuple[str, LoadResult]":
    """Raises `ServerUnusable` before any load."""
    from bench.serve.client import Client, Target

    key_file = settings.api_key_file
    api_key = key_file.read_text().strip() if key_file is not None else None
    target = Target(settings.base_url(), api_key, settings.timeout_s)
    with Client(target) as client:
        model = settings.model or await client.first_model()
        await client.probe(settings.body_options(model))
        return model, await _warm_up_and_load(client, settings, model, trace)


async def _warm_up_and_load(
    client: "Client", settings: "Settings", model: str, trace: "list[TraceEntry]"
) -> "LoadResult":
    from bench.serve.load import Load

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        """Once: end in order. Twice is Python's own way."""
        loop.remove_signal_handler(signal.SIGINT)
        click.echo("\nstopping (again: at once)", err=True)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    options = settings.body_options(model)
    if settings.warmup:
        renderer = settings.renderer("/warm-up")
        warm_up = Load(client, renderer, options, settings.warmup_pacing())
        conversations = settings.warmup_conversations(trace)
        result = await _shown(warm_up, "warm-up", settings.warmup, conversations, stop)
        if result.interrupted:
            result.records = []
            return result
    load = Load(client, settings.renderer(), options, settings.pacing)
    # What is alive by now stays: a full collection would stop the clock's loop for its length.
    gc.collect()
    gc.freeze()
    total = settings.num_requests
    if total is None and settings.duration_s is None:
        total = len(trace)
    try:
        return await _shown(load, "", total, settings.conversations(trace), stop)
    finally:
        gc.unfreeze()


async def _shown(
    load: "Load", label: str, total: int | None, conversations: Any, stop: asyncio.Event
) -> "LoadResult":
    """Runs a load with a progress line on a terminal's stderr."""
    from bench.serve.report import progress
    from bench.serve.watch import tick

    if not sys.stderr.isatty():
        return await load.run(conversations, stop)

    def show() -> None:
        tokens_per_s = load.output_tokens / max(load.elapsed_s(), 1e-9)
        line = progress(load.done, load.failed, load.running, total, tokens_per_s)
        click.echo("\r\x1b[K" + f"{label} {line}".strip(), err=True, nl=False)

    showing = asyncio.create_task(tick(_PROGRESS_PERIOD_S, show))
    try:
        return await load.run(conversations, stop)
    finally:
        showing.cancel()
        click.echo("\r\x1b[K", err=True, nl=False)


def _report(settings: "Settings", model: str, result: "LoadResult", json_path: Path | None) -> None:
    from bench.serve import metrics, report

    figures = metrics.figures(result.records, result.client, settings.slo)
    warnings = result.client.warnings(metrics.send_lag_p99_s(result.records))
    click.echo(report.table(figures, settings.titles(model)))
    if problems := report.problems(result.records, warnings):
        click.echo("\n" + problems)
    if json_path is not None:
        everything = {
            "benchmark": "serve",
            "model": model,
            "interrupted": result.interrupted,
            **figures,
            "warnings": "; ".join(warnings),
            **settings.as_flags(),
        }
        json_path.write_text(json.dumps(everything, indent=2, allow_nan=False) + "\n")
