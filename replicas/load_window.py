"""How busy an engine is, from its own counters: what the autoscaler is told.

Invariant: only what the core said last counts, and nothing of a core that has ended. Pure; time is
passed in.
"""

from collections.abc import Mapping


class LoadWindow:
    """Counters between two looks at a core's `stats`."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._stats: Mapping[str, float] = {}
        self._token_use = 0.0

    def reset(self) -> None:
        """The core is no more."""
        self._stats = {}
        self._token_use = 0.0

    def add(self, now: float, stats: Mapping[str, float]) -> None:
        """Takes in what a core that is ready says of itself (`EngineCore.stats`)."""
        if self._stats:
            self._token_use = _token_use(self._stats, stats, now - self._seen_s)
        self._stats, self._seen_s = stats, now

    def signals(self) -> dict[str, float]:
        """What `autoscaler.policy` reads of one replica; all zero while no engine is ready."""
        stats = self._stats
        if not stats:
            return dict.fromkeys(SIGNALS, 0.0)
        utilisation = max(
            stats["running"] / stats["max_num_seqs"],
            stats["held_blocks"] / stats["num_blocks"],
            self._token_use,
        )
        return {
            "ready": 1.0,
            "queued_requests": stats["waiting"],
            "queued_tokens": stats["waiting_tokens"],
            "prefill_tokens_per_s": stats["prefill_tokens_per_s"],
            "running": stats["running"],
            "utilisation": min(1.0, utilisation),
        }


SIGNALS = {
    "ready": "1 while the engine serves.",
    "queued_requests": "Requests waiting in the engine.",
    "queued_tokens": "Prompt tokens yet to be computed.",
    "prefill_tokens_per_s": "Prefill rate over busy time.",
    "running": "Requests running.",
    "utilisation": "Largest of running sequences, KV blocks and token budget, each of its limit.",
}


def _token_use(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Share of the token budget that was used: how full the steps were, times how much of the time
    there were any."""
    num_steps = after["steps"] - before["steps"]
    if num_steps <= 0 or seconds <= 0:
        return 0.0
    num_tokens = after["computed_tokens"] - before["computed_tokens"]
    fullness = num_tokens / (num_steps * after["max_num_batched_tokens"])
    return fullness * min(1.0, (after["busy_s"] - before["busy_s"]) / seconds)
