"""What the control thread does for a step: plan it, commit another, encode what goes to ingresses.

Invariant: all features are on (partial reuse, host tier, overlap), requests come and go, and no
executor's time is in the figures: its results are made up.
"""

import gc
import time
from random import Random

from cache.events import Tier
from cache.keys import key_root
from cache.prefix import PrefixCache
from cache.tiers import LowerTiers
from configs.engine import SchedulerConfig
from engine import wire
from engine.plan import Sampled, StepPlan, StepResult
from engine.request import RequestState
from engine.scheduler import Scheduler
from engine.wire import SamplingParams

_BLOCK = 16
_VOCABULARY = 50_000
_SEED = 7
_PROMPT_TOKENS = 32, 96
_OUTPUT_TOKENS = 40, 400
_PREFILL_TOKENS_PER_S = 2000.0


def measure_planning(num_running: int, num_steps: int) -> dict[str, float]:
    """Microseconds a step."""
    bench = _Planning(num_running)
    for _ in range(num_steps // 10):
        bench.step()
    gc.collect()
    gc.freeze()
    seconds = sorted(bench.step() for _ in range(num_steps))
    gc.unfreeze()
    return {
        "plan_us_p50": 1e6 * seconds[num_steps // 2],
        "plan_us_p99": 1e6 * seconds[num_steps * 99 // 100],
    }


class _Planning:
    def __init__(self, num_running: int) -> None:
        self._rng = Random(_SEED)
        self._num_running = num_running
        self._count = 0
        num_blocks = num_running * 40
        host = PrefixCache(2 * num_blocks, tier=Tier.HOST)
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192),
            PrefixCache(num_blocks, block_size=_BLOCK),
            _BLOCK,
            tiers=LowerTiers(host),
        )
        self._root = key_root(b"k" * 32, "bench", "", _BLOCK)
        self._flying: StepPlan | None = None

    def step(self) -> float:
        """Plans a step while the one before it is in flight, and commits that."""
        while len(self._scheduler.requests) < self._num_running:
            self._add()
        began_s = time.perf_counter()
        plan = self._scheduler.schedule(float(self._count), _PREFILL_TOKENS_PER_S)
        planned_s = time.perf_counter() - began_s
        if self._flying is None:
            self._flying = plan
            return planned_s
        result = self._result(self._flying)
        began_s = time.perf_counter()
        outputs = self._scheduler.commit(result)
        items = tuple([item for _, item in outputs])
        wire.encode(wire.TokenBatch(result.step, self._count, items))
        self._scheduler.cache.drain_events()
        assert self._scheduler.tiers is not None
        self._scheduler.tiers.host.drain_events()
        seconds = planned_s + time.perf_counter() - began_s
        self._flying = plan
        return seconds

    def _add(self) -> None:
        self._count += 1
        rng = self._rng
        token_ids = [rng.randrange(_VOCABULARY) for _ in range(rng.randint(*_PROMPT_TOKENS))]
        sampling = SamplingParams(max_tokens=rng.randint(*_OUTPUT_TOKENS), seed=self._count)
        request = RequestState(
            key=("bench", str(self._count)),
            attempt=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            root=self._root,
            end_token_ids=frozenset(),
        )
        self._scheduler.add(request, float(self._count))

    def _result(self, plan: StepPlan) -> StepResult:
        draw = self._rng.randrange
        run_ids = [item.run_id for item in plan.slices if item.samples]
        sampled = {run: Sampled((draw(_VOCABULARY),)) for run in (*run_ids, *plan.decodes)}
        return StepResult(plan.step, sampled)
