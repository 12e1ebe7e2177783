"""Streams of the default model whose engines are killed, against the same streams undisturbed.

In float32 the two must be equal, but where the model itself hardly prefers one token: there the
order of additions decides, which depends on what else is in a step. In bfloat16 that is often so.
"""

import asyncio
import random
import signal
import time
from typing import Literal

from bench.failover.chaos import recoveries
from bench.failover.streams import Load, Record
from bench.figures import Figures, Progress
from bench.pool import Pool, opened
from cluster.preprocess import GenerationRequest
from configs.engine import EngineConfig
from engine.wire import SamplingParams

_NAMES = ("a", "b")
_TIE = 1e-3
"""Difference of the two best logits below which either may win."""
_TOPICS = ("the sea", "an old lighthouse", "bread", "the first snow", "a lost key", "rivers")


def _requests(count: int, max_tokens: int) -> list[GenerationRequest]:
    """Two of three greedy, the third drawn with its own seed."""
    made = []
    for number in range(count):
        text = f"Write story number {number}, about {_TOPICS[number % len(_TOPICS)]}."
        temperature = 0.8 if number % 3 == 2 else 0.0
        sampling = SamplingParams(temperature=temperature, logprobs=2, ignore_eos=True)
        messages = [{"role": "user", "content": text}]
        made.append(GenerationRequest(messages, sampling, max_tokens=max_tokens, seed=number))
    return made


async def measure_real(
    dtype: Literal["float32", "bfloat16"],
    num_streams: int,
    max_tokens: int,
    num_kills: int,
    progress: Progress,
) -> Figures:
    """Kills come no sooner after one another than twice what the first took to recover from, and
    not before the killed engine is back."""
    asked = _requests(num_streams, max_tokens)
    pool = Pool(EngineConfig(dtype=dtype, threads=1))
    progress(f"{dtype}: two engines of the default model")
    async with opened(pool, _NAMES):
        progress(f"{dtype}: {num_streams} streams undisturbed")
        whole = Load(pool, asked, "whole")
        await whole.run()
        progress(f"{dtype}: the same, {num_kills} kills")
        load = Load(pool, asked, "killed")
        await load.run(_kill(pool, load, num_kills))
    pairs = list(zip(whole.records, load.records, strict=True))
    identical = sum(mine.tokens == other.tokens for other, mine in pairs)
    name = "real" if dtype == "float32" else "bf16"
    return {
        f"{name}_streams": num_streams,
        f"{name}_stream_tokens": max_tokens,
        f"{name}_kills": len(load.faults),
        f"{name}_hit": sum(len(fault.recovery_s) for fault in load.faults),
        f"{name}_client_errors": sum(record.error is not None for record in load.records),
        f"{name}_identical": identical,
        f"{name}_identical_pct": round(100 * identical / num_streams, 1),
        f"{name}_excused": sum(_is_tie(other, mine) for other, mine in pairs),
        **recoveries(f"{name}_recovery", load.faults),
    }


def _is_tie(whole: Record, record: Record) -> bool:
    """Whether the first token that differs is a greedy choice between two equals."""
    for at, (wanted, got) in enumerate(zip(whole.tokens, record.tokens, strict=False)):
        if wanted != got:
            logprobs = whole.logprobs[at]
            if whole.request.sampling.temperature or logprobs is None:
                return False
            (_, best), (_, second), *_ = logprobs.top
            return best - second < _TIE
    return False


async def _kill(pool: Pool, load: Load, num_kills: int) -> None:
    random_ = random.Random(10)
    await pool.until(lambda: all(record.tokens or record.is_over for record in load.records), 300)
    lull_s = 0.5
    for _ in range(num_kills):
        await asyncio.sleep(lull_s * random_.uniform(1, 1.5))
        name = load.any_busy(random_)
        if name is None:
            return
        began_s = time.monotonic()
        await load.recovered(load.fault(name, signal.SIGKILL))
        lull_s = 2 * (time.monotonic() - began_s)
        await pool.begin(name)
        await pool.ready(len(_NAMES))
