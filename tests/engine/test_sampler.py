"""Sampling: each processor, each filter, the distribution, and that rows are independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import Sampled
from engine.sampling import sampler as sampler_module
from engine.sampling.noise import gumbel_noise, noise_key
from engine.sampling.sampler import Sampler, top_ids
from engine.sampling.state import SamplingState
from engine.wire import SamplingParams

EOS = 0
PROMPT = (5, 6)


def draw(logits, output=(), prompt=PROMPT, **params):
    """One row, alone; the token, or the text of the failure."""
    found = draw_full(logits, output, prompt, **params)
    return found if isinstance(found, str) else found.token_ids[0]


def draw_full(logits, output=(), prompt=PROMPT, **params):
    state = SamplingState(SamplingParams(**params), (*prompt, *output), len(prompt))
    return Sampler((EOS,)).sample(torch.tensor([logits]), [state])[0]


def surviving(logits, num=400, **params):
    """Every token that some seed draws."""
    params = {"temperature": 1.0} | params
    rows = torch.tensor([logits]).expand(num, -1)
    states = [SamplingState(SamplingParams(seed=i, **params), PROMPT, 2) for i in range(num)]
    return {item.token_ids[0] for item in Sampler((EOS,)).sample(rows, states)}


def test_greedy_takes_the_largest_and_the_lowest_of_equals():
    assert draw([0.0, 3.0, 1.0, 3.0]) == 1
    assert draw([0.0, 3.0, 1.0, 3.0], temperature=1e-9) in (1, 3)


def test_logit_bias_adds_and_ids_beyond_the_vocabulary_are_ignored():
    assert draw([0.0, 3.0, 1.0], logit_bias={2: 2.5, 99: 100.0}) == 2
    assert draw([0.0, 3.0, 1.0], logit_bias={1: -100.0}) == 2


def test_allowed_token_ids():
    assert draw([0.0, 3.0, 1.0, 2.0], allowed_token_ids=(2, 0, 77)) == 2
    assert surviving([0.0, 3.0, 1.0, 2.0], allowed_token_ids=(0, 2)) == {0, 2}


def test_min_tokens_holds_back_end_and_stop_tokens():
    logits = [9.0, 8.0, 7.0, 6.0]
    params = {"min_tokens": 2, "stop_token_ids": (1,)}
    assert draw(logits, output=(3,), **params) == 2
    assert draw(logits, output=(3, 3), **params) == EOS
    assert draw(logits, output=(), ignore_eos=True, **params) == 2


def test_min_tokens_with_only_end_tokens_allowed_fails_with_the_reason():
    assert "no token is left" in draw([1.0, 2.0], min_tokens=1, allowed_token_ids=(EOS,))
    assert draw([1.0, 2.0], output=(1,), min_tokens=1, allowed_token_ids=(EOS,)) == EOS


def test_bad_words_end_only_when_all_but_the_last_token_is_output():
    logits = [0.0, 1.0, 2.0, 3.0]
    assert draw(logits, bad_words=((3,),)) == 2
    assert draw(logits, output=(1, 2), bad_words=((1, 2, 3),)) == 2
    assert draw(logits, output=(2, 2), bad_words=((1, 2, 3),)) == 3
    assert draw(logits, output=(2,), bad_words=((1, 2, 3), (2, 3))) == 2
    assert draw(logits, output=(2,), prompt=(0, 1), bad_words=((1, 2, 3),)) == 3


def test_repetition_penalty_counts_prompt_and_output():
    logits = [0.0, 4.0, 3.0, 2.0, -1.0]
    assert draw(logits, prompt=(1,), output=(), repetition_penalty=1.5) == 2
    assert draw(logits, prompt=(1,), output=(2,), repetition_penalty=2.5) == 3
    assert draw([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1


def test_presence_and_frequency_penalties_count_output_only():
    logits = [0.0, 4.0, 3.0]
    assert draw(logits, prompt=(1, 1, 1), presence_penalty=2.0, frequency_penalty=2.0) == 1
    assert draw(logits, output=(1,), presence_penalty=1.5) == 2
    assert draw(logits, output=(1,), frequency_penalty=0.6) == 1
    assert draw(logits, output=(1, 1), frequency_penalty=0.6) == 2


def test_temperature_zero_is_greedy_after_penalties():
    assert draw([0.0, 4.0, 3.0], output=(1,), presence_penalty=2.0, top_k=1, seed=3) == 2


def test_filters_keep_what_they_say():
    logits = [math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)]
    assert surviving(logits) == {0, 1, 2, 3, 4}
    assert surviving(logits, top_k=2) == {0, 1}
    assert surviving(logits, top_p=0.6) == {0, 1}
    assert surviving(logits, top_p=0.75) == {0, 1, 2}
    assert surviving(logits, top_p=1e-9) == {0}
    assert surviving(logits, min_p=0.3) == {0, 1, 2}
    assert surviving(logits, min_p=1.0) == {0}
    # After top-k the rest is renormalised: 0.4 of 0.7 is below 0.6, so both stay.
    assert surviving(logits, top_k=2, top_p=0.6) == {0, 1}
    assert surviving(logits, top_k=2, top_p=0.5) == {0}
    # The temperature comes first: a hot distribution is flatter, and min_p keeps more of it.
    assert surviving(logits, min_p=0.3, temperature=3.0) == {0, 1, 2, 3, 4}


def test_top_k_of_equals_keeps_the_lowest_ids():
    assert surviving([1.0, 2.0, 1.0, 1.0], top_k=2) == {0, 1}
    assert top_ids(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 4).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_the_quick_nucleus_is_the_sorted_one(monkeypatch, top_p):
    logits = torch.randn(500, dtype=torch.float64) * 2
    scaled = logits - logits.max()
    monkeypatch.setattr(sampler_module, "_NUCLEUS_GUESS", 1000)
    expected = sampler_module._candidates(scaled, 0, top_p)
    monkeypatch.setattr(sampler_module, "_NUCLEUS_GUESS", 20)
    assert torch.equal(sampler_module._candidates(scaled, 0, top_p), expected)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_softmax(params):
    """Chi-square of 6,000 seeded draws against the exact probabilities (99.9 % quantile)."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.2])
    num = 6_000
    states = [SamplingState(SamplingParams(seed=i, **params), PROMPT, 2) for i in range(num)]
    draws = Sampler((EOS,)).sample(logits.expand(num, -1), states)
    counts = torch.bincount(torch.tensor([item.token_ids[0] for item in draws]), minlength=8)
    expected = expected_probabilities(logits.double(), **params) * num
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert statistic < [0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3][int(kept.sum()) - 1]


