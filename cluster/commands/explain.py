"""`shoal explain`: why a request went where it went, and where its time went."""

import json
from typing import Any
from urllib.parse import quote

import click

from cluster.http_client import DEFAULT_URL, ServerError, get_json

_COLUMNS = ("ENGINE", "CACHED", "SAVES", "WAIT", "SCORE")


@click.command()
@click.argument("request_id")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Where Shoal serves.")
@click.option("--json", "as_json", is_flag=True, help="The server's own report.")
def explain(request_id: str, url: str, as_json: bool) -> None:
    """Explain a request by its id: that of the answer, also in its X-Request-Id header.

    Any ingress answers for all. The latest requests are kept (`ingress.explained_requests`), while
    they run too. Exit codes: 0 it is explained, 1 it is not known, or there is no answer.

    \b
    Example:
      shoal explain chatcmpl-1f0c9b3d5a7e --url http://127.0.0.1:8000
    """
    report = get_json(url, f"/explain/{quote(request_id, safe='')}")
    if "error" in report:
        raise ServerError(report["error"]["message"])
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo("\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> list[str]:
    state = "over" if report["is_over"] else "running"
    lines = [
        f"{report['request_id']}  model {report['model']}, {state}, ingress {report['ingress']}",
        f"tokens: {report['prompt_tokens']} prompt, {report['completion_tokens']} completion; "
        f"{report['cached_tokens']} cached, {report['predicted_cached_tokens']} predicted",
    ]
    for number, decision in enumerate(report["decisions"]):
        lines += ["", _headline(number, decision), *_table(decision["candidates"])]
    stages = report["stages_s"]
    ttft_s = stages.get("ttft")
    if ttft_s is not None:
        lines += ["", f"first token after {_ms(ttft_s + stages.get('proxy', 0.0))}:"]
    named = ("proxy", "preprocess", "route", "admit", "engine")
    lines += [f"  {name:<11} {_ms(stages[name]):>10}" for name in named if name in stages]
    within = [name for name in ("queue", "prefill") if name in stages]
    lines += [f"    {name:<9} {_ms(stages[name]):>10}" for name in within]
    return lines


def _headline(number: int, decision: dict[str, Any]) -> str:
    word = "went to" if number == 0 else "went on at"
    tied = f", {decision['num_tied']} tied" if decision["num_tied"] > 1 else ""
    return f"{word} {decision['engine']}: {decision['reason']}, of {decision['num_engines']}{tied}"


def _table(candidates: list[dict[str, Any]]) -> list[str]:
    rows = [_COLUMNS]
    for one in candidates:
        seconds = (_ms(one[name]) for name in ("saved_s", "wait_s", "score_s"))
        rows.append((one["engine"], str(one["cached_tokens"]), *seconds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
