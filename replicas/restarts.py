"""How often a core may be restarted, and whether a step has stalled. Pure; time is passed in."""

from collections import deque


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


def has_stalled(step_age_s: float, usual_step_s: float, stall_s: float) -> bool:
    """Whether a step has run for too long: beyond `stall_s` and five times the usual."""
    return step_age_s > max(stall_s, 5 * usual_step_s)
