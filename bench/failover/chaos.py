"""Many streams on simulated engines that are killed and stopped at random.

The simulated token is a hash of the whole history, so an output is right only if every token before
was delivered once and carried over: it is compared with what the hash says without any engine.
"""

import asyncio
import random
import signal
from collections.abc import Sequence

import numpy as np

from bench.failover.streams import Fault, Load, Record
from bench.figures import Figures, Progress
from bench.pool import Pool, opened
from cluster.placing import RequestCondemned
from cluster.preprocess import GenerationRequest, TokenPrompt
from configs.engine import CacheConfig, EngineConfig, SimulationConfig, TransportConfig
from engine.executors.simulated import EOS_TOKEN_ID, reference_output
from engine.wire import SamplingParams

_NAMES = ("a", "b", "c", "d")
_LEASE_S = 2.0
_STEP_S = 0.025
_PROMPT_TOKENS = 64
_VOCAB_SIZE = 50_000
_LULL_S = (0.2, 1.0)
"""Between all going on after a fault and the next one."""


def simulated() -> EngineConfig:
    """Its end token is never drawn, so that a prompt with it is the one that kills."""
    return EngineConfig(
        executor="simulated",
        cache=CacheConfig(num_blocks=8192),
        simulation=SimulationConfig(
            vocab_size=_VOCAB_SIZE,
            max_model_len=8192,
            step_s=_STEP_S,
            poison_token_id=EOS_TOKEN_ID,
        ),
        transport=TransportConfig(lease_s=_LEASE_S),
    )


def requests(random_: random.Random, count: int, max_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            TokenPrompt(tuple(random_.choices(range(1, _VOCAB_SIZE), k=_PROMPT_TOKENS))),
            SamplingParams(temperature=1.0),
            max_tokens=max_tokens,
            seed=number,
        )
        for number in range(count)
    ]


def is_right(record: Record, simulation: SimulationConfig) -> bool:
    """Whether its output is what the simulated model answers."""
    prompt, max_tokens = record.request.prompt, record.request.max_tokens
    assert isinstance(prompt, TokenPrompt)
    assert max_tokens is not None
    sampling = SamplingParams(max_tokens=max_tokens, seed=record.request.seed or 0)
    return record.tokens == reference_output(prompt.ids, sampling, simulation)


async def measure_chaos(
    num_streams: int, max_tokens: int, num_waves: int, progress: Progress
) -> Figures:
    """Each wave of streams sees one kill and one stop: no more than a request may survive."""
    random_ = random.Random(8)
    pool = Pool(simulated())
    loads: list[Load] = []
    async with opened(pool, _NAMES):
        for wave in range(num_waves):
            progress(f"{num_streams} streams, kills and stops: wave {wave + 1} of {num_waves}")
            load = Load(pool, requests(random_, num_streams, max_tokens), f"wave{wave}")
            loads.append(load)
            await load.run(_disturb(pool, load, random_))
            await pool.ready(len(_NAMES))
    records = [record for load in loads for record in load.records]
    faults = [fault for load in loads for fault in load.faults]
    kills = [fault for fault in faults if fault.how is signal.SIGKILL]
    stops = [fault for fault in faults if fault.how is signal.SIGSTOP]
    simulation = pool.config.simulation
    finished = sum(len(record.tokens) == max_tokens for record in records)
    return {
        "streams": len(records),
        "stream_tokens": max_tokens,
        "engines": len(_NAMES),
        "step_s": _STEP_S,
        "lease_s": _LEASE_S,
        "finished_pct": 100 * finished / len(records),
        "identical_pct": 100 * sum(is_right(r, simulation) for r in records) / len(records),
        "client_errors": sum(record.error is not None for record in records),
        "kills": len(kills),
        "stops": len(stops),
        "resumed": pool.model.placer.counts["resumed"],
        **recoveries("recovery", faults),
        **recoveries("kill_recovery", kills),
        **recoveries("stop_recovery", stops),
    }


def recoveries(name: str, faults: Sequence[Fault]) -> Figures:
    """Seconds from a fault until a stream's next token from elsewhere."""
    seconds = [each for fault in faults for each in fault.recovery_s]
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, (50, 99))
    return {f"{name}_p50_s": round(float(p50), 3), f"{name}_p99_s": round(float(p99), 3)}


async def _disturb(pool: Pool, load: Load, random_: random.Random) -> None:
    await pool.until(lambda: all(record.tokens or record.is_over for record in load.records))
    for how in random_.sample((signal.SIGKILL, signal.SIGSTOP), 2):
        await asyncio.sleep(random_.uniform(*_LULL_S))
        name = load.any_busy(random_)
        if name is None:
            return
        fault = load.fault(name, how)
        await load.recovered(fault)
        if how is signal.SIGSTOP:
            # It wakes with all that it had, and finds that nobody wants it.
            pool.kill(name, signal.SIGCONT)
            await asyncio.sleep(0.2)
            pool.kill(name)
        await pool.begin(name)


async def measure_poison(num_good: int, max_tokens: int) -> Figures:
    """One request that kills what computes it, among good ones; nothing is restarted."""
    from cluster.errors import failure_of

    random_ = random.Random(9)
    pool = Pool(simulated())
    asked = requests(random_, num_good, max_tokens)
    poison = GenerationRequest(
        TokenPrompt((*range(1, _PROMPT_TOKENS), EOS_TOKEN_ID)),
        SamplingParams(),
        max_tokens=max_tokens,
    )
    place = random_.randrange(num_good)
    load = Load(pool, [*asked[:place], poison, *asked[place:]], "poison")
    async with opened(pool, _NAMES):
        await load.run()
        num_dead = await pool.num_dead()
    poisoned = load.records.pop(place)
    error = poisoned.error or RuntimeError("it was answered")
    good = sum(is_right(record, pool.config.simulation) for record in load.records)
    return {
        "poison_good": num_good,
        "poison_good_finished": good,
        "poison_cores_died": num_dead,
        "poison_status": failure_of(error).status if poisoned.error else 200,
        "poison_named": isinstance(error, RequestCondemned),
    }
