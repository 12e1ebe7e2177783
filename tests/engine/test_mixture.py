"""A layer of experts on the device alone, against the way that reads its routing on the host."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.kernels.torch_ops import TorchOps
from engine.models import mixture as mixtures
from engine.models.decoder_traits import ExpertNames, ExpertTraits
from engine.models.mixture import ExpertWeights, mixture, mixture_on_device

HIDDEN, INNER = 24, 16


def gated(x):
    return TorchOps().gated_activation(x, "silu")


def layer(num_experts, num_per_token, normalized=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_experts)
    traits = ExpertTraits(
        frozenset({0}), num_experts, num_per_token, INNER, normalized, ExpertNames()
    )

    def weight(*shape):
        return torch.randn(shape, generator=generator).mul(0.3).to(dtype)

    weights = ExpertWeights(
        weight(num_experts, HIDDEN),
        weight(num_experts, 2 * INNER, HIDDEN),
        weight(num_experts, HIDDEN, INNER),
    )
    return weights, traits


def tokens(count, dtype=torch.float32):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "num_per_token"), [(32, 3), (8, 2), (4, 4), (2, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 17])
def test_both_ways_give_the_same(count, num_experts, num_per_token, normalized):
    weights, traits = layer(num_experts, num_per_token, normalized)
    x = tokens(count)
    expected = mixture(x, weights, traits, gated)
    found = mixture_on_device(x, weights, traits, gated)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 17])
def test_bfloat16_is_rounded_in_the_same_places(count):
    weights, traits = layer(32, 3, dtype=torch.bfloat16)
    x = tokens(count, torch.bfloat16)
    expected = mixture(x, weights, traits, gated)
    found = mixture_on_device(x, weights, traits, gated)
    torch.testing.assert_close(found, expected, atol=2**-7 * float(expected.abs().max()), rtol=0)


def test_the_form_that_moves_fewer_weights_is_taken(monkeypatch):
    taken = []
    for name in ("_by_copies", "_by_all"):
        monkeypatch.setattr(mixtures, name, lambda *args, name=name: taken.append(name))
    weights, traits = layer(32, 3)
    # Three moves of each of 3 choices: for 3 tokens 27 of 32 experts' worth, for 4 already 36.
    for count in (1, 3, 4, 256):
        mixture_on_device(tokens(count), weights, traits, gated)
    assert taken == ["_by_copies", "_by_copies", "_by_all", "_by_all"]


@pytest.mark.parametrize("count", [1, 4])
def test_an_expert_that_nobody_chose_has_no_influence(count):
    weights, traits = layer(32, 3)
    x = tokens(count).abs()
    weights.router[5] = -10.0
    expected = mixture(x, weights, traits, gated)
    weights.gate_up[5] = torch.inf
    weights.down[5] = torch.nan
    torch.testing.assert_close(
        mixture_on_device(x, weights, traits, gated), expected, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("count", [1, 4])
def test_nothing_is_read_on_the_host(count):
    """Tensors without values know no more than a graph does when it is captured."""
    with FakeTensorMode():
        weights, traits = layer_without_values(32, 3)
        x = torch.empty(count, HIDDEN)
        assert mixture_on_device(x, weights, traits, gated).shape == (count, HIDDEN)
        with pytest.raises(RuntimeError):
            mixture(x, weights, traits, gated)


def layer_without_values(num_experts, num_per_token):
    traits = ExpertTraits(frozenset({0}), num_experts, num_per_token, INNER, True, ExpertNames())
    weights = ExpertWeights(
        torch.empty(num_experts, HIDDEN),
        torch.empty(num_experts, 2 * INNER, HIDDEN),
        torch.empty(num_experts, HIDDEN, INNER),
    )
    return weights, traits
