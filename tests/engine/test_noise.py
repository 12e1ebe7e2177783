"""Gumbel noise: the published generator, the right distribution, and nothing but its counter."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.noise import gumbel_noise, noise_key

_MASK = (1 << 64) - 1


def splitmix64(state, count):
    """Outputs of the published C code (https://prng.di.unimi.it/splitmix64.c)."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def test_known_values_of_splitmix64():
    assert splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(key=st.integers(0, _MASK))
def test_noise_is_splitmix64_of_the_key(key):
    found = gumbel_noise([key], torch.arange(20))[0].tolist()
    for value, z in zip(found, splitmix64(key, 20), strict=True):
        uniform = ((z >> 12) + 0.5) * 2.0**-52
        assert math.isclose(value, -math.log(-math.log(uniform)), rel_tol=1e-12, abs_tol=1e-12)


@given(
    seed=st.integers(0, (1 << 63) - 1),
    choice=st.integers(0, 65535),
    position=st.integers(0, 1 << 31),
)
def test_the_key_is_three_steps_of_splitmix64(seed, choice, position):
    key = splitmix64(seed, 1)[0]
    key = splitmix64((key + choice) & _MASK, 1)[0]
    key = splitmix64((key + position) & _MASK, 1)[0]
    assert noise_key(seed, choice, position) == key


def test_a_subset_and_a_batch_have_the_same_noise():
    keys = [noise_key(seed, 0, 5) for seed in range(4)]
    whole = gumbel_noise(keys, torch.arange(1000))
    ids = torch.tensor([999, 3, 500])
    assert torch.equal(gumbel_noise(keys[2:3], ids)[0], whole[2, ids])


def test_neighbours_are_unrelated():
    """Seeds, choices and positions next to each other give uncorrelated noise."""
    keys = [noise_key(0, 0, 0), noise_key(1, 0, 0), noise_key(0, 1, 0), noise_key(0, 0, 1)]
    assert len({*keys}) == 4
    correlation = torch.corrcoef(gumbel_noise(keys, torch.arange(50_000)))
    assert (correlation - torch.eye(4, dtype=torch.float64)).abs().max() < 0.02


def test_moments_of_the_gumbel_distribution():
    noise = gumbel_noise([noise_key(7, 0, 0)], torch.arange(400_000))[0]
    assert noise.dtype == torch.float64
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    assert noise.isfinite().all()
