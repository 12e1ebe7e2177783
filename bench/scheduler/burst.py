"""A burst of batch work, and interactive requests all the while: classes against first come, first
served.

Invariant: both run the real scheduler and cache on a simulated clock, with the same requests, the
same chunk cap and the stated cost of a step; the figures are ratios of the two.
"""

from dataclasses import dataclass, field
from random import Random

from cache.keys import key_root
from cache.prefix import PrefixCache
from configs.engine import CacheConfig, EngineConfig, SchedulerConfig, SimulationConfig
from engine.executors.simulated import SimulatedExecutor
from engine.request import RequestKey, RequestState
from engine.scheduler import Scheduler
from engine.wire import SamplingParams, ServiceClass

_SEED = 13
_STEP_S, _TOKEN_S = 0.02, 0.0005
"""Of a step, and of each token in it: about SmolLM2's on two cores."""
_NUM_SLOTS = 32
_BATCH_TOKENS, _BATCH_OUTPUT = 800, 64
_INTERACTIVE_TOKENS, _INTERACTIVE_OUTPUT = 120, 40
_INTERACTIVE_PER_S = 0.5


@dataclass(slots=True)
class _Outcome:
    ttft_s: list[float] = field(default_factory=list)
    """Of the interactive requests."""
    batch_s: float = 0.0
    """Until the last batch request had ended."""

    @property
    def p95_s(self) -> float:
        return sorted(self.ttft_s)[len(self.ttft_s) * 95 // 100]


def measure_burst(num_batch: int) -> dict[str, float]:
    """`num_batch` batch requests at once, and interactive ones until the batch is done."""
    dynamic, fifo = _run(num_batch, has_classes=True), _run(num_batch, has_classes=False)
    return {
        "p95_ratio_dynamic_vs_fifo": fifo.p95_s / dynamic.p95_s,
        "batch_throughput_loss_pct": 100 * (1 - fifo.batch_s / dynamic.batch_s),
        "interactive_ttft_p95_s_dynamic": dynamic.p95_s,
        "interactive_ttft_p95_s_fifo": fifo.p95_s,
    }


def _run(num_batch: int, has_classes: bool) -> _Outcome:
    clock = _Clock()
    config = EngineConfig(
        executor="simulated",
        cache=CacheConfig(num_blocks=8192),
        simulation=SimulationConfig(step_s=_STEP_S, token_s=_TOKEN_S),
    )
    executor = SimulatedExecutor(config, clock.advance)
    info = executor.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=_NUM_SLOTS, long_prefill_threshold=256, overlap=False),
        PrefixCache(info.num_blocks, block_size=info.block_size),
        info.block_size,
    )
    root = key_root(b"k" * 32, info.fingerprint, "", info.block_size)
    rng, outcome = Random(_SEED), _Outcome()
    arrived_s: dict[RequestKey, float] = {}
    left = num_batch

    def add(kind: str, number: int, num_tokens: int, num_output: int) -> None:
        token_ids = [rng.randrange(info.vocab_size) for _ in range(num_tokens)]
        interactive = kind == "interactive" and has_classes
        request = RequestState(
            key=(kind, str(number)),
            attempt=0,
            token_ids=token_ids,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=num_output, ignore_eos=True),
            root=root,
            end_token_ids=frozenset(),
            service_class=ServiceClass.INTERACTIVE if interactive else ServiceClass.BATCH,
        )
        scheduler.add(request, clock.now_s)

    for number in range(num_batch):
        add("batch", number, _BATCH_TOKENS, _BATCH_OUTPUT)
    next_s, count, rate = 0.0, 0, 1 / _TOKEN_S
    while left:
        while next_s <= clock.now_s:
            arrived_s["interactive", str(count)] = next_s
            add("interactive", count, _INTERACTIVE_TOKENS, _INTERACTIVE_OUTPUT)
            count += 1
            next_s += rng.expovariate(_INTERACTIVE_PER_S)
        plan = scheduler.schedule(clock.now_s, rate)
        assert plan is not None
        for request, item in scheduler.commit(executor.execute(plan)):
            key = request.key
            if key in arrived_s:
                outcome.ttft_s.append(clock.now_s - arrived_s.pop(key))
            left -= item.finish is not None and key[0] == "batch"
        scheduler.cache.drain_events()
    outcome.batch_s = clock.now_s
    return outcome


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
