"""How often a core may be restarted, and whether it has stalled. Pure; time is passed in."""

from collections import deque
from collections.abc import Mapping


class RestartBudget:
    """Counts restarts; how many are allowed may change between two of them."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def take(self, now: float, limit: int, window_s: float) -> bool:
        """Uses one of the `limit` within `window_s` seconds, if there is one left."""
        while self._times_s and self._times_s[0] <= now - window_s:
            self._times_s.popleft()
        if len(self._times_s) >= limit:
            return False
        self._times_s.append(now)
        return True


class StallWatch:
    """Looks at one core's own figures, again and again."""

    def __init__(self) -> None:
        self._last: tuple[float, bool] | None = None
        self._since_s = 0.0
        """When it was first seen with this many steps behind it, and with work."""

    def look(self, now: float, stats: Mapping[str, float], stall_s: float) -> str:
        """Why it counts as stalled; empty if it does not. `stats` is `EngineCore.stats`."""
        patience_s = max(stall_s, 5 * stats["step_s"])
        if stats["step_age_s"] > patience_s:
            return f"a step has run for {stats['step_age_s']:.0f} s"
        has_work = stats["running"] + stats["waiting"] > 0
        seen = stats["steps"], has_work
        if not has_work or stats["step_age_s"] or seen != self._last:
            self._last, self._since_s = seen, now
        if now - self._since_s > patience_s:
            return f"it has work, and has made no step for {now - self._since_s:.0f} s"
        return ""
