"""KV by a share of the device: the arithmetic, then the largest step on a real model and devices
that are made up."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.engine import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ConfigurationError
from engine.executors.largest_step import largest_plans, within_measured
from engine.executors.model import ModelExecutor
from engine.models.device_memory import MemoryFigures
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import device_share
from engine.plan import ExecutorInfo
from tests.engine.rig import running_engine, simulated_config
from tests.tiny_models import MAX_MODEL_LEN, tiny_model

GIB = 1 << 30
KV_BYTES = 768
"""Of a token of tiny Llama in float32."""
INFO = ExecutorInfo("m", "f", 100, 64, 2, 4, (), 8, 0, "cpu", "float32")


@dataclass
class FakeMemory:
    """A device of which others have some, and a step takes what it takes."""

    answer: MemoryFigures
    calls: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.calls.append("watch")

    def figures(self) -> MemoryFigures:
        self.calls.append("figures")
        return self.answer


def load(memory, **fields):
    cache = {"block_size": 8, "memory_fraction": 0.5} | fields.pop("cache", {})
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        threads=1,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=37, max_num_seqs=5),
        **fields,
    )
    return ModelExecutor.load(config, memory=memory)


def test_a_worked_example() -> None:
    """As in docs/gpu.md."""
    figures = MemoryFigures(total_bytes=80 * GIB, outside_bytes=GIB // 2, peak_bytes=18 * GIB)
    assert figures.kv_bytes(0.9, 1) == 72 * GIB - GIB // 2 - 18 * GIB


@given(
    st.integers(1, 1 << 45),
    st.integers(0, 1 << 45),
    st.integers(0, 1 << 45),
    st.floats(0.01, 1.0),
    st.integers(1, 1 << 40),
)
def test_it_never_gives_more_than_there_is(
    total: int, outside: int, peak: int, fraction: float, needed: int
) -> None:
    figures = MemoryFigures(total, outside, peak)
    left = int(fraction * total) - outside - peak
    if left >= needed:
        assert figures.kv_bytes(fraction, needed) == left
        assert outside + peak + left <= fraction * total
        return
    with pytest.raises(ConfigurationError, match=f"least {needed} bytes and {max(0, left)} are"):
        figures.kv_bytes(fraction, needed)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 64), st.integers(1, 5))
def test_no_step_is_larger(budget: int, max_num_seqs: int, limit: int, scratch: int) -> None:
    info = ExecutorInfo("m", "f", 100, limit, scratch, 4, (), 8, 0, "cpu", "float32")
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    prefill, decode = largest_plans(info, scheduler, limit)
    runs = min(max_num_seqs, budget)
    longest = max(1, limit - 1)
    assert prefill.num_tokens == min(budget, prefill.num_tokens)
    if -(-budget // runs) <= longest:
        assert prefill.num_tokens == budget
    assert len(prefill.starts) == len(prefill.slices) == decode.num_tokens == runs
    assert all(item.samples for item in prefill.slices), "a row of logits each"
    assert prefill.slices[0].start + prefill.slices[0].length == longest
    for start, item in zip(prefill.starts, prefill.slices, strict=True):
        assert item.start + item.length == len(start.token_ids) <= longest
        assert len(start.block_ids) * 4 > len(start.token_ids), "room for the decode"
        assert set(start.block_ids) <= set(range(scratch))


def test_the_blocks_are_what_is_left_and_the_step_runs_on_the_model(monkeypatch) -> None:
    shapes = []
    forward = FusedDecoder.forward

    def spy(self, token_ids, batch, rows, cache):
        if memory.calls == ["watch"]:
            shapes.append((len(token_ids), batch.num_sequences, len(rows), max(batch.context_lens)))
        return forward(self, token_ids, batch, rows, cache)

    monkeypatch.setattr(FusedDecoder, "forward", spy)
    memory = FakeMemory(MemoryFigures(1 << 20, 100_000, 200_000))
    executor = load(memory)
    assert memory.calls == ["watch", "figures"]
    assert shapes == [(37, 5, 5, MAX_MODEL_LEN - 1), (5, 5, 5, MAX_MODEL_LEN)]
    info = executor.info
    assert info.num_blocks == ((1 << 19) - 300_000) // (8 * KV_BYTES) == 36
    assert (info.max_step_tokens, info.max_step_seqs) == (37, 5)
    assert executor._cache.num_blocks == 36
    executor.close()


@pytest.mark.parametrize(("max_model_len", "needed"), [(None, 8), (10, 16), (1000, 1000)])
def test_a_request_of_the_promised_length_has_to_fit(max_model_len, needed) -> None:
    needed_bytes = needed * KV_BYTES
    short = MemoryFigures(2 * (needed_bytes + 999), 500, 500)
    with pytest.raises(
        ConfigurationError, match=rf"needs at least {needed_bytes} bytes and {needed_bytes - 1} are"
    ):
        load(FakeMemory(short), max_model_len=max_model_len)
    enough = MemoryFigures(2 * (needed_bytes + 1000), 500, 500)
    executor = load(FakeMemory(enough), max_model_len=max_model_len)
    assert executor.info.num_blocks == needed // 8
    executor.close()


def test_a_step_that_does_not_fit_is_named(monkeypatch) -> None:
    def forward(self, token_ids, batch, rows, cache):
        if len(token_ids) == 37:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB, 3 GiB are free")
        return original(self, token_ids, batch, rows, cache)

    original = FusedDecoder.forward
    monkeypatch.setattr(FusedDecoder, "forward", forward)
    with pytest.raises(
        ConfigurationError, match=r"batched_tokens \(37\).*seqs \(5\).*5 GiB, 3 GiB are free"
    ):
        load(FakeMemory(MemoryFigures(GIB, 0, 0)))


def test_a_cpu_has_no_share() -> None:
    with pytest.raises(ConfigurationError, match=r"the device is cpu: give cache\.memory_bytes"):
        load(None)


def test_which_devices_are_shared_without_being_told() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert device_share(CacheConfig(), cpu) is None
    assert device_share(CacheConfig(), cuda) == 0.9
    assert device_share(CacheConfig(memory_fraction=0.4), cuda) == 0.4
    assert device_share(CacheConfig(memory_bytes=GIB), cuda) is None
    assert device_share(CacheConfig(num_blocks=7), cuda) is None
    assert CacheConfig().kv_bytes == GIB
    with pytest.raises(ValidationError, match="memory_bytes or memory_fraction, not both"):
        CacheConfig(memory_bytes=GIB, memory_fraction=0.5)


def test_live_settings_stay_within_what_was_measured(caplog) -> None:
    limited = ExecutorInfo(
        "m", "f", 100, 64, 2, 4, (), 8, 0, "cuda", "float32", 0, max_step_tokens=64, max_step_seqs=8
    )
    wanted = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=4, max_waiting=7)
    found = within_measured(wanted, limited)
    assert (found.max_num_batched_tokens, found.max_num_seqs, found.max_waiting) == (64, 4, 7)
    assert "scheduler.max_num_batched_tokens stays at 64" in caplog.text
    assert "128 takes a restart" in caplog.text
    assert within_measured(wanted, INFO) is wanted


def test_a_core_takes_over_live_settings_as_far_as_they_fit() -> None:
    with running_engine(simulated_config()) as core:
        core._info = replace(core._info, max_step_seqs=3)
        core.configure(SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=50))
        assert core._scheduler_config.max_num_seqs == 3
        assert core._scheduler_config.max_num_batched_tokens == 50
