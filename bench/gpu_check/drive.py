"""Greedy output of an executor by the engine's own scheduler and cache, without sockets."""

from collections.abc import Sequence

from cache.events import Tier
from cache.keys import key_root
from cache.prefix import PrefixCache
from cache.tiers import LowerTiers
from configs.engine import SchedulerConfig
from engine.plan import Executor
from engine.request import RequestKey, RequestState
from engine.scheduler import Scheduler
from engine.wire import SamplingParams


class Driver:
    """Steps one executor; what it has cached stays from call to call."""

    def __init__(self, executor: Executor, limits: SchedulerConfig) -> None:
        info = executor.info
        cache = PrefixCache(info.num_blocks, block_size=info.block_size)
        host = PrefixCache(info.num_slots, tier=Tier.HOST) if info.num_slots else None
        self.tiers = LowerTiers(host) if host is not None else None
        self._executor = executor
        self._scheduler = Scheduler(limits, cache, info.block_size, tiers=self.tiers)
        self._num_requests = 0

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` for each prompt, all at once, past any end token."""
        info, scheduler = self._executor.info, self._scheduler
        output: dict[RequestKey, list[int]] = {}
        for prompt in prompts:
            self._num_requests += 1
            request = RequestState(
                key=("check", str(self._num_requests)),
                attempt=0,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
                root=key_root(b"k" * 32, info.fingerprint, "", info.block_size),
                end_token_ids=frozenset(),
            )
            output[request.key] = []
            scheduler.add(request, 0.0)
        while (plan := scheduler.schedule()) is not None:
            for request, item in scheduler.commit(self._executor.execute(plan)):
                output[request.key] += item.token_ids
        return list(output.values())
