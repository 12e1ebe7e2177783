"""How much of a request's time to first token was its engine's own.

Invariant: the engine's own time has the same two ends on every server, on the clock of the engine's
own process: from when its scheduler took the request until the step that made the first token was
over. Everything else counts as added, for all alike: HTTP, routing, tokenizing, the way
through the socket between front and engine in both directions, and detokenizing.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bench.peers.front_client import get
from bench.peers.setup import PeerMissing
from bench.serve.http import ConnectionPool

_COUNTED_S = 5.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One request, as its server tells of it."""

    engine_s: float
    cached_tokens: int
    """Of the prompt, found in the cache."""
    parts_s: Mapping[str, float]
    """What the server can name of the rest; none of it twice."""


class EngineTime(Protocol):
    """Asks one server about requests that come one at a time."""

    async def begin(self) -> None:
        """Before a request."""
        ...

    async def share(self, request_id: str) -> EngineShare:
        """Of the one request since `begin`. Raises `PeerMissing` where it was not the only one."""
        ...


class VllmTime:
    """From the metrics of vLLM's server, whose sums grow by exactly one request's figures between
    two readings.

    The engine's time is `request_queue_time_seconds` and `request_prefill_time_seconds` together:
    from the event that the scheduler records as it takes a request, to the time that a step's
    outputs are stamped with when they are put together, both by the engine core.
    `time_to_first_token_seconds` also has the tokenizer and the socket both ways: it
    begins in the front end as the prompt is rendered, and ends when the output is there again. What
    it has beyond the engine's time is the part `frontend`.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._before: Mapping[str, float] = {}

    async def begin(self) -> None:
        self._before = await self._read()

    async def share(self, request_id: str) -> EngineShare:
        deadline_s = time.monotonic() + _COUNTED_S
        # It counts a request a moment after the answer has gone out.
        while time.monotonic() < deadline_s:
            if (share := share_between(self._before, await self._read())) is not None:
                return share
            await asyncio.sleep(_POLL_S)
        raise PeerMissing(f"its metrics do not count a request {_COUNTED_S:g} s after its answer")

    async def _read(self) -> Mapping[str, float]:
        return totals((await get(self._pool, "/metrics")).decode())


class ShoalTime:
    """From the explanation of the request, in which the engine's time is `queue` and `prefill`, as
    the engine has sent them along with the first token.

    The parts are those of the ingress; `sockets` is from handing the request to the engine's socket
    until its first token was read off it, less the engine's time. What came before the ingress and
    after its first token is in none of them.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def begin(self) -> None:
        pass

    async def share(self, request_id: str) -> EngineShare:
        found = _decode_explanation(await get(self._pool, f"/explain/{request_id}"))
        stages = found.stages_s
        engine_s = stages["queue"] + stages["prefill"]
        return EngineShare(
            engine_s,
            found.cached_tokens,
            {
                "preprocess": stages["preprocess"],
                "route": stages["route"],
                "sockets": stages["admit"] + stages["engine"] - engine_s,
            },
        )


class _Explanation(msgspec.Struct):
    cached_tokens: int
    stages_s: dict[str, float]


_decode_explanation = msgspec.json.Decoder(_Explanation).decode


def totals(text: str) -> Mapping[str, float]:
    """By name, the sum over all labels, of metrics in Prometheus' text format without times."""
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            labelled, _, value = line.rpartition(" ")
            found[labelled.partition("{")[0]] += float(value)
    return found


def share_between(before: Mapping[str, float], after: Mapping[str, float]) -> EngineShare | None:
    """The one request that vLLM has counted between two readings; None if it has not yet. Raises
    `PeerMissing` for more than one."""

    def grown(name: str) -> float:
        return after.get(f"vllm:{name}", 0.0) - before.get(f"vllm:{name}", 0.0)

    counted = grown("request_prefill_time_seconds_count")
    if not counted:
        return None
    if counted > 1:
        raise PeerMissing(f"its metrics count {counted:g} requests: it is not ours alone")
    engine_s = grown("request_queue_time_seconds_sum") + grown("request_prefill_time_seconds_sum")
    frontend_s = grown("time_to_first_token_seconds_sum") - engine_s
    cached = round(grown("prompt_tokens_cached_total"))
    return EngineShare(engine_s, cached, {"frontend": frontend_s})
