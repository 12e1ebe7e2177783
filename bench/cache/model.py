"""What the cache costs and gives beside the real model.

Invariant: shares are of the wall time of the same steps, timers and all; times to first token are a
client's, of one prompt that is computed first, and then found in one tier after the other.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from cache.keys import key_root
from cache.prefix import PrefixCache
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig, TransportConfig
from configs.secret import write_secret
from engine.attempt import EngineRequest
from engine.client import EngineClient
from engine.launcher import LocalEngine
from engine.request import RequestState
from engine.scheduler import Scheduler
from engine.wire import SamplingParams

_BATCH = 64
_PROMPT_TOKENS = 96
_OUTPUT_TOKENS = 48
_TIER_TOKENS = 2049
_SEED = 3
_METHODS = (
    *("advance", "match", "start", "borrow", "grow", "publish"),
    *("release", "enter_plan", "leave_plan", "drain_events"),
)
"""Of `PrefixCache`, as a scheduler uses it."""
_FIRST_PLAIN_ID = 1000
"""Ids below may be special tokens."""


class _TimedCache(PrefixCache):
    """Adds up the time in everything that a scheduler calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = 0.0
        for name in _METHODS:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began_s

        return call


class _TimedRequest(RequestState):
    """Its keys are hashed on the cache's account."""

    __slots__ = ("cache",)
    cache: _TimedCache

    def extend_keys(self, num_blocks: int) -> None:
        began_s = time.perf_counter()
        super().extend_keys(num_blocks)
        self.cache.seconds += time.perf_counter() - began_s


def measure_share() -> dict[str, float]:
    """Time in the cache, in per cent of the steps' wall time, when nothing is ever found: 64
    requests at once, full of tokens drawn at random."""
    from engine.executors.model import ModelExecutor

    executor = ModelExecutor.load(EngineConfig(cache=CacheConfig(num_blocks=1024)))
    info, rng = executor.info, Random(_SEED)
    cache = _TimedCache(info.num_blocks, block_size=info.block_size)
    scheduler = Scheduler(SchedulerConfig(), cache, info.block_size)
    root = key_root(b"k" * 32, info.fingerprint, "", info.block_size)
    began_s = time.perf_counter()
    for number in range(_BATCH):
        request = _TimedRequest(
            key=("bench", str(number)),
            attempt=0,
            token_ids=_prompt(rng, info.vocab_size, _PROMPT_TOKENS),
            num_prompt_tokens=_PROMPT_TOKENS,
            sampling=SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True),
            root=root,
            end_token_ids=frozenset(),
        )
        request.cache = cache
        scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(executor.execute(plan))
        cache.drain_events()
    wall_s = time.perf_counter() - began_s
    executor.close()
    return {"cache_share_pct_at_zero_hits": 100 * cache.seconds / wall_s}


def measure_tiers() -> dict[str, float]:
    """Milliseconds to the first token of 2,049 tokens: computed, and with all but the last of them
    on the device, in host memory, and on the disk of an engine that has been restarted."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        return asyncio.run(_measure_tiers(Path(name)))


async def _measure_tiers(folder: Path) -> dict[str, float]:
    write_secret(folder / "secret")
    config = EngineConfig(
        # Room for one such prompt on the device, and for all of them in host memory.
        cache=CacheConfig(num_blocks=160, host_memory_bytes=1 << 30, disk_path=str(folder / "kv")),
        cluster_secret_file=str(folder / "secret"),
        transport=TransportConfig(
            listen=f"ipc://{folder}/requests", listen_stream=f"ipc://{folder}/stream"
        ),
    )
    rng = Random(_SEED)
    figures: dict[str, float] = {}
    with LocalEngine.start(config) as engine:
        async with await EngineClient.connect(engine.endpoint) as client:
            assert client.info is not None
            vocab_size = client.info.vocab_size
            prompt, other = (_prompt(rng, vocab_size, _TIER_TOKENS) for _ in range(2))
            figures["ttft_2049_computed_ms"] = await _ttft_ms(client, prompt, 0)
            figures["ttft_2049_device_ms"] = await _ttft_ms(client, prompt, 2048)
            await _ttft_ms(client, other, 0)
            figures["ttft_2049_host_ms"] = await _ttft_ms(client, prompt, 2048)
    with LocalEngine.start(config) as engine:
        async with await EngineClient.connect(engine.endpoint) as client:
            # The first step of a process is slower than all others.
            await _ttft_ms(client, _prompt(rng, vocab_size, 40), 0)
            figures["ttft_2049_disk_ms"] = await _ttft_ms(client, prompt, 2048)
    return figures


async def _ttft_ms(client: EngineClient, prompt: list[int], cached: int) -> float:
    """Raises `RuntimeError` if another number of tokens was found."""
    began_s = time.perf_counter()
    stream = await client.add(EngineRequest(prompt, SamplingParams(max_tokens=1)), 60)
    items = [item async for item in stream]
    if items[-1].cached_tokens != cached:
        raise RuntimeError(f"{items[-1].cached_tokens} tokens were cached, not {cached}")
    return 1000 * (time.perf_counter() - began_s)


def _prompt(rng: Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(_FIRST_PLAIN_ID, vocab_size) for _ in range(length)]
