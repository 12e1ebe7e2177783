"""The other Triton kernels against plain torch."""

import math

import pytest
import torch

from engine.kernels.batch import Angles
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.torch_ops import TorchOps
from engine.kernels.triton.ops import TritonOps
from engine.sampling.noise import gumbel_noise, noise_key
from tests.engine.triton.rig import DEVICE, Step, check, pairwise, randn

OPS = TritonOps(DEVICE)
ORACLE = TorchOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = torch.float8_e4m3fn
PARTS = [(0, 7), (12, 1), (5, 9)]


def angles(num_tokens, half):
    turns = torch.arange(num_tokens)[:, None] * 0.7 ** torch.arange(half)[None, :]
    return Angles(turns.cos().to(DEVICE), turns.sin().to(DEVICE))


def check_caches(found, expected):
    """What was written is right, and nothing else was."""
    for one, other in zip(found, expected, strict=True):
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}.get(one.dtype, 2e-2)
        if one.dtype == FLOAT8:
            # Rounding of a rotation can go to the neighbour: one step of three bits.
            tolerance = 0.13
        torch.testing.assert_close(
            one.float(), other.float(), rtol=tolerance, atol=1e-6, equal_nan=True
        )


def empty_caches(step):
    return tuple(torch.full_like(cache.float(), math.nan).to(cache.dtype) for cache in step.caches)


@pytest.mark.parametrize(
    "case",
    pairwise(
        dim=[16, 80, 96, 128],
        rotated=[1.0, 0.5],
        heads=[(4, 2), (9, 3), (12, 1)],
        block_size=[8, 16],
        dtype=DTYPES,
        cache=["same", "float8"],
        normed=[False, True],
    ),
    ids=lambda case: "-".join(str(value) for value in case.values()),
)
def test_rope_and_write_kv(case):
    heads, kv_heads = case["heads"]
    dtype, dim = case["dtype"], case["dim"]
    cache_dtype = FLOAT8 if case["cache"] == "float8" else None
    step = Step(PARTS, heads, kv_heads, dim, case["block_size"], dtype, cache_dtype)
    merged = randn(step.batch.num_tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
    if case["normed"]:
        query, key = query.float() * 1.3, key.float() * 0.7
    turns = angles(step.batch.num_tokens, int(dim * case["rotated"]) // 2)
    found, expected = empty_caches(step), empty_caches(step)
    rotated = OPS.rope_and_write_kv(query, key, value, turns, found, step.batch)
    check(rotated, ORACLE.rope_and_write_kv(query, key, value, turns, expected, step.batch))
    check_caches(found, expected)
    assert found[1].float().isnan().sum() == expected[1].float().isnan().sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, FLOAT8])
