"""Counter-based Gumbel noise: what is drawn depends on the request and the place, on nothing else.

Invariant: the noise of a token id is a pure function of (seed, choice, position, token id). It is
the same alone or in a batch, on any replica, after a resumption and under any draft length, and
adding it to ``logit / temperature`` and taking the maximum is an exact draw from the softmax (the
Gumbel-max trick; Maddison, Tarlow, Minka, "A* Sampling", NeurIPS 2014).

The formula, in unsigned 64-bit arithmetic, so that C++ and Triton can repeat it bit for bit::

    mix(x)    = finalise(x + GOLDEN)                     # one step of splitmix64
    key       = mix(mix(mix(seed) + choice) + position)
    z         = finalise(key + (token_id + 1) * GOLDEN)  # output token_id of splitmix64(key)
    uniform   = ((z >> 12) + 0.5) * 2**-52               # float64, never 0 or 1
    noise     = -log(-log(uniform))                      # float64

splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014;
constants of its finaliser: Stafford's variant 13, as in https://prng.di.unimi.it/splitmix64.c.
"""

from collections.abc import Sequence

import torch

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def noise_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one draw; `position` is the number of tokens, prompt and output, before
    the one drawn."""
    return _mix(_mix(_mix(seed) + choice) + position)


def gumbel_noise(keys: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of `token_ids` (int64 ``[V]``) under each of N keys: float64 ``[N, V]``.

    Finite: uniforms lie in [2**-53, 1 - 2**-53], so the noise lies in (-3.61, 36.8).
    """
    # torch has no unsigned 64-bit arithmetic; two's complement wraps to the same bits, and a
    # logical shift is an arithmetic one with the copies of the sign bit masked away.
    z = (token_ids + 1) * _signed(_GOLDEN) + signed_keys(keys).to(token_ids.device)[:, None]
    z ^= _shift_right(z, 30)
    z *= _signed(_FACTOR_1)
    z ^= _shift_right(z, 27)
    z *= _signed(_FACTOR_2)
    z ^= _shift_right(z, 31)
    # 52 bits, not 53: with half a step added, 53 bits can round up to exactly 1.
    uniform = _shift_right(z, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def signed_keys(keys: Sequence[int]) -> torch.Tensor:
    """The bits of unsigned 64-bit keys as int64, which is the widest that torch computes with."""
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    z = (x + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * _FACTOR_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _FACTOR_2) & _MASK_64
    return z ^ (z >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
