"""Paged attention against a dense computation that knows nothing of blocks or batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import batch as batch_module
from engine.kernels import reference
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.reference import AttentionOptions, paged_attention, write_kv

HEADS, HEAD_DIM = 4, 8


def dense(q, k, v, options):
    """One sequence, token by token, in float64: q [Q, H, D], k and v [L, KV, D]."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for i in range(len(q)):
        place = len(k) - len(q) + i
        low = 0 if options.sliding_window is None else max(0, place - options.sliding_window + 1)
        for h in range(q.shape[1]):
            scores = k[low : place + 1, h // group].double() @ q[i, h].double() * options.scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total = total + options.sinks[h].double().exp()
            out[i, h] = (weights / total) @ v[low : place + 1, h // group].double()
    return out


class Paged:
    """Sequences in a cache in which everything that is not theirs is NaN."""

    def __init__(self, parts, block_size, kv_heads, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        needed = [-(-(start + length) // block_size) for start, length in parts]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
        self.caches = [
            torch.full((num_blocks, kv_heads, block_size, HEAD_DIM), math.nan, dtype=dtype)
            for _ in range(2)
        ]
        self.keys = [random(s + n, kv_heads, HEAD_DIM) for s, n in parts]
        self.values = [random(s + n, kv_heads, HEAD_DIM) for s, n in parts]
        self.queries = [random(n, HEADS, HEAD_DIM) for _, n in parts]
        ends = np.cumsum(needed)
        tables = [order[end - count : end] for end, count in zip(ends, needed, strict=True)]
        for i, (start, length) in enumerate(parts):
            for first, count in ((0, start), (start, length)):
                if count:
                    self.write(
                        [SequenceSlice(first, count, tables[i])], [i], block_size, first, count
                    )
        self.batch = AttentionBatch.build(
            [SequenceSlice(s, n, t) for (s, n), t in zip(parts, tables, strict=True)], block_size
        )

    def write(self, slices, sequences, block_size, first, count):
        batch = AttentionBatch.build(slices, block_size)
        keys = torch.cat([self.keys[i][first : first + count] for i in sequences])
        values = torch.cat([self.values[i][first : first + count] for i in sequences])
        write_kv(keys, values, *self.caches, batch)

    def run(self, options):
        found = paged_attention(torch.cat(self.queries), *self.caches, self.batch, options)
        parts = zip(self.queries, self.keys, self.values, strict=True)
        return found, torch.cat([dense(q, k, v, options) for q, k, v in parts])


RAGGED = [(0, 7), (12, 1), (5, 9), (0, 1), (30, 1), (16, 16)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_matches_a_dense_computation(kv_heads, window, softcap, sinks):
    sink_logits = torch.tensor([0.3, -1.0, 2.0, 0.0]) if sinks else None
    options = AttentionOptions(0.31, window, softcap, sink_logits)
    found, expected = Paged(RAGGED, 4, kv_heads).run(options)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_size_does_not_matter(block_size):
    found, expected = Paged(RAGGED, block_size, 2).run(AttentionOptions(0.35))
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_bounded_temporaries_change_nothing(monkeypatch):
    """With next to no room, prefill goes query by query and decode sequence by sequence."""
    options = AttentionOptions(0.35, 9)
    whole, _ = Paged(RAGGED, 4, 2).run(options)
    monkeypatch.setattr(reference, "_MAX_SCORES", 64)
    monkeypatch.setattr(batch_module, "_MAX_GROUP_TOKENS", 8)
    pieces, _ = Paged(RAGGED, 4, 2).run(options)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-5)


def test_a_sequence_does_not_see_the_others():
    alone, _ = Paged(RAGGED[:1], 4, 2).run(AttentionOptions(0.35))
    paged = Paged(RAGGED, 4, 2)
    paged.queries[0] = Paged(RAGGED[:1], 4, 2).queries[0]
    found, expected = paged.run(AttentionOptions(0.35))
    assert found.shape[0] == sum(n for _, n in RAGGED)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    assert alone.isfinite().all()


def test_bfloat16_rounds_only_its_inputs_and_output():
    found, expected = Paged(RAGGED, 4, 2, dtype=torch.bfloat16).run(AttentionOptions(0.35))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=2**-8)


def test_writing_a_step_again_changes_nothing():
    paged = Paged([(0, 5)], 4, 2)
    before = [cache.clone() for cache in paged.caches]
    write_kv(paged.keys[0], paged.values[0], *paged.caches, paged.batch)
    for cache, old in zip(paged.caches, before, strict=True):
        torch.testing.assert_close(cache, old, equal_nan=True, rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5),
    block_size=st.integers(1, 8),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch(parts, block_size, window, seed):
    found, expected = Paged(parts, block_size, 2, seed).run(AttentionOptions(0.35, window))
    torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=1e-5)


def test_batch_layout():
    batch = AttentionBatch.build(
        [
            SequenceSlice(3, 3, np.array([7, 2], dtype=np.int32)),
            SequenceSlice(0, 1, np.array([5, 6, 8], dtype=np.int32)),
        ],
        4,
    )
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slot_blocks.tolist() == [7, 2, 2, 5]
    assert batch.slot_offsets.tolist() == [3, 0, 1, 0]
    assert batch.query_starts == (0, 3, 4)
    assert batch.context_lens == (6, 1)
    assert batch.block_tables.tolist() == [[7, 2], [5, 0]]
    assert (batch.num_tokens, batch.num_sequences) == (4, 2)


def test_decodes_are_grouped_by_length(monkeypatch):
    monkeypatch.setattr(batch_module, "_MAX_GROUP_TOKENS", 12)
    lengths = (9, 3, 4, 30, 2)
    table = np.arange(8, dtype=np.int32)
    slices = [SequenceSlice(length - 1, 1, table + 1) for length in lengths]
    batch = AttentionBatch.build([SequenceSlice(0, 2, table), *slices], 4)
    assert batch.prefills == (0,)
    groups = batch.decode_groups
    assert [group.rows.tolist() for group in groups] == [[6, 3, 4], [2], [5]]
    assert [group.lengths.tolist() for group in groups] == [[2, 3, 4], [9], [30]]
    assert groups[0].tables.tolist() == [[1], [1], [1]]
    assert [index.tolist() for index in groups[0].padding] == [[0, 0, 1], [2, 3, 3]]


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "at least one slice"),
        ([SequenceSlice(0, 0, np.array([1], dtype=np.int32))], "not a slice"),
        ([SequenceSlice(4, 1, np.array([1], dtype=np.int32))], "need 2 blocks of 4"),
    ],
)
def test_a_wrong_batch_is_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build(slices, 4)
