"""The compute thread: the only one that touches the device.

Invariant: one plan at a time; every plan submitted comes back as one result, or as the exception
that lost the executor.
"""

import queue
import threading
import time
from collections.abc import Callable

from engine.plan import Executor, StepPlan, StepResult


class ComputeThread:
    """Runs `executor.execute` off the control thread; calls `on_done` after each step."""

    def __init__(self, executor: Executor, on_done: Callable[[], None]) -> None:
        self._executor = executor
        self._on_done = on_done
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shoal-compute", daemon=True)
        self.is_busy = False
        self.started_s = 0.0
        """When the plan now running was submitted (`time.monotonic`)."""

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self.started_s = time.monotonic()
        self._plans.put(plan)

    def take(self) -> StepResult | None:
        """The result, if it is there. Raises what the executor raised."""
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self.is_busy = False
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self, timeout_s: float) -> None:
        """Lets the running step end, at most `timeout_s` long."""
        self._plans.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._executor.execute(plan))
            except BaseException as error:
                self._results.put(error)
            self._on_done()
