"""Workloads of the engine benchmark: files with a seed."""

import msgspec
import pytest

from bench.workload import Workload, load_workload


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_prompts_are_the_same_every_time_and_other_in_every_round(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    prompts = workload.prompts(49152, round_number=1)
    assert prompts == load_workload(name).prompts(49152, round_number=1)
    assert len(prompts) == workload.num_requests
    for prompt in prompts:
        assert len(prompt) == workload.shared_tokens + workload.own_tokens
        assert prompt[: workload.shared_tokens] == prompts[0][: workload.shared_tokens]
        assert all(1000 <= token_id < 49152 for token_id in prompt)
    own = {tuple(prompt[workload.shared_tokens :]) for prompt in prompts}
    assert len(own) == workload.num_requests
    other = workload.prompts(49152, round_number=2)
    assert all(a[:16] != b[:16] for a, b in zip(prompts, other, strict=True))


def test_a_small_vocabulary_is_kept_to() -> None:
    prompts = load_workload("w1").prompts(64, round_number=0)
    assert all(32 <= token_id < 64 for token_id in prompts[0])


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="frobnicate"):
        msgspec.json.decode(b'{"name": "x", "frobnicate": 1}', type=Workload)
