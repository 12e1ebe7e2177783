"""Memory: sizing by a share of the device, the host tier's copies, and what the card says.

Invariant: the sized cache is allocated and the largest step run beside it, so that a wrong figure
ends in an error.
"""

import random
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu_check.drive import Driver
from bench.gpu_check.greedy import save_random_model
from bench.gpu_check.parts import Result, Setting
from bench.gpu_check.shapes import TINY, Shape
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from engine.executors.largest_step import largest_plans
from engine.executors.model import ModelExecutor
from engine.nvml import NvmlDevice

_SMALL = Shape(512, 1024, 4, 8, 2, 64, 32000, False)
_NUM_BLOCKS = 64
_STEPS = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=128)


def check_memory(setting: Setting) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(TINY if setting.is_tiny else _SMALL, Path(folder))
        setting.progress("  host tier")
        _host_tier(setting, folder, result)
        if setting.device.type != "cuda":
            result.figures["sizing"] = "not_run: a share of a GPU is asked for on a GPU"
            return result
        setting.progress("  sizing")
        _sizing(setting, folder, result)
    card = NvmlDevice.open(setting.device.index or 0)
    if card is None:
        result.figures["nvml"] = "not_run: NVML cannot be opened"
    else:
        result.figures |= card.read()
    return result


def _host_tier(setting: Setting, folder: str, result: Result) -> None:
    """Prompts that fill the device's cache many times over, twice: the second time they come from
    the host, and their output must be the same."""
    config = EngineConfig(
        model=folder,
        device=str(setting.device),
        dtype="float32",
        cache=CacheConfig(num_blocks=_NUM_BLOCKS, host_memory_bytes=64 << 20),
    )
    executor = ModelExecutor.load(config)
    source = random.Random(1)
    num_prompts = 6 if setting.is_tiny else 24
    vocab_size = executor.info.vocab_size
    prompts = [[source.randrange(vocab_size) for _ in range(200)] for _ in range(num_prompts)]
    driver = Driver(executor, SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=4))
    assert driver.tiers is not None
    counts = driver.tiers.counts
    outputs = []
    for turn in ("cold", "warm"):
        began_s = time.perf_counter()
        outputs.append(driver.greedy(prompts, 8))
        setting.synchronize()
        result.figures[f"host_{turn}_s"] = round(time.perf_counter() - began_s, 4)
    result.figures |= {
        "host_saved_blocks": counts.saved,
        "host_loaded_blocks": counts.loaded,
    }
    result.expect(outputs[0] == outputs[1], "output differs once its KV has been on the host")
    result.expect(counts.loaded > 0, "nothing came back from the host tier")
    executor.close()


@torch.inference_mode()
def _sizing(setting: Setting, folder: str, result: Result) -> None:
    config = EngineConfig(
        model=folder, device=str(setting.device), dtype="bfloat16", scheduler=_STEPS
    )
    executor = ModelExecutor.load(config)
    info = executor.info
    free, total = torch.cuda.mem_get_info(setting.device)
    kv_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token
    for plan in largest_plans(info, _STEPS, info.max_model_len):
        executor.execute(plan)
    used = total - torch.cuda.mem_get_info(setting.device)[0]
    result.figures |= {
        "sized_kv_bytes": kv_bytes,
        "sized_total_bytes": total,
        "sized_used_before_bytes": total - free,
        "sized_used_share": round(used / total, 4),
    }
    result.expect(used <= 0.92 * total, f"the largest step took the device to {used} of {total}")
    result.expect(used >= 0.8 * total, f"only {used} of {total} bytes are put to use")
    executor.close()
