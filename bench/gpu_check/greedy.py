"""The paged engine against `generate` of transformers, in float32 on the same device.

Invariant: prompts are chunked, batched and of odd lengths; the model is random, so that nothing but
equal arithmetic gives equal tokens. KV of 8 bits is held against attention over what they leave.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.drive import Driver
from bench.gpu_check.parts import Result, Setting
from bench.gpu_check.shapes import TINY, Shape
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from engine.executors.model import ModelExecutor
from engine.kernels.reference import FLOAT8_MAX

_SMALL = Shape(512, 1024, 4, 8, 2, 64, 4096, False)
_LENGTHS = (1, 5, 16, 17, 33, 64, 100, 301)
_TIPPED = 2
"""Prompts that may get other tokens over KV of 8 bits."""
_CHUNKS = SchedulerConfig(max_num_batched_tokens=96, max_num_seqs=6, long_prefill_threshold=50)


def check_greedy(setting: Setting) -> Result:
    shape, num_tokens = (TINY, 8) if setting.is_tiny else (_SMALL, 64)
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        setting.progress("  making a model")
        module = save_random_model(shape, Path(folder))
        source = random.Random(0)
        prompts = [[source.randrange(shape.vocab_size) for _ in range(n)] for n in _LENGTHS]
        for name, kv_dtype in (("", "auto"), ("fp8_kv_", "fp8")):
            setting.progress(f"  generate, KV {kv_dtype}")
            with _rounded_kv(module) if kv_dtype == "fp8" else contextlib.nullcontext():
                expected = [_generate(setting, module, prompt, num_tokens) for prompt in prompts]
            setting.progress(f"  the engine, KV {kv_dtype}")
            found = _by_the_engine(setting, folder, kv_dtype, prompts, num_tokens)
            _compare(result, name, prompts, found, expected)
    return result


def _by_the_engine(
    setting: Setting, folder: str, kv_dtype: str, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    cache = CacheConfig.model_validate({"num_blocks": 256, "kv_dtype": kv_dtype})
    executor = ModelExecutor.load(
        EngineConfig(model=folder, device=str(setting.device), dtype="float32", cache=cache)
    )
    found = Driver(executor, _CHUNKS).greedy(prompts, num_tokens)
    executor.close()
    return found


def _compare(
    result: Result,
    name: str,
    prompts: list[list[int]],
    found: list[list[int]],
    expected: list[list[int]],
) -> None:
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    equal = sum(one == other for one, other in pairs)
    result.figures |= {f"{name}tokens": len(pairs), f"{name}tokens_equal": equal}
    texts = []
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            texts.append(
                f"{name}a prompt of {len(prompt)} tokens gives {one[place]} as token {place}, "
                f"where generate gives {other[place]}"
            )
    # Between two numbers of 8 bits a last bit of float32 can decide, and then a token differs.
    if name == "" or len(texts) > _TIPPED:
        result.failures += texts


@contextlib.contextmanager
def _rounded_kv(module: Any) -> Iterator[None]:
    """While it is open, the model's own attention sees what 8 bits leave of keys and values."""
    modeling: Any = import_module(type(module).__module__)
    own = modeling.eager_attention_forward

    def attend(owner: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = (
            x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).to(x.dtype)
            for x in (key, value)
        )
        return own(owner, query, key, value, *args, **kwargs)

    modeling.eager_attention_forward = attend
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        modeling.eager_attention_forward = own


def save_random_model(shape: Shape, folder: Path) -> Any:
    """A checkpoint in float32 with weights large enough for attention to matter; and its module."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
    module.save_pretrained(folder)
    return module.eval()


def _generate(setting: Setting, module: Any, prompt: list[int], num_tokens: int) -> list[int]:
    module.to(setting.device)
    ids = torch.tensor([prompt], device=setting.device)
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
