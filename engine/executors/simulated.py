"""A simulated executor: a stated cost model in place of a model. It never poses as one.

Invariant: its next token is a hash of the whole history, the seed and the position, where the
history is read back from the simulated KV blocks. So one wrong token, one block that another
request overwrote, or one falsely shared prefix spoils everything after it, and a test sees it. With
`poison_token_id` the process dies by SIGKILL at the end of the step that computes that token, and
with it all that runs there.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from configs.engine import EngineConfig, SimulationConfig
from engine.plan import ExecutorInfo, Sampled, Slice, StepPlan, StepResult
from engine.wire import SamplingParams, TokenLogprobs

_EMPTY = 0
_MASK = (1 << 64) - 1
_KV_BYTES_PER_TOKEN = 1024
EOS_TOKEN_ID = 0


def next_history(history: int, token_id: int) -> int:
    """History is a 64-bit chain over all tokens; the step is splitmix64's finaliser (Steele, Lea,
    Flood 2014)."""
    mixed = (history + 0x9E3779B97F4A7C15 * (token_id + 1)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def draw(history: int, position: int, sampling: SamplingParams, config: SimulationConfig) -> int:
    """The token after `position` tokens with this history. Respects `min_tokens` no more than a
    model would: the caller masks nothing, so ends come by `eos_period` alone."""
    seed = f"{history}/{position}/{sampling.seed}/{sampling.choice}".encode()
    value = int.from_bytes(blake2b(seed, digest_size=8).digest(), "little")
    if config.eos_period and value % config.eos_period == 0:
        return EOS_TOKEN_ID
    return 1 + (value >> 16) % (config.vocab_size - 1)


def reference_output(
    prompt: Sequence[int], sampling: SamplingParams, config: SimulationConfig
) -> list[int]:
    """What it answers, computed without blocks, plans or batches; ends as an engine would."""
    history = _EMPTY
    for token_id in prompt:
        history = next_history(history, token_id)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        output.append(draw(history, len(prompt) + len(output), sampling, config))
        history = next_history(history, output[-1])
        if output[-1] == EOS_TOKEN_ID and len(output) >= sampling.min_tokens:
            break
    return output


def _hold_gil(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


class _Run:
    __slots__ = ("block_ids", "sampling", "token_ids")

    def __init__(
        self, token_ids: list[int], block_ids: list[int], sampling: SamplingParams
    ) -> None:
        self.token_ids = token_ids
        self.block_ids = block_ids
        self.sampling = sampling


class SimulatedExecutor:
    """Executes plans against simulated KV: each slot holds the history up to its token.

    `sleep` is called with the step's cost; a simulator on its own clock passes one that does not
    wait. With `verify` every slot a request attends to is compared with what it must hold.
    """

    def __init__(
        self,
        config: EngineConfig,
        sleep: Callable[[float], object] = time.sleep,
        *,
        verify: bool = False,
    ) -> None:
        self._config = config.simulation
        self._sleep = sleep
        self._verify = verify
        size = config.cache.block_size
        num_blocks = config.cache.num_blocks
        if num_blocks is None:
            num_blocks = max(1, config.cache.kv_bytes // (size * _KV_BYTES_PER_TOKEN))
        num_slots = config.cache.slot_bytes // (size * _KV_BYTES_PER_TOKEN)
        self._slots = [_EMPTY] * (num_blocks * size)
        # As large as it says that KV is; of each token's the first eight bytes are used.
        self._host = np.zeros((num_slots, size, _KV_BYTES_PER_TOKEN // 8), dtype=np.uint64)
        self._runs: dict[int, _Run] = {}
        self._is_poisoned = False
        self._info = ExecutorInfo(
            model="simulated",
            fingerprint=f"simulated-{self._config.vocab_size}-{self._config.eos_period}",
            vocab_size=self._config.vocab_size,
            max_model_len=self._config.max_model_len,
            num_blocks=num_blocks,
            block_size=size,
            eos_token_ids=(EOS_TOKEN_ID,),
            kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
            weight_bytes=0,
            device="simulated",
            dtype="simulated",
            num_slots=num_slots,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        for run_id in plan.ended:
            self._runs.pop(run_id, None)
        self._copy(plan)
        for start in plan.starts:
            self._runs[start.run_id] = _Run(
                list(start.token_ids), list(start.block_ids), start.sampling
            )
        sampled, context = {}, 0
        for run_id, block_id in plan.new_blocks:
            self._runs[run_id].block_ids.append(block_id)
        for item in (*plan.slices, *map(self._next_slice, plan.decodes)):
            context += item.start + item.length
            token_id = self._compute(item)
            if token_id is not None:
                asked = self._runs[item.run_id].sampling.logprobs
                logprobs = None if asked is None else (self._logprobs(token_id, asked),)
                sampled[item.run_id] = Sampled((token_id,), logprobs)
        cost_s = self._cost_s(plan, context)
        if cost_s > 0:
            _hold_gil(cost_s * self._config.gil_share)
            self._sleep(cost_s * (1 - self._config.gil_share))
        if self._is_poisoned:
            os.kill(os.getpid(), signal.SIGKILL)
        return StepResult(plan.step, sampled, compute_s=cost_s)

    def _copy(self, plan: StepPlan) -> None:
        size = self._info.block_size
        for block, slot in plan.saves:
            self._host[slot, :, 0] = self._slots[block * size : (block + 1) * size]
        for slot, block in plan.loads:
            self._slots[block * size : (block + 1) * size] = self._host[slot, :, 0].tolist()
        for source, target in plan.copies:
            self._slots[target * size : (target + 1) * size] = self._slots[
                source * size : (source + 1) * size
            ]

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Nothing is lost between two steps."""

    def slot_memory(self, slot: int) -> memoryview:
        memory: memoryview = self._host[slot].reshape(-1).view(np.uint8).data
        return memory

    def close(self) -> None:
        self._runs.clear()

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Made up of the token id, which is not among the likeliest but by chance."""
        size = self._config.vocab_size
        top = tuple((token_id * 31 + rank * 7919) % size for rank in range(num_top))
        return TokenLogprobs(
            -1.0 - token_id % 97 / 8, tuple((other, -0.5 - rank) for rank, other in enumerate(top))
        )

    def _cost_s(self, plan: StepPlan, context: int) -> float:
        model = self._config
        return model.step_s + model.token_s * plan.num_tokens + model.context_token_s * context

    def _next_slice(self, run_id: int) -> Slice:
        return Slice(run_id, len(self._runs[run_id].token_ids) - 1, 1, (), True)

    def _compute(self, item: Slice) -> int | None:
        run = self._runs[item.run_id]
        run.block_ids.extend(item.new_block_ids)
        if self._verify:
            self._check_history(run, item.start)
        history = self._slots[self._slot(run, item.start - 1)] if item.start else _EMPTY
        end = item.start + item.length
        self._is_poisoned |= self._config.poison_token_id in run.token_ids[item.start : end]
        for position in range(item.start, end):
            history = next_history(history, run.token_ids[position])
            self._slots[self._slot(run, position)] = history
        if not item.samples:
            return None
        assert end == len(run.token_ids), "a slice that samples must end at the last token"
        token_id = draw(history, end, run.sampling, self._config)
        run.token_ids.append(token_id)
        return token_id

    def _slot(self, run: _Run, position: int) -> int:
        block, offset = divmod(position, self._info.block_size)
        return run.block_ids[block] * self._info.block_size + offset

    def _check_history(self, run: _Run, num_computed: int) -> None:
        history = _EMPTY
        for position in range(num_computed):
            history = next_history(history, run.token_ids[position])
            found = self._slots[self._slot(run, position)]
            assert found == history, f"position {position} holds another request's KV"
