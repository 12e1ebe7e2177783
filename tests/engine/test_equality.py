"""Exactness, in float32 and on real models: greedy output is Hugging Face's, and sampled output is
the same whatever happens to the request on the way.

The KV memory starts out full of NaN, so that a block read before it was written shows.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from configs.engine import CacheConfig, EngineConfig
from engine.executors.model import ModelExecutor
from engine.models.resolve import resolve_model
from engine.wire import SamplingParams
from tests.engine.rig import MemoryDisk, Rig
from tests.tiny_models import NAMES, tiny_model

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128, 301, 700)
SOME_LENGTHS = (1, 13, 15, 16, 17, 31, 33, 77, 141)
"""For a model of real size, whose every step costs."""
NUM_OUTPUT = 12
NUM_BLOCKS = 256
NUM_SLOTS = 300


@dataclass
class Subject:
    """A model under test, and what Hugging Face's own `generate` makes of each prompt."""

    name: str
    executor: ModelExecutor
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def small_pool(self) -> int:
        """Blocks in which the longest prompt fits, and all of them together do not."""
        return (max(self.lengths) + NUM_OUTPUT) // 16 + 2


def _generate(folder: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_OUTPUT, do_sample=False, use_cache=True
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(
    scope="module",
    params=[
        *((name, LENGTHS) for name in (*NAMES, "mixtral")),
        pytest.param(("smollm2", SOME_LENGTHS), marks=pytest.mark.slow),
        pytest.param(("smollm2", LENGTHS), marks=pytest.mark.long),
    ],
    ids=lambda param: f"{param[0]}-{max(param[1])}",
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name, lengths = request.param
    folder = resolve_model("default", print) if name == "smollm2" else tiny_model(name)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        cache=CacheConfig(num_blocks=NUM_BLOCKS, host_memory_bytes=256 << 20),
        # Tiny matrices gain nothing from a second thread.
        threads=None if name == "smollm2" else 1,
    )
    executor = ModelExecutor.load(config)
    poison(executor)
    source = random.Random(name)
    first = 1000 if name == "smollm2" else 3
    prompts = [
        [source.randrange(first, executor.info.vocab_size) for _ in range(length)]
        for length in lengths
    ]
    yield Subject(name, executor, prompts, _generate(folder, prompts))
    executor.close()


def poison(executor: ModelExecutor) -> None:
    """Nothing that is there now may be read again, on the device or in host memory."""
    for memory in (executor._cache.storage, executor._host._slots):
        memory.fill_(float("nan"))


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_OUTPUT)


def outputs(rig: Rig, subject: Subject) -> list[list[int]]:
    return [rig.output["ingress", str(number)] for number in range(len(subject.prompts))]


def add_all(rig: Rig, subject: Subject, sampling: Sequence[SamplingParams]) -> None:
    for number, prompt in enumerate(subject.prompts):
        rig.add(str(number), prompt, sampling[number])


