"""The largest step that a configuration allows, as plans: run once, they show what memory it takes.

Invariant: no step of the configuration computes more tokens, samples more rows, or attends to a
longer context. Block tables repeat the few blocks of a scratch cache: what is computed is noise,
what it takes is not.
"""

import logging

from configs.engine import SchedulerConfig
from engine.plan import ExecutorInfo, Slice, Start, StepPlan
from engine.wire import SamplingParams

_log = logging.getLogger(__name__)

# What draws need most memory for: counts of each token, the raw logits kept, a sorted vocabulary.
_SAMPLING = (
    SamplingParams(temperature=1.0, repetition_penalty=1.1, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=1.0, top_p=0.95, repetition_penalty=1.1, logprobs=1, ignore_eos=True
    ),
)


def largest_plans(
    info: ExecutorInfo, scheduler: SchedulerConfig, max_model_len: int
) -> tuple[StepPlan, StepPlan]:
    """A prefill of the whole budget in as many requests as may run, then a decode of all of them.
    The first request ends at `max_model_len`, the others are as short as the budget lets them be.

    `info` is of an executor over the scratch cache."""
    budget = scheduler.max_num_batched_tokens
    num_runs = min(scheduler.max_num_seqs, budget)
    # One token is left for the decode.
    longest = max(1, max_model_len - 1)
    each, rest = divmod(budget, num_runs)
    starts, slices = [], []
    for run_id in range(num_runs):
        length = min(each + (run_id < rest), longest)
        end = longest if run_id == 0 else length
        num_blocks = end // info.block_size + 1
        starts.append(
            Start(
                run_id,
                token_ids=(0,) * end,
                num_prompt_tokens=end,
                sampling=_SAMPLING[run_id % 2],
                block_ids=tuple(number % info.num_blocks for number in range(num_blocks)),
            )
        )
        slices.append(Slice(run_id, end - length, length, (), samples=True))
    prefill = StepPlan(0, (), (), tuple(starts), tuple(slices))
    return prefill, StepPlan(1, (), (), (), (), decodes=tuple(range(num_runs)))


def within_measured(scheduler: SchedulerConfig, info: ExecutorInfo) -> SchedulerConfig:
    """`scheduler`, with the size of a step kept to what the executor has room for; what is cut is
    logged with both figures."""
    changes = {}
    for name, limit in (
        ("max_num_batched_tokens", info.max_step_tokens),
        ("max_num_seqs", info.max_step_seqs),
    ):
        asked = getattr(scheduler, name)
        if limit is not None and asked > limit:
            _log.warning(
                "scheduler.%s stays at %d: the device's memory was divided for that, and %d "
                "takes a restart of the engine",
                name,
                limit,
                asked,
            )
            changes[name] = limit
    return scheduler.model_copy(update=changes) if changes else scheduler
