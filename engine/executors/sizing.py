"""How many KV blocks a share of the device has room for, beside weights and the largest step.

Invariant: the step is run on the real model, not estimated.
"""

from dataclasses import replace

import torch

from configs.engine import EngineConfig
from engine.errors import ConfigurationError
from engine.executors.largest_step import largest_plans
from engine.models.device_memory import DeviceMemory
from engine.plan import Executor, ExecutorInfo

SCRATCH_BLOCKS = 2
"""Of the cache that is there while the largest step is measured; they are counted with it."""


@torch.inference_mode()
def sized_by_share(
    scratch: Executor, config: EngineConfig, share: float, memory: DeviceMemory
) -> ExecutorInfo:
    """The description of `scratch`, an executor over a cache of `SCRATCH_BLOCKS` that lets errors
    through, with as many blocks as `share` of the device leaves. Raises `ConfigurationError`, with
    both figures, if a block or a request of `config.max_model_len` does not fit."""
    info, scheduler = scratch.info, config.scheduler
    limit = config.max_model_len or info.max_model_len
    memory.watch()
    try:
        for plan in largest_plans(info, scheduler, limit):
            scratch.execute(plan)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"a step of scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) in "
            f"scheduler.max_num_seqs ({scheduler.max_num_seqs}) requests does not fit beside the "
            f"weights: {error}"
        ) from error
    block_bytes = info.block_size * info.kv_bytes_per_token
    # The last token's KV is never needed. Without a limit, the engine takes what requests fit.
    needed = 1 if config.max_model_len is None else -(-(limit - 1) // info.block_size)
    kv_bytes = memory.figures().kv_bytes(share, max(1, needed) * block_bytes)
    return replace(
        info,
        num_blocks=kv_bytes // block_bytes,
        max_step_tokens=scheduler.max_num_batched_tokens,
        max_step_seqs=scheduler.max_num_seqs,
    )
