"""Watches the client itself: a client that is slow measures its own slowness.

Invariant: costs a hundred wake-ups a second, whatever the load.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_PERIOD_S = 0.01
_MAX_CPU_SHARE = 0.8
_MAX_LAG_P99_S = 0.005
_MAX_SEND_LAG_P99_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What the client itself took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    lag_p99_s: float = 0.0
    """By which the event loop woke too late: a chunk was seen up to this much after it came."""
    lag_max_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        """Of one core: all of the client runs in the thread of its event loop."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def warnings(self, send_lag_p99_s: float) -> list[str]:
        """Why the figures may be the client's and not the server's; empty when they aren't."""
        found = []
        if self.cpu_share > _MAX_CPU_SHARE:
            found.append(f"the client used {self.cpu_share:.0%} of its core")
        if self.lag_p99_s > _MAX_LAG_P99_S:
            found.append(f"the client's event loop woke {self.lag_p99_s * 1000:.1f} ms late (p99)")
        if send_lag_p99_s > _MAX_SEND_LAG_P99_S:
            found.append(
                f"requests went out {send_lag_p99_s * 1000:.1f} ms late (p99); latency counts it"
            )
        return found


class LoadWatch:
    """Runs beside a load, in the same event loop."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._began_cpu_s = time.thread_time()
        self._lags_s: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            due_s = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._lags_s.append(max(0.0, time.perf_counter() - due_s))

    async def finish(self) -> ClientLoad:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        lags_s = self._lags_s or [0.0]
        return ClientLoad(
            wall_s=time.perf_counter() - self._began_s,
            cpu_s=time.thread_time() - self._began_cpu_s,
            lag_p99_s=float(np.percentile(lags_s, 99)),
            lag_max_s=max(lags_s),
        )


async def tick(period_s: float, show: Callable[[], None]) -> None:
    """Calls `show` every `period_s` seconds until it is cancelled."""
    while True:
        show()
        await asyncio.sleep(period_s)
