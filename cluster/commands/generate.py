"""`shoal generate`: one prompt, one engine process, text on stdout as it comes."""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from cluster.commands.options import engine_config, engine_options
from configs.engine import EngineConfig

_MAX_LOG_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Figures:
    """What one generation took."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    """From sending the request to its first token."""
    tokens_per_s: float
    """After the first token; 0 when there was only one."""
    finish_reason: str

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), "
            f"{self.completion_tokens} output tokens ({self.finish_reason}), "
            f"first after {self.ttft_s * 1000:.0f} ms, then {self.tokens_per_s:.1f} tok/s"
        )


@click.command()
@click.argument("prompt")
@engine_options
@click.option("--max-tokens", type=click.IntRange(1), help="Most output tokens; else what fits.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default="0: greedy")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, help="Same seed, same text.  [default: random]")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given again.")
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead.")
def generate(prompt: str, raw: bool, as_json: bool, **options: Any) -> None:
    """Generate text from one prompt, with an engine of its own.

    PROMPT may be '-' to read it from stdin. The text goes to stdout, all else to stderr."""
    from cluster.preprocess import GenerationRequest
    from engine.wire import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    request = GenerationRequest(
        prompt=text if raw else [{"role": "user", "content": text}],
        sampling=SamplingParams(temperature=options["temperature"], top_p=options["top_p"]),
        max_tokens=options["max_tokens"],
        seed=options["seed"],
        stops=tuple(stop for stop in options["stop"] if stop),
    )
    config = engine_config(**options)
    parts, figures = _run(config, request, quiet=as_json)
    if as_json:
        click.echo(json.dumps({"text": "".join(parts), **asdict(figures)}, ensure_ascii=False))
    else:
        click.echo()
        click.echo(str(figures), err=True)


def _run(config: EngineConfig, request: Any, quiet: bool) -> tuple[list[str], Figures]:
    from cluster.generation import GenerationFailed
    from cluster.tokenizer import Tokenizer
    from engine.errors import EngineLost
    from engine.launcher import LocalEngine
    from engine.models.resolve import resolve_model

    def progress(phase: str) -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(f"\r\x1b[K{phase} …", err=True, nl=False)

    folder = resolve_model(config.model, progress)
    with tempfile.TemporaryFile("w+") as log:
        try:
            with LocalEngine.start(config, progress, stderr=log) as engine:
                tokenizer = Tokenizer.load(folder)
                if not quiet and sys.stderr.isatty():
                    click.echo("\r\x1b[K", err=True, nl=False)
                return asyncio.run(_generate(engine.endpoint, tokenizer, request, quiet))
        except (EngineLost, GenerationFailed):
            # The engine's own words about its end are worth more than that it ended.
            log.seek(0)
            click.echo(log.read()[-_MAX_LOG_CHARS:], err=True)
            raise


async def _generate(
    endpoint: str, tokenizer: Any, request: Any, quiet: bool
) -> tuple[list[str], Figures]:
    from cluster.generation import Generation
    from cluster.preprocess import ModelLimits, Preprocessor
    from engine.client import EngineClient

    parts: list[str] = []
    times_s: list[float] = []
    finish_reason = ""
    preprocessor = Preprocessor(tokenizer, num_threads=1)
    try:
        async with await EngineClient.connect(endpoint) as client:
            assert client.info is not None
            prepared = await preprocessor.prepare("generate", request, ModelLimits.of(client.info))
            began_s = time.perf_counter()
            stream = await client.add(prepared.choices[0])
            with Generation(prepared, [stream], tokenizer) as generation:
                async for _, delta in generation:
                    if delta.tokens:
                        times_s.append(time.perf_counter())
                    parts.append(delta.text)
                    finish_reason = delta.end or finish_reason
                    if not quiet:
                        click.echo(delta.text, nl=False)
                usage = generation.usage
    finally:
        preprocessor.close()
    first_s, last_s = (times_s[0], times_s[-1]) if times_s else (began_s, began_s)
    num_later = usage.completion_tokens - 1
    figures = Figures(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        ttft_s=first_s - began_s,
        tokens_per_s=num_later / (last_s - first_s) if last_s > first_s else 0.0,
        finish_reason=finish_reason,
    )
    return parts, figures
