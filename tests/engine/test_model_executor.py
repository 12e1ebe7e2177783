"""The executor on real (tiny) models: Hugging Face's tokens, from plans written by hand."""

import math

import pytest
import torch
import transformers

from configs.engine import CacheConfig, EngineConfig
from engine.errors import ConfigurationError
from engine.executors.model import BlockTable, ModelExecutor
from engine.models import kv_cache
from engine.plan import Slice, Start, StepPlan
from engine.wire import SamplingParams
from tests.tiny_models import (
    EOS_TOKEN_ID,
    MAX_MODEL_LEN,
    NAMES,
    VOCAB_SIZE,
    reference_greedy,
    reference_module,
    tiny_model,
)

BLOCK_SIZE = 8
GREEDY = SamplingParams(max_tokens=64)


def load(name="llama", num_blocks=64, **fields):
    config = EngineConfig(
        model=str(tiny_model(name)),
        device="cpu",
        threads=1,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        **fields,
    )
    return ModelExecutor.load(config)


class Driver:
    """The least that a scheduler must do: hands out blocks and remembers lengths."""

    def __init__(self, executor):
        self.executor = executor
        # From the back, and interleaved between runs: nothing lies where its number says.
        self.free = list(range(executor.info.num_blocks))
        self.tokens, self.computed, self.num_blocks, self.fresh = {}, {}, {}, []
        self.failures = {}
        self.step = 0

    def start(self, run_id, token_ids, num_prompt=None, sampling=GREEDY, blocks=(), computed=0):
        num_prompt = len(token_ids) if num_prompt is None else num_prompt
        self.tokens[run_id] = list(token_ids)
        self.computed[run_id] = computed
        self.num_blocks[run_id] = len(blocks)
        self.fresh.append(Start(run_id, tuple(token_ids), num_prompt, sampling, tuple(blocks)))

    def run(self, lengths, ended=(), copies=()):
        """One step that computes `lengths` (by run id) tokens."""
        slices = []
        for run_id, length in lengths.items():
            start = self.computed[run_id]
            end = start + length
            missing = -(-end // BLOCK_SIZE) - self.num_blocks[run_id]
            blocks = tuple(self.free.pop() for _ in range(missing))
            self.num_blocks[run_id] += missing
            self.computed[run_id] = end
            samples = end == len(self.tokens[run_id])
            slices.append(Slice(run_id, start, length, blocks, samples))
        starts, self.fresh = tuple(self.fresh), []
        plan = StepPlan(self.step, tuple(ended), tuple(copies), starts, tuple(slices))
        self.step += 1
        result = self.executor.execute(plan)
        for run_id, sampled in result.sampled.items():
            self.tokens[run_id] += sampled.token_ids
        self.failures.update(result.failures)
        return result

    def finish(self, num_tokens, chunk):
        """Runs everything until each has `num_tokens` tokens more than it was started with."""
        goals = {run_id: len(tokens) + num_tokens for run_id, tokens in self.tokens.items()}
        while unfinished := {
            run_id: min(chunk, len(self.tokens[run_id]) - self.computed[run_id])
            for run_id, goal in goals.items()
            if len(self.tokens[run_id]) < goal and run_id not in self.failures
        }:
            self.run(unfinished)


def prompt(length, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=NAMES)
def any_executor(request):
    executor = load(request.param)
    yield request.param, executor
    executor.close()


@pytest.fixture(scope="module")
def executor():
    executor = load()
    yield executor
    executor.close()


@pytest.fixture
def driver(executor):
    return Driver(executor)


PROMPT_LENGTHS = (1, 5, 16, 43, 60)


@pytest.mark.parametrize("chunk", [7, 64])
def test_greedy_equals_hugging_face(any_executor, chunk):
    """Token for token, five prompts at once, prefill in chunks beside decode; the longer prompts
    and continuations cross the sliding window of 24."""
    name, executor = any_executor
    driver = Driver(executor)
    prompts = [prompt(length) for length in PROMPT_LENGTHS]
    for run_id, ids in enumerate(prompts):
        driver.start(run_id, ids)
    driver.finish(20, chunk)
    assert driver.failures == {}
    for run_id, ids in enumerate(prompts):
        assert driver.tokens[run_id][len(ids) :] == reference_greedy(name, ids, 20), run_id


def test_info(executor):
    info = executor.info
    assert (info.vocab_size, info.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert (info.num_blocks, info.block_size) == (64, BLOCK_SIZE)
    assert info.eos_token_ids == (EOS_TOKEN_ID,)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert info.weight_bytes > 100_000
    assert len(info.fingerprint) == 32


def test_a_cached_prefix_is_used_as_it_is(driver):
    ids = prompt(40)
    driver.start(1, ids)
    driver.finish(6, 64)
    blocks = list(range(driver.executor.info.num_blocks))[::-1][:4]
    driver.start(2, ids, blocks=blocks, computed=32)
    driver.finish(6, 64)
    assert driver.tokens[2][:46] == driver.tokens[1][:46] == ids + reference_greedy("llama", ids, 6)


def test_copied_blocks_hold_what_their_sources_held(driver):
    ids = prompt(24)
    driver.start(1, ids)
    driver.finish(2, 64)
    sources = list(range(driver.executor.info.num_blocks))[::-1][:3]
    targets = [driver.free.pop() for _ in sources]
    driver.start(2, [*ids[:22], 5, 6, 7], blocks=targets, computed=22)
    driver.run({2: 3}, copies=tuple(zip(sources, targets, strict=True)))
    expected = reference_greedy("llama", [*ids[:22], 5, 6, 7], 1)
    assert driver.tokens[2][25:] == expected


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(driver):
    """With everything that depends on what came before: seeds, penalties, bad words, min_tokens."""
    sampling = SamplingParams(
        temperature=0.9,
        seed=11,
        choice=2,
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        min_tokens=9,
        stop_token_ids=(7,),
        bad_words=((8, 9), (10,)),
        logprobs=2,
    )
    ids = prompt(19)
    driver.start(1, ids, sampling=sampling)
    driver.finish(14, 8)
    whole = driver.tokens[1]
    for already in (1, 6, 13):
        driver.start(10 + already, whole[: 19 + already], 19, sampling)
        driver.finish(14 - already, 64)
        assert driver.tokens[10 + already][: 19 + 14] == whole[: 19 + 14]


def test_a_step_without_a_sample_draws_nothing(driver):
    driver.start(1, prompt(20))
    result = driver.run({1: 12})
    assert (dict(result.sampled), dict(result.failures)) == ({}, {})
    assert result.compute_s > 0


def test_an_empty_step(driver):
    assert driver.run({}).sampled == {}


def test_stale_not_a_number_in_free_blocks_is_harmless(driver):
    for layer in driver.executor._cache.layers:
        for cache in layer:
            cache.fill_(math.nan)
    ids = prompt(21)
    driver.start(1, ids)
    driver.finish(8, 6)
    assert driver.tokens[1][21:] == reference_greedy("llama", ids, 8)


def test_a_run_whose_logits_are_not_a_number_fails_alone(driver, monkeypatch):
    ids = prompt(12)
    driver.start(1, ids)
    driver.start(2, prompt(13))
    forward = driver.executor._model.forward

    def poisoned(token_ids, batch, rows, cache):
        logits = forward(token_ids, batch, rows, cache)
        logits[-1, 5] = math.nan
        return logits

    monkeypatch.setattr(driver.executor._model, "forward", poisoned)
    result = driver.run({1: 12, 2: 13})
    assert list(result.sampled) == [1]
    assert "not a number" in result.failures[2]
    monkeypatch.undo()
    # A plan made before the failure was known: the run fails again, the other goes on.
    result = driver.run({1: 1, 2: 1})
    assert "not a number" in result.failures[2]
    assert driver.tokens[1][12:] == reference_greedy("llama", ids, 2)


def test_a_slice_that_raises_fails_alone(driver, monkeypatch):
    """The step is repeated slice by slice; the others get the tokens they would have had."""
    lengths = (9, 14, 30)
    for run_id, length in enumerate(lengths):
        driver.start(run_id, prompt(length))
    forward = driver.executor._model.forward

    def fails_on_run_1(token_ids, batch, rows, cache):
        if 14 in batch.context_lens:
            raise RuntimeError("a fault that only this one causes")
        return forward(token_ids, batch, rows, cache)

    monkeypatch.setattr(driver.executor._model, "forward", fails_on_run_1)
    driver.run(dict(enumerate(lengths)))
    assert list(driver.failures) == [1]
    assert "a fault that only this one causes" in driver.failures[1]
    monkeypatch.undo()
    driver.finish(3, 64)
    for run_id in (0, 2):
        ids = prompt(lengths[run_id])
        assert driver.tokens[run_id][len(ids) :][:3] == reference_greedy("llama", ids, 3)


def test_a_dead_device_is_nobodys_fault(driver, monkeypatch):
    driver.start(1, prompt(4))
    driver.start(2, prompt(5))

    def dead(*args):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(driver.executor._model, "forward", dead)
    monkeypatch.setattr(driver.executor, "_check_device", dead)
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.run({1: 4, 2: 5})


def test_a_token_outside_the_vocabulary_fails_its_run(driver):
    driver.start(1, [4, VOCAB_SIZE, 5])
    driver.start(2, prompt(5))
    result = driver.run({1: 3, 2: 5})
    assert f"token id {VOCAB_SIZE} is not in the vocabulary" in result.failures[1]
    assert list(result.sampled) == [2]


def test_ended_runs_are_forgotten(driver):
    driver.start(1, prompt(4))
    driver.run({1: 4})
    driver.run({}, ended=(1, 99))
    assert 1 not in driver.executor._runs


def test_logprobs_match_hugging_face(driver):
    ids = prompt(17)
    driver.start(1, ids, sampling=SamplingParams(logprobs=5))
    result = driver.run({1: 17})
    with torch.inference_mode():
        logits = reference_module("llama")(torch.tensor([ids])).logits[0, -1]
    expected = logits.log_softmax(0).topk(5)
    (logprobs,) = result.sampled[1].logprobs
    assert [token for token, _ in logprobs.top] == expected.indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert logprobs.logprob == logprobs.top[0][1]


def test_the_number_of_blocks_follows_from_the_memory():
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        threads=1,
        cache=CacheConfig(block_size=256, memory_bytes=1 << 20),
    )
    executor = ModelExecutor.load(config)
    assert executor.info.num_blocks == (1 << 20) // (256 * 768) == 5
    executor.close()


def test_a_failed_load_leaves_no_registered_name(monkeypatch):
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 1000)
    before = set(transformers.AttentionInterface())
    with pytest.raises(ConfigurationError, match="and cpu has 1000 bytes available"):
        load()
    assert set(transformers.AttentionInterface()) == before


def test_max_model_len_beyond_the_models_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match=rf"5000.*{MAX_MODEL_LEN}"):
        load(max_model_len=5000)


def test_block_table_grows():
    table = BlockTable((3, 1))
    for i in range(100):
        table.extend((i,))
    table.extend(())
    assert table.ids.tolist() == [3, 1, *range(100)]