def run_alone(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    rig = Rig(NUM_BLOCKS, executor=subject.executor, reuse=False)
    for number, prompt in enumerate(subject.prompts):
        rig.add(str(number), prompt, sampling[number])
        rig.drain()
    return outputs(rig, subject)


def run_together(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    rig = Rig(NUM_BLOCKS, executor=subject.executor, max_num_seqs=16)
    add_all(rig, subject, sampling)
    rig.drain()
    return outputs(rig, subject)


def run_chunked(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    rig = Rig(
        NUM_BLOCKS, executor=subject.executor, max_num_batched_tokens=70, long_prefill_threshold=50
    )
    add_all(rig, subject, sampling)
    rig.drain()
    return outputs(rig, subject)


def run_preempted(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    rig = Rig(subject.small_pool, executor=subject.executor, max_num_batched_tokens=200)
    add_all(rig, subject, sampling)
    rig.drain()
    assert rig.scheduler.counts.preempted >= 3
    return outputs(rig, subject)


def run_overlapped(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """Each step planned before the tokens of the one before it are known, in too small a pool."""
    rig = Rig(
        subject.small_pool, executor=subject.executor, overlap=True, max_num_batched_tokens=200
    )
    add_all(rig, subject, sampling)
    rig.drain_overlapped()
    assert rig.scheduler.counts.preempted >= 2
    return outputs(rig, subject)


def run_cached(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    rig = Rig(NUM_BLOCKS, executor=subject.executor)
    add_all(rig, subject, sampling)
    rig.drain()
    cold = outputs(rig, subject)
    rig.finished.clear()
    hits = []
    for number, prompt in enumerate(subject.prompts):
        request = rig.add(str(number), prompt, sampling[number])
        rig.drain()
        hits.append(request.cached_tokens)
    for length, hit in zip(subject.lengths, hits, strict=True):
        # Whole blocks; and of the last one what its first owner has filled.
        assert (length - 1) // 16 * 16 <= hit <= length - 1
    assert sum(hits) > sum((length - 1) // 16 * 16 for length in subject.lengths)
    assert outputs(rig, subject) == cold
    return cold


def run_borrowed(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """Each after another prompt that leaves its own somewhere within a block."""
    rig = Rig(NUM_BLOCKS, executor=subject.executor)
    for number, prompt in enumerate(subject.prompts):
        cut = len(prompt) * 2 // 3
        rest = [token_id - 1 for token_id in prompt[cut:]] + prompt[:1] * 32
        rig.add(f"cousin of {number}", prompt[:cut] + rest, greedy())
        rig.drain()
        rig.add(str(number), prompt, sampling[number])
        rig.drain()
    assert rig.scheduler.counts.copied_tokens > 3 * len(subject.prompts)
    return outputs(rig, subject)


def run_re_added(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """Half of the output comes from elsewhere, as after a failover."""
    whole = run_together(subject, sampling)
    rig = Rig(NUM_BLOCKS, executor=subject.executor)
    for number, prompt in enumerate(subject.prompts):
        delivered = whole[number][: len(whole[number]) // 2]
        rig.add(str(number), prompt, sampling[number], output=delivered)
    rig.drain()
    assert outputs(rig, subject) == whole
    return whole


def run_through_host(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """Each prompt four times, in a pool that keeps hardly any prefix, so that they come back from
    the host."""
    rig = Rig(subject.small_pool, executor=subject.executor, num_slots=NUM_SLOTS)
    num_prompts = len(subject.prompts)
    num_streams = 4 * num_prompts
    for number in range(num_streams):
        rig.add(str(number), subject.prompts[number % num_prompts], sampling[number % num_prompts])
    rig.drain()
    assert rig.scheduler.counts.preempted >= 3
    assert rig.tiers is not None
    assert rig.tiers.counts.loaded > 5 * num_prompts
    for number in range(num_streams):
        first = rig.output["ingress", str(number % num_prompts)]
        assert rig.output["ingress", str(number)] == first
    return outputs(rig, subject)


def run_restarted(subject: Subject, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """By an engine that finds what another one has left on disk."""
    disk = MemoryDisk()
    former = Rig(NUM_BLOCKS, executor=subject.executor, num_slots=NUM_SLOTS, disk=disk)
    add_all(former, subject, sampling)
    former.drain()
    poison(subject.executor)
    rig = Rig(NUM_BLOCKS, executor=subject.executor, num_slots=NUM_SLOTS, disk=disk)
    add_all(rig, subject, sampling)
    rig.drain()
    assert rig.tiers is not None
    num_full = sum((length - 1) // 16 for length in subject.lengths)
    assert rig.tiers.counts.promoted >= num_full
    assert rig.tiers.counts.loaded >= num_full
    return outputs(rig, subject)


WAYS = [
    run_alone,
    run_together,
    run_chunked,
    run_preempted,
    run_overlapped,
    run_cached,
    run_borrowed,
    run_through_host,
    run_restarted,
    run_re_added,
]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_output_is_hugging_faces(subject: Subject, way: object) -> None:
    assert callable(way)
    assert way(subject, [greedy()] * len(subject.prompts)) == subject.expected


SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, min_p=0.05, repetition_penalty=1.2),
]


def seeded(number: int) -> SamplingParams:
    fields = {**to_dict(SAMPLED[number % 4]), "seed": number // 2, "choice": number % 2}
    return SamplingParams(**fields, max_tokens=NUM_OUTPUT)  # type: ignore[arg-type]


def test_a_cache_hit_changes_no_logprob(subject: Subject) -> None:
    """The same prompt cold, after an unrelated one, and from the cache, in chunks."""
    rig = Rig(NUM_BLOCKS, executor=subject.executor, long_prefill_threshold=70)
    params = SamplingParams(max_tokens=4, logprobs=3)
    prompt, other = subject.prompts[-2], subject.prompts[-3]
    runs = []
    for name, token_ids in (("cold", prompt), ("unrelated", other), ("hit", prompt)):
        request = rig.add(name, token_ids, params)
        logprobs: list[float] = []
        while (plan := rig.scheduler.schedule()) is not None:
            results = rig.scheduler.commit(rig.executor.execute(plan))
            rig.take(results)
            for _, item in results:
                assert item.logprobs is not None
                logprobs += [value for each in item.logprobs for _, value in each.top]
        runs.append((rig.output[request.key], request.cached_tokens or 0, logprobs))
    cold, _, hit = runs
    assert (cold[1], hit[1]) == (0, (len(prompt) - 1) // 16 * 16 + (len(prompt) - 1) % 16)
    assert cold[0] == hit[0]
    assert hit[2] == pytest.approx(cold[2], abs=2e-4)


def to_dict(params: SamplingParams) -> dict[str, object]:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return {name: value for name, value in fields.items() if name not in ("max_tokens",)}


def test_seeded_output_is_the_same_whatever_happens(subject: Subject) -> None:
    sampling = [seeded(number) for number in range(len(subject.prompts))]
    expected = run_alone(subject, sampling)
    assert expected != subject.expected
    for way in WAYS[1:]:
        assert way(subject, sampling) == expected, way.__name__
