"""`shoal batch`: a file of requests to a running Shoal, a file of answers back.

Invariant: stdout has nothing but the summary that `--json` asks for; the exit code says how it
ended. Neither Ray nor torch is imported: it is a client, on a laptop or as a job on the cluster.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from cluster.batch import job as batches
from cluster.batch.capacity import MAX_CONCURRENCY
from cluster.batch.report import Tally, summary
from cluster.batch.retry import RetryPolicy
from cluster.batch.runner import Limits
from cluster.batch.server import Target, base_url
from cluster.http_client import DEFAULT_URL
from engine.errors import ShoalError

_KEY_VARIABLE = "SHOAL_API_KEY"
_EXIT_FAILED = 1
_EXIT_ROWS_FAILED = 3
_EXIT_INTERRUPTED = 130
_PATH = click.Path(dir_okay=False, path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("source", metavar="IN.jsonl", type=_INPUT)
@click.argument("target", metavar="OUT.jsonl", type=_PATH)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where Shoal serves.")
@click.option("--model", help="The model of rows that name none.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, MAX_CONCURRENCY),
    help="Most requests at once.  [default: what keeps the cluster's engines busy]",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 100),
    default=5,
    show_default=True,
    help="More attempts at a row after 408, 429, 5xx or no answer.",
)
@click.option("--retry-failed", is_flag=True, help="Take errors out of OUT.jsonl; run them again.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=600,
    show_default=True,
    help="Seconds for one attempt; 0: any number.",
)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    help="Seconds to wait for a server that is not there, or not ready.",
)
@click.option(
    "--api-key-file", type=_INPUT, help=f"File with the API key.  [default: ${_KEY_VARIABLE}]"
)
@click.option("--json", "as_json", is_flag=True, help="A summary on stdout, as flat JSON.")
def batch(source: Path, target: Path, **options: Any) -> None:
    """Answer a file of requests: OpenAI batch lines in, OpenAI batch output lines out.

    Each row of IN.jsonl gets one line in OUT.jsonl, in the order in which they end. Ended in
    whatever way, the same command goes on where it was: rows that are in OUT.jsonl are not run
    again. Rows are known by custom_id; add to the input at its end while it has rows without one.

    Exit codes: 0 every row succeeded, 3 every row has its outcome and some are errors, 1 it could
    not go on, 2 wrong usage, 130 or 143 stopped by a signal.

    \b
    Examples:
      shoal batch in.jsonl out.jsonl --model default
      shoal batch in.jsonl out.jsonl --retry-failed
      shoal batch in.jsonl out.jsonl --url https://shoal.example.com --api-key-file key.txt
      ray job submit --address http://HEAD:8265 -- \\
        shoal batch /shared/in.jsonl /shared/out.jsonl --wait 600
    """
    tally = Tally()
    job = _job(source, target, options)
    began_s = time.monotonic()
    signal_number = None
    try:
        signal_number = batches.run(job, tally)
    except KeyboardInterrupt:
        signal_number = _EXIT_INTERRUPTED - 128
    except ShoalError as error:
        if not tally.rows:
            raise
        click.echo(f"Error: {error}", err=True)
        _tell(tally, began_s, options["as_json"], is_complete=False)
        sys.exit(_EXIT_FAILED)
    _tell(tally, began_s, options["as_json"], is_complete=signal_number is None)
    if signal_number is not None:
        sys.exit(128 + signal_number)
    if tally.failed or tally.failed_before:
        sys.exit(_EXIT_ROWS_FAILED)


def _job(source: Path, target: Path, options: dict[str, Any]) -> batches.Job:
    try:
        url = base_url(options["url"])
    except ValueError as error:
        raise click.UsageError(f"--url: {error}") from None
    return batches.Job(
        source,
        target,
        Target(url, _api_key(options["api_key_file"]), options["timeout"] or None),
        Limits(
            options["concurrency"] or MAX_CONCURRENCY,
            options["wait"],
            RetryPolicy(options["retries"]),
        ),
        options["model"],
        options["retry_failed"],
    )


def _api_key(file: Path | None) -> str | None:
    """Never from the command line, which every user of the machine can read."""
    try:
        text = file.read_text() if file is not None else os.environ.get(_KEY_VARIABLE, "")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--api-key-file: {error}") from None
    key = text.strip()
    if not key.isascii() or not all(character.isprintable() for character in key):
        raise click.UsageError("the API key must be one line of ASCII")
    return key or None


def _tell(tally: Tally, began_s: float, as_json: bool, is_complete: bool) -> None:
    seconds = time.monotonic() - began_s
    click.echo(summary(tally, seconds), err=True)
    if not is_complete:
        click.echo("not all rows are done: to go on, run the same command again", err=True)
    if as_json:
        click.echo(json.dumps(tally.figures(seconds)))
