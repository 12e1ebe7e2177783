"""A simulated clock: what is due next happens next.

Invariant: what is due at the same time happens in the order it was asked for, so a run is the same
every time.
"""

import heapq
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now_s + seconds, self._count, action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over. Raises `IndexError` when nothing is due any more."""
        while not is_over():
            self.now_s, _, action = heapq.heappop(self._due)
            action()