def expected_probabilities(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    p = (logits / temperature).softmax(0)
    p[p < min_p * p.max()] = 0
    order = p.argsort(descending=True)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    sorted_p = p[order]
    p[order[sorted_p.cumsum(0) - sorted_p >= top_p]] = 0
    return p / p.sum()


def test_a_draw_is_the_published_formula():
    """Any other engine can repeat a draw from the logits, the parameters and the position."""
    logits = torch.randn(300)
    for seed, choice in ((1, 0), (1, 3), (99, 0)):
        position = len(PROMPT) + 3
        noise = gumbel_noise([noise_key(seed, choice, position)], torch.arange(300))[0]
        expected = (logits.double() / 0.8 + noise).argmax().item()
        params = {"temperature": 0.8, "seed": seed, "choice": choice}
        assert draw(logits.tolist(), output=(1, 2, 3), **params) == expected


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    min_tokens=st.sampled_from([0, 4]),
    bad_words=st.sampled_from([(), ((3,), (1, 2))]),
    logit_bias=st.sampled_from([{}, {4: 1.0}]),
    seed=st.integers(0, 1 << 40),
    choice=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=40, deadline=None)
@given(params=st.lists(PARAMS, min_size=2, max_size=12), salt=st.integers(0, 1000))
def test_a_row_is_independent_of_its_batch_and_of_how_its_state_came_about(params, salt):
    """The same draws alone, in a batch, and from a state that grew instead of being rebuilt."""
    logits = torch.randn(len(params), 40, generator=torch.Generator().manual_seed(salt))
    tokens = torch.randint(0, 40, (len(params), 8), generator=torch.Generator().manual_seed(salt))
    rebuilt = [SamplingState(p, t, 3) for p, t in zip(params, tokens.tolist(), strict=True)]
    sampler = Sampler((EOS,))
    together = sampler.sample(logits, rebuilt)
    for i, (p, ids) in enumerate(zip(params, tokens.tolist(), strict=True)):
        grown = SamplingState(p, ids[:4], 3)
        grown.counts(40, logits.device)
        for token_id in ids[4:]:
            grown.append(token_id)
        assert sampler.sample(logits[i : i + 1], [grown]) == [together[i]]
    assert sampler.sample(logits, rebuilt) == together


def test_a_row_that_is_not_a_number_fails_alone():
    logits = torch.randn(5, 30)
    greedy, random = SamplingParams(), SamplingParams(temperature=1.0, logprobs=1)
    states = [SamplingState(p, PROMPT, 2) for p in (greedy, random, greedy, random, greedy)]
    sampler = Sampler((EOS,))
    expected = sampler.sample(logits, states)
    poisoned = logits.clone()
    poisoned[1, 7] = math.nan
    poisoned[2, 3] = math.inf
    poisoned[4] = -math.inf
    found = sampler.sample(poisoned, states)
    assert (found[0], found[3]) == (expected[0], expected[3])
    assert "not a number" in found[1]
    assert "not a number" in found[2]
    assert "no token is left" in found[4]


def test_logprobs_are_of_the_raw_logits():
    logits = [1.0, 3.0, 2.0, 3.0]
    exact = torch.tensor(logits, dtype=torch.float64).log_softmax(0).tolist()
    found = draw_full(logits, logit_bias={0: 50.0}, temperature=0.3, seed=1, logprobs=3)
    assert isinstance(found, Sampled)
    assert found.token_ids == (0,)
    (logprobs,) = found.logprobs
    assert logprobs.logprob == pytest.approx(exact[0], abs=1e-6)
    assert [token for token, _ in logprobs.top] == [1, 3, 2]
    assert [value for _, value in logprobs.top] == pytest.approx([exact[i] for i in (1, 3, 2)])
    assert draw_full(logits, logprobs=0).logprobs[0].top == ()
    assert draw_full(logits, logprobs=20).logprobs[0].top[3][0] == 0
    assert draw_full(logits).logprobs is None


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, 20)
    before = logits.clone()
    params = SamplingParams(temperature=1.0, logit_bias={1: 5.0}, allowed_token_ids=(1, 2))
    Sampler((EOS,)).sample(logits, [SamplingState(params, PROMPT, 2)] * 2)
    assert torch.equal(logits, before)


def test_bfloat16_logits():
    logits = torch.randn(3, 50).bfloat16()
    states = [SamplingState(SamplingParams(logprobs=1), PROMPT, 2)] * 3
    for row, item in zip(logits, Sampler((EOS,)).sample(logits, states), strict=True):
        assert item.token_ids[0] == row.float().argmax()
        assert item.logprobs[0].logprob == pytest.approx(row.float().log_softmax(0).max().item())
