"""The Triton attention kernel against plain torch."""

import dataclasses

import pytest
import torch

from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.reference import AttentionOptions
from engine.kernels.torch_ops import TorchOps
from engine.kernels.triton import attention
from engine.kernels.triton.ops import TritonOps
from engine.kernels.triton.tuning import Tiles, Tuning, tuning_for
from tests.engine.triton.rig import DEVICE, Step, check, pairwise, randn

OPS = TritonOps(DEVICE)
ORACLE = TorchOps()

# A program of this tuning takes 16 rows and 16 keys, and split sequences have short segments, so
# that every edge is met by short sequences, which the interpreter gets through.
SMALL = Tuning(
    Tiles(16, 16, 1, 1, 1 << 20), Tiles(16, 16, 1, 1, 1 << 20), 24, segment_keys=16, max_segments=5
)

BATCHES = {
    "mixed": [(0, 7), (12, 1), (5, 18), (0, 1), (70, 1), (16, 16), (33, 3)],
    "decode": [(0, 1), (15, 1), (16, 1), (40, 1), (99, 1)],
    "prefill": [(0, 33)],
    "chunk": [(47, 9), (0, 2)],
    "one": [(150, 1)],
}

GRID = pairwise(
    batch=list(BATCHES),
    dim=[16, 32, 64, 80, 96, 128, 256],
    group=[1, 2, 3, 5, 8, 9],
    kv_heads=[1, 2, 3],
    block_size=[8, 16, 32],
    dtype=["float32", "bfloat16", "float16", "float8"],
    window=[None, 1, 6, 40],
    softcap=[None, 1.5, 30.0],
    sinks=[False, True],
    tuning=["default", "small"],
)


def name(case):
    return "-".join(str(value) for value in case.values())


def run(step, options, tuning=None):
    ops = TritonOps(DEVICE, tuning)
    found = ops.paged_attention(step.query, *step.caches, step.batch, options)
    expected = ORACLE.paged_attention(step.query, *step.caches, step.batch, options)
    check(found, expected)
    return found


@pytest.mark.parametrize("case", GRID, ids=name)
def test_grid(case):
    heads = case["group"] * case["kv_heads"]
    is_float8 = case["dtype"] == "float8"
    dtype = torch.bfloat16 if is_float8 else getattr(torch, case["dtype"])
    step = Step(
        BATCHES[case["batch"]],
        heads,
        case["kv_heads"],
        case["dim"],
        case["block_size"],
        dtype,
        torch.float8_e4m3fn if is_float8 else None,
    )
    options = AttentionOptions(
        case["dim"] ** -0.5,
        case["window"],
        case["softcap"],
        randn(heads) if case["sinks"] else None,
        0.5 if is_float8 else 1.0,
    )
    run(step, options, SMALL if case["tuning"] == "small" else None)


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_sequence_is_split(window, monkeypatch):
    step = Step([(1500, 1)], 4, 2, 64, 16, torch.float32)
    options = AttentionOptions(0.125, window, sinks=randn(4))
    seen = []
    monkeypatch.setattr(
        attention,
        "_partials",
        lambda output, segments, original=attention._partials: (
            seen.append(segments) or original(output, segments)
        ),
    )
    split = run(step, options)
    assert seen == [5]
    whole = run(step, options, dataclasses.replace(tuning_for(DEVICE), max_segments=1))
    assert seen == [5]
    check(split, whole)


def test_a_chunk_is_split_too():
    run(Step([(300, 4), (3, 2)], 4, 2, 32, 16, torch.float32), AttentionOptions(0.2), SMALL)


def test_scores_of_any_size():
    """Large ones neither overflow nor lose the softmax; the soft-cap saturates."""
    step = Step(BATCHES["mixed"], 4, 2, 32, 16, torch.float32)
    step.query *= 200.0
    run(step, AttentionOptions(0.2))
    run(step, AttentionOptions(0.2, softcap=20.0))
    step.query *= 1e-4
    run(step, AttentionOptions(0.2, softcap=50.0))


def test_a_sequence_does_not_see_the_others():
    options = AttentionOptions(0.2)
    together = Step(BATCHES["mixed"], 4, 2, 32, 16, torch.float32)
    rows = slice(8, 26)
    alone = dataclasses.replace(together.slices[2])
    batch = type(together.batch).build([alone], 16, DEVICE)
    found = OPS.paged_attention(together.query, *together.caches, together.batch, options)
    single = OPS.paged_attention(together.query[rows], *together.caches, batch, options)
    assert torch.equal(found[rows], single)


@pytest.mark.parametrize("tuning", [None, SMALL], ids=["whole", "split"])
def test_padding_contributes_nothing(tuning):
    """A batch made once takes one step after the other; its rows left over give zeros."""
    ops = TritonOps(DEVICE, tuning)
    padded = PaddedDecodeBatch.allocate(6, 12, 16, DEVICE)
    options = AttentionOptions(0.2, sinks=randn(4))
    for parts in ([(40, 1), (0, 1), (99, 1), (16, 1)], [(7, 1)]):
        step = Step(parts, 4, 2, 32, 16, torch.float32)
        padded.fill(step.batch)
        query = randn(6, 4, 32)
        found = ops.paged_attention(query, *step.caches, padded, options)
        count = len(parts)
        expected = ORACLE.paged_attention(query[:count], *step.caches, step.batch, options)
        check(found[:count], expected)
        assert (found[count:] == 0.0).all()
        check(ORACLE.paged_attention(query, *step.caches, padded, options), found)


def test_nothing_is_split_where_programs_are_many_or_sequences_short():
    tuning = Tuning(Tiles(16, 16, 1, 1, 1 << 20), Tiles(16, 16, 1, 1, 1 << 20), fill_programs=100)
    assert tuning.num_segments(1, 100_000) == 64
    assert tuning.num_segments(8, 100_000) == 12
    assert tuning.num_segments(8, 1_000) == 3
    assert tuning.num_segments(8, 200) == 1
    assert tuning.num_segments(51, 100_000) == 1
    assert tuning.num_segments(500, 100_000) == 1


def test_tiles_fit_shared_memory():
    tiles = Tiles(64, 64, 4, 2, 64 << 10)
    assert [tiles.keys_for(dim, 2) for dim in (64, 128, 256, 512)] == [64, 64, 64, 32]
    assert [tiles.keys_for(dim, 4) for dim in (64, 128, 256, 4096)] == [64, 64, 32, 16]
