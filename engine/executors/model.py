"""Runs steps on a real model.

Invariant: the state of a run follows from its `Start` and the steps since; nothing of a step that
failed stays behind, because writing the same KV and drawing the same token again changes nothing.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from configs.engine import EngineConfig
from engine.collectives import SINGLE, Collectives
from engine.errors import ConfigurationError
from engine.executors.sizing import SCRATCH_BLOCKS, sized_by_share
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.ops import select_ops
from engine.models.device import usable_device
from engine.models.device_memory import DeviceMemory, device_memory
from engine.models.graphs import with_graphs
from engine.models.host_memory import HostMemory
from engine.models.kv_cache import (
    KVCache,
    check_kv_dtype,
    device_share,
    plan_num_blocks,
    plan_num_slots,
)
from engine.models.load import ServedModel, load_model
from engine.models.resolve import resolve_model
from engine.models.traits import fingerprint
from engine.plan import ExecutorInfo, Sampled, Slice, Start, StepPlan, StepResult
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState

_log = logging.getLogger(__name__)


class BlockTable:
    """A growing row of block ids that is read without a copy."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._length = len(block_ids)
        self._ids = np.zeros(max(16, 2 * self._length), dtype=np.int32)
        self._ids[: self._length] = block_ids

    @property
    def ids(self) -> NDArray[np.int32]:
        """Valid until the next `extend`."""
        return self._ids[: self._length]

    def extend(self, block_ids: Sequence[int]) -> None:
        length = self._length + len(block_ids)
        if length > len(self._ids):
            grown = np.zeros(2 * length, dtype=np.int32)
            grown[: self._length] = self.ids
            self._ids = grown
        self._ids[self._length : length] = block_ids
        self._length = length


@dataclass(slots=True)
class _Run:
    sampling: SamplingState
    blocks: BlockTable
    failure: str | None = None
    """Set once; a later slice, planned before the failure was known, gets it again."""


