"""An executor that computes nothing: it says what a step costs, and makes tokens up.

Invariant: a token depends on the one before it and its position alone, so that equal prompts have
equal answers and their blocks equal keys. KV is not simulated: what would be wrong in a cache is
not seen here (`engine.executors.simulated` sees it), only what its hits are worth.
"""

from bench.cluster.shape import Shape
from engine.plan import Sampled, StepPlan, StepResult

_VOCAB = 32_000
_FACTOR = 48_271
"""Of a Lehmer generator."""


class CostExecutor:
    """`execute` returns at once; `StepResult.compute_s` is the time the step takes."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._length: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        length, last = self._length, self._last
        for run_id in plan.ended:
            length.pop(run_id, None)
            last.pop(run_id, None)
        for start in plan.starts:
            length[start.run_id] = len(start.token_ids)
            last[start.run_id] = start.token_ids[-1]
        context = sum(item.start + item.length for item in plan.slices)
        sampled = {}
        samplers = [item.run_id for item in plan.slices if item.samples]
        for run_id in (*samplers, *plan.decodes):
            position = length[run_id]
            length[run_id] = position + 1
            token_id = last[run_id] = (last[run_id] * _FACTOR + position) % _VOCAB
            sampled[run_id] = Sampled((token_id,))
        context += sum(map(length.__getitem__, plan.decodes))
        shape = self._shape
        cost_s = shape.step_s + shape.token_s * plan.num_tokens + shape.context_token_s * context
        return StepResult(plan.step, sampled, compute_s=cost_s)
