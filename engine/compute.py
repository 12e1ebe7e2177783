"""The compute thread: the only one that touches the device.

Invariant: plans run one at a time in the order they were submitted; each comes back as one result,
or as the exception that lost the executor. The next may be submitted while one runs, so that the
device goes from one to the other without a word from the control thread.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.plan import Executor, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Step:
    """A plan that has run."""

    plan: StepPlan
    result: StepResult
    began_s: float
    ended_s: float
    """By `time.monotonic`."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class ComputeThread:
    """Runs `executor.execute` off the control thread; calls `on_done` after each step."""

    def __init__(self, executor: Executor, on_done: Callable[[], None]) -> None:
        self._executor = executor
        self._on_done = on_done
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Step | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shoal-compute", daemon=True)
        self._began_s = 0.0
        self.num_open = 0
        """Plans submitted whose results have not been taken."""

    @property
    def is_busy(self) -> bool:
        return self.num_open > 0

    def step_age_s(self, now: float) -> float:
        """Since the plan now running began; 0 when none does."""
        began_s = self._began_s
        return now - began_s if began_s else 0.0

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self.num_open += 1
        self._plans.put(plan)

    def take(self) -> Step | None:
        """The next step that has ended, if one has. Raises what lost the executor."""
        try:
            step = self._ended.get_nowait()
        except queue.Empty:
            return None
        if isinstance(step, BaseException):
            raise step
        self.num_open -= 1
        return step

    def lose(self, error: BaseException) -> None:
        """The executor is lost: `take` raises `error`. May be called from any thread."""
        self._ended.put(error)
        self._on_done()

    def stop(self, timeout_s: float) -> None:
        """Lets the running step end, at most `timeout_s` long."""
        self._plans.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._began_s = began_s = time.monotonic()
            try:
                result = self._executor.execute(plan)
                self._ended.put(Step(plan, result, began_s, time.monotonic()))
            except BaseException as error:
                self._ended.put(error)
            self._began_s = 0.0
            self._on_done()
