"""How many requests at once keep the engines of a cluster busy, from what `/ready` says of them.

Invariant: pure; a report and the models in, a number out:

    concurrency = 1.25 * (sum of max_num_seqs over the ready engines of the models)

between 1 and a limit. The quarter more is what waits in the engines' queues, so that a sequence
that ends is followed by another in the next step.
"""

import math
from collections.abc import Iterator, Set
from typing import Any

import msgspec

DEFAULT_SEQS = 64
"""What is taken for an engine that does not say, or a server that is none of Shoal's."""
MAX_CONCURRENCY = 4096
_KEPT_BUSY = 1.25
_READY = "ready"
_NOT_YET = ("loading", "draining", "stalled", "failed")


class _Engine(msgspec.Struct, frozen=True):
    state: str = ""
    max_num_seqs: int = DEFAULT_SEQS


class _Model(msgspec.Struct, frozen=True):
    state: str = ""
    detail: str = ""
    engines: list[_Engine] = []


class ReadyReport(msgspec.Struct, frozen=True):
    """What `GET /ready` says, as far as it matters here."""

    models: dict[str, _Model]


def parse_report(body: Any) -> ReadyReport | None:
    """`body` is the bytes of an answer. None if it is no report."""
    try:
        return msgspec.json.decode(body, type=ReadyReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def concurrency(report: ReadyReport | None, names: Set[str], limit: int) -> int:
    """`names` are the models that rows ask for. No report: as for one engine that does not say."""
    seqs = DEFAULT_SEQS
    if report is not None:
        engines = (engine for model in _used(report, names) for engine in model.engines)
        seqs = sum(max(engine.max_num_seqs, 1) for engine in engines if engine.state == _READY)
    return min(max(math.ceil(_KEPT_BUSY * seqs), 1), limit)


def why_not_ready(report: ReadyReport, names: Set[str]) -> str | None:
    """None if a request can be answered by one of the models. A model in a state that is not known
    here, say of one that wakes when it is asked, is taken to answer."""
    states = [model.state for model in _used(report, names)]
    if any(state not in _NOT_YET for state in states):
        return None
    if not states:
        return "no model is served"
    listed = ", ".join(f"{name} is {model.state}" for name, model in report.models.items())
    details = "; ".join(model.detail for model in report.models.values() if model.detail)
    return f"{listed} ({details})" if details else listed


def _used(report: ReadyReport, names: Set[str]) -> Iterator[_Model]:
    """All of them if a name is not among them: it can be an alias."""
    selected = names if names and names <= report.models.keys() else report.models.keys()
    return (report.models[name] for name in selected)