class ModelExecutor:
    """`engine.plan.Executor` over a model."""

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache,
        info: ExecutorInfo,
        isolates_faults: bool = True,
    ) -> None:
        """With `isolates_faults` off, a step that fails raises instead of being tried run by run:
        one of several ranks may not do that, since the others would not know."""
        self._model = model
        self._isolates_faults = isolates_faults
        self._cache = cache
        self._host = HostMemory(cache, info.num_slots)
        self._info = info
        self._sampler = Sampler(info.eos_token_ids, model.row_max, select_ops(model.device))
        self._runs: dict[int, _Run] = {}

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda message: None,
        memory: DeviceMemory | None = None,
        collectives: Collectives = SINGLE,
    ) -> "ModelExecutor":
        """Loads what `config` names, or this rank's part of it; `memory` stands in for the device's
        own counters. Raises `ModelRefused` or `ConfigurationError`."""
        shard = collectives.shard
        torch.set_num_threads(max(1, (config.threads or _usable_cores()) // shard.count))
        device = usable_device(config.device, shard)
        check_kv_dtype(config.cache, device)
        share = device_share(config.cache, device)
        if share is not None and memory is None:
            memory = device_memory(device)
        folder = resolve_model(config.model, progress)
        model = load_model(
            folder, device, config.dtype, progress, collectives, config.cache.kv_dtype
        )
        traits = model.traits
        try:
            if config.max_model_len is not None and config.max_model_len > traits.max_model_len:
                raise ConfigurationError(
                    f"max_model_len is {config.max_model_len}, and the model's own limit is "
                    f"{traits.max_model_len}"
                )
            if config.compile_prefill:
                # Not before it is needed: it takes seconds to import.
                from engine.models.compiled_prefill import compile_prefill

                compile_prefill(model, progress)
            info = _described(config, folder, model)
            # Of several ranks each would have to capture what it tells the others.
            has_graphs = config.cuda_graphs and shard.count == 1
            graph_seqs = config.scheduler.max_num_seqs if has_graphs else 0
            if share is None or memory is None:
                num_blocks = plan_num_blocks(traits, config.cache, device)
                info = replace(info, num_blocks=num_blocks)
            else:
                progress("running the largest step, to see how much memory is left for KV")
                scratch = cls._over_scratch(model, info, graph_seqs)
                sized = sized_by_share(scratch, config, share, memory)
                # A block is a block on every rank.
                num_blocks = collectives.least(sized.num_blocks)
                info = replace(sized, num_blocks=num_blocks, num_slots=info.num_slots)
                del scratch
            cache = KVCache(traits, info.num_blocks, info.block_size, device)
            served = with_graphs(model, cache, graph_seqs, progress)
        except BaseException:
            model.close()
            raise
        return cls(served, cache, info, isolates_faults=shard.count == 1)

    @classmethod
    def _over_scratch(
        cls, model: ServedModel, info: ExecutorInfo, graph_seqs: int
    ) -> "ModelExecutor":
        """For `sized_by_share`, with graphs of its own, so that their memory is counted."""
        info = replace(info, num_blocks=SCRATCH_BLOCKS, num_slots=0)
        cache = KVCache(model.traits, info.num_blocks, info.block_size, model.device)
        served = with_graphs(model, cache, graph_seqs)
        return cls(served, cache, info, isolates_faults=False)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see `engine.plan.Executor`."""
        began = time.perf_counter()
        for run_id in plan.ended:
            self._runs.pop(run_id, None)
        self._host.save(plan.saves)
        self._host.load(plan.loads)
        if plan.copies:
            self._host.before_writes(block for _, block in plan.copies)
            self._cache.copy_blocks(plan.copies)
        for start in plan.starts:
            self._runs[start.run_id] = self._begin(start)

        failures: dict[int, str] = {}
        healthy: list[Slice] = []
        for run_id, block_id in plan.new_blocks:
            self._runs[run_id].blocks.extend((block_id,))
        decodes = [self._next_slice(run_id) for run_id in plan.decodes]
        for item in (*plan.slices, *decodes):
            run = self._runs[item.run_id]
            run.blocks.extend(item.new_block_ids)
            if run.failure is None:
                healthy.append(item)
            else:
                failures[item.run_id] = run.failure
        draws = self._compute_or_isolate(healthy) if healthy else {}

        sampled: dict[int, Sampled] = {}
        for run_id, draw in draws.items():
            run = self._runs[run_id]
            if isinstance(draw, str):
                failures[run_id] = run.failure = draw
                continue
            for token_id in draw.token_ids:
                run.sampling.append(token_id)
            sampled[run_id] = draw
        return StepResult(plan.step, sampled, failures, time.perf_counter() - began)

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Nothing is lost between two steps."""

    def slot_memory(self, slot: int) -> memoryview:
        return self._host.memory(slot)

    def close(self) -> None:
        self._runs.clear()
        self._host.close()
        self._model.close()

    def _begin(self, start: Start) -> _Run:
        run = _Run(
            SamplingState(start.sampling, start.token_ids, start.num_prompt_tokens),
            BlockTable(start.block_ids),
        )
        largest = max(start.token_ids)
        if largest >= self._info.vocab_size:
            # On an accelerator an index out of range would take the whole device down.
            run.failure = f"token id {largest} is not in the vocabulary of {self._info.vocab_size}"
        return run

    def _next_slice(self, run_id: int) -> Slice:
        return Slice(run_id, len(self._runs[run_id].sampling.token_ids) - 1, 1, (), True)

    def _compute_or_isolate(self, slices: Sequence[Slice]) -> dict[int, Sampled | str]:
        """Computes all slices at once; if that fails, one at a time, so that the run at fault fails
        alone. Raises where the device itself is at fault."""
        try:
            return self._compute(slices)
        except Exception as error:
            if not self._isolates_faults:
                raise
            self._check_device()
            if len(slices) == 1:
                _log.exception("run %d failed", slices[0].run_id)
                return {slices[0].run_id: f"this request cannot be computed: {error}"}
            _log.warning("a step of %d slices failed (%s); trying each alone", len(slices), error)
        draws: dict[int, Sampled | str] = {}
        for item in slices:
            draws.update(self._compute_or_isolate([item]))
        return draws

    def _compute(self, slices: Sequence[Slice]) -> dict[int, Sampled | str]:
        """The forward pass and the draws of `slices`, by run id. Changes no run."""
        token_ids: list[int] = []
        parts: list[SequenceSlice] = []
        rows: list[int] = []
        sampling: list[tuple[int, SamplingState]] = []
        for item in slices:
            run = self._runs[item.run_id]
            known = run.sampling.token_ids
            end = item.start + item.length
            if end > len(known) or (item.samples and end != len(known)):
                raise ValueError(f"slice [{item.start}, {end}) of a run with {len(known)} tokens")
            token_ids += known[item.start : end]
            parts.append(SequenceSlice(item.start, item.length, run.blocks.ids))
            if item.samples:
                rows.append(len(token_ids) - 1)
                sampling.append((item.run_id, run.sampling))
        device = self._model.device
        if self._host.is_saving:
            self._host.before_writes(_written(parts, self._cache.block_size))
        batch = AttentionBatch.build(parts, self._cache.block_size, device)
        logits = self._model.forward(
            torch.tensor(token_ids, device=device),
            batch,
            torch.tensor(rows, dtype=torch.int64, device=device),
            self._cache,
        )
        if not rows:
            return {}
        draws = self._sampler.sample(logits, [state for _, state in sampling])
        return {run_id: draw for (run_id, _), draw in zip(sampling, draws, strict=True)}

    def _check_device(self) -> None:
        """Raises when the device no longer computes: then no run is to blame."""
        device = self._model.device
        if torch.ones(2, device=device).sum().item() != 2.0:
            raise RuntimeError(f"{device} no longer computes correctly")


def _described(config: EngineConfig, folder: Path, model: ServedModel) -> ExecutorInfo:
    """Without its blocks."""
    traits = model.traits
    return ExecutorInfo(
        model=config.model,
        fingerprint=fingerprint(folder, traits),
        vocab_size=traits.vocab_size,
        max_model_len=traits.max_model_len,
        num_blocks=0,
        block_size=config.cache.block_size,
        eos_token_ids=traits.eos_token_ids,
        kv_bytes_per_token=traits.kv_bytes_per_token,
        weight_bytes=model.weight_bytes,
        device=str(model.device),
        dtype=traits.dtype,
        num_slots=plan_num_slots(traits, config.cache),
    )


def _written(parts: Sequence[SequenceSlice], block_size: int) -> Iterator[int]:
    """Blocks that a step puts KV into."""
    for part in parts:
        first, end = part.start // block_size, -(-(part.start + part.length) // block_size)
        yield from part.block_ids[first:end].tolist()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
