"""`shoal chat`: a conversation with a running Shoal, in the terminal."""

import contextlib
import sys
from typing import Any

import click

from cluster.http_client import DEFAULT_URL, ServerError, get_json, stream_events


@click.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where Shoal serves.")
@click.option("--model", help="Name of the model.  [default: the first one served]")
@click.option("--system", help="A system message to begin with.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of one answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy.  [default: 1]")
def chat(url: str, model: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to a model; an empty line or Ctrl-D ends it, Ctrl-C ends an answer.

    Reads stdin when that is no terminal: one message a line.

    \b
    Examples:
      shoal chat
      echo "What is the capital of France?" | shoal chat --temperature 0
    """
    if model is None:
        models = get_json(url, "/v1/models")["data"]
        if not models:
            raise ServerError(f"{url} serves no model")
        model = models[0]["id"]
    body = {"model": model, "stream": True}
    body |= {name: value for name, value in sampling.items() if value is not None}
    messages = [{"role": "system", "content": system}] if system else []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(f"{model} at {url}", err=True)
    while text := _next_message(is_terminal):
        messages.append({"role": "user", "content": text})
        answer = _answer(url, {**body, "messages": messages})
        messages.append({"role": "assistant", "content": answer})


def _next_message(is_terminal: bool) -> str:
    if not is_terminal:
        return sys.stdin.readline().strip()
    with contextlib.suppress(EOFError):
        return input("> ").strip()
    return ""


def _answer(url: str, body: dict[str, Any]) -> str:
    """Prints the answer as it comes. What Ctrl-C leaves of it still counts as said."""
    parts = []
    with contextlib.suppress(KeyboardInterrupt):
        for event in stream_events(url, "/v1/chat/completions", body):
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                parts.append(text)
                click.echo(text, nl=False)
    click.echo()
    return "".join(parts)