def test_write_kv(dtype, cache_dtype):
    """Bit for bit, also from a layout that has the heads before the tokens."""
    step = Step(PARTS, 6, 3, 80, 16, dtype, cache_dtype)
    key = randn(3, step.batch.num_tokens, 80, dtype=dtype).transpose(0, 1)
    value = (randn(step.batch.num_tokens, 3, 80, seed=1) * 300).to(dtype)
    found, expected = empty_caches(step), empty_caches(step)
    OPS.write_kv(key, value, *found, step.batch)
    ORACLE.write_kv(key, value, *expected, step.batch)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_float8_is_rounded_as_torch_does():
    """Every number of it, and what lies next to and halfway between two."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = codes[codes.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    numbers = torch.cat([numbers, halves, halves * (1 + 2**-20), halves * (1 - 2**-20)])
    numbers = torch.cat([numbers, torch.tensor([math.nan, 449.0, 1e9, -math.inf, 1e-30])])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 16)]).view(-1, 1, 16).to(DEVICE)
    step = Step([(0, len(numbers))], 1, 1, 16, 16, torch.float32, FLOAT8)
    found, expected = empty_caches(step), empty_caches(step)
    OPS.write_kv(numbers, numbers, *found, step.batch)
    ORACLE.write_kv(numbers, numbers, *expected, step.batch)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))


def test_padding_is_not_written():
    step = Step([(3, 1), (20, 1)], 4, 2, 32, 16, torch.float32)
    padded = PaddedDecodeBatch.allocate(4, 4, 16, DEVICE)
    padded.fill(step.batch)
    query, key, value = randn(4, 4, 32), randn(4, 2, 32), randn(4, 2, 32, seed=1)
    for ops in (OPS, ORACLE):
        found, expected = empty_caches(step), empty_caches(step)
        ops.write_kv(key, value, *found, padded)
        ORACLE.write_kv(key[:2], value[:2], *expected, step.batch)
        check_caches(found, expected)
        found, expected = empty_caches(step), empty_caches(step)
        ops.rope_and_write_kv(query, key, value, angles(4, 16), found, padded)
        ORACLE.rope_and_write_kv(query[:2], key[:2], value[:2], angles(2, 16), expected, step.batch)
        check_caches(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 16), (70, 3, 80), (2, 3000), (0, 64)])
def test_rms_norm(shape, dtype):
    weight = randn(shape[-1], seed=1)
    for result in (dtype, torch.float32):
        x = randn(*shape, dtype=dtype)
        check(OPS.rms_norm(x, weight, 1e-5, result), ORACLE.rms_norm(x, weight, 1e-5, result))


def test_rms_norm_of_a_part_of_each_row():
    merged = randn(7, 12, 32, dtype=torch.bfloat16)
    for part in (merged[:, 2:9], merged[:, 2:9].flatten(1)):
        weight = randn(part.shape[-1], seed=1)
        check(
            OPS.rms_norm(part, weight, 1e-5, torch.float32),
            ORACLE.rms_norm(part, weight, 1e-5, torch.float32),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 576, 5000])
@pytest.mark.parametrize("with_weight", [True, False])
def test_add_rms_norm(size, dtype, with_weight):
    weight = randn(size, seed=1) if with_weight else None
    residual, update = randn(9, size, seed=2), randn(9, size, dtype=dtype)
    own = residual.clone()
    found = OPS.add_rms_norm(own, update, weight, 1e-6, dtype)
    check(found, ORACLE.add_rms_norm(residual, update, weight, 1e-6, dtype))
    assert torch.equal(own, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [96, 1500])
def test_gated_activation(kind, size, dtype):
    gate_up = randn(5, 2 * size, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1], gate_up[0, 2] = -90.0, 90.0, 0.0
    check(OPS.gated_activation(gate_up, kind), ORACLE.gated_activation(gate_up, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 384, 5000])
def test_row_max(size, dtype):
    logits = randn(6, size, dtype=dtype)
    logits[1, 5] = logits[1, size - 1] = 77.0
    logits[2, 3], logits[2, size - 1] = math.inf, math.nan
    logits[3] = -math.inf
    logits[4, 2], logits[4, 1] = math.inf, 60000.0
    best, ids = OPS.row_max(logits)
    expected, expected_ids = logits.cpu().max(dim=-1)
    assert ids.tolist() == expected_ids.tolist()
    assert ids.tolist()[1:5] == [5, size - 1, 0, 2]
    torch.testing.assert_close(best.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [8, 384, 50_000])
def test_gumbel_argmax(size):
    """The published noise, from the same bits: no draw of these is another one."""
    keys = [noise_key(seed, 3, 17) for seed in range(8)] + [(1 << 64) - 1, 1 << 63]
    scaled = randn(len(keys), size).double() * 0.1
    scaled[3, : size // 2] = -math.inf
    noise = gumbel_noise(keys, torch.arange(size, device=DEVICE))
    expected = (scaled + noise).argmax(dim=-1)
    assert OPS.gumbel_argmax(scaled.clone(), keys).tolist() == expected.tolist()
    flat = torch.zeros_like(scaled)
    assert OPS.gumbel_argmax(flat, keys).tolist() == noise.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, FLOAT8])
def test_copy_blocks(dtype):
    storage = randn(3, 2, 7, 2, 16, 80)
    storage[:, :, 4] = math.nan
    storage = storage.to(dtype)
    copies = [(0, 1, 16), (2, 3, 5), (0, 5, 1), (4, 6, 9)]
    expected = storage.clone()
    for source, target, count in copies:
        expected[:, :, target, :, :count] = storage[:, :, source, :, :count]
    for ops in (OPS, ORACLE):
        found = storage.clone()
        ops.copy_blocks(found, copies)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        ops.copy_blocks(found, [])
