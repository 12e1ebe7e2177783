"""The CPU kernels one by one against plain torch; whole steps are in test_fused_decoder."""

import math

import numpy as np
import pytest
import torch

from engine.kernels import reference
from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.cpu import build
from engine.kernels.cpu.build import cpu_kernels
from engine.kernels.reference import AttentionOptions

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not cpu_kernels(print), reason="no C++ compiler"),
]


class Case:
    """A random step over a cache in which everything that is not a sequence's is NaN.

    `parts` are (start, length); sequences with the same number in `families` begin with the same
    `shared` blocks.
    """

    def __init__(self, parts, heads, kv_heads, dim, dtype, block_size=16, families=None, shared=0):
        generator = torch.Generator().manual_seed(len(parts) * 1000 + dim)
        families = families or range(len(parts))
        needed = [-(-(start + length) // block_size) for start, length in parts]
        order = torch.randperm(sum(needed) + 3, generator=generator).numpy().astype(np.int32)
        tables, used, heads_of = [], 0, {}
        for family, count in zip(families, needed, strict=True):
            table = order[used : used + count].copy()
            used += count
            table[:shared] = heads_of.setdefault(family, table[:shared])
            tables.append(table)
        shape = (len(order), kv_heads, block_size, dim)
        self.caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
        for (start, length), table in zip(parts, tables, strict=True):
            for cache in self.caches:
                tokens = torch.randn(kv_heads, start + length, dim, generator=generator)
                for i, block in enumerate(table):
                    piece = tokens[:, i * block_size : (i + 1) * block_size]
                    cache[int(block), :, : piece.shape[1]] = piece.to(dtype)
        self.query = torch.randn(sum(n for _, n in parts), heads, dim, generator=generator)
        self.query = self.query.to(dtype)
        slices = [SequenceSlice(s, n, t) for (s, n), t in zip(parts, tables, strict=True)]
        self.batch = AttentionBatch.build(slices, block_size)

    def native(self, options, use_amx=True):
        return torch.ops.shoal_cpu.paged_attention(
            self.query,
            *self.caches,
            torch.tensor(self.batch.query_starts),
            torch.tensor(self.batch.context_lens),
            self.batch.block_tables,
            options.scale,
            options.sliding_window or 0,
            options.softcap or 0.0,
            options.sinks,
            use_amx,
        )

    def check(self, options):
        expected = reference.paged_attention(self.query, *self.caches, self.batch, options)
        assert expected.isfinite().all()
        if self.query.dtype == torch.float32:
            torch.testing.assert_close(self.native(options), expected, atol=5e-6, rtol=2e-5)
            return
        for use_amx in (False, True):
            # The result and, on the tile unit, the weights are rounded to 8 bits.
            found = self.native(options, use_amx).float()
            torch.testing.assert_close(found, expected.float(), atol=1e-2, rtol=2**-6)


RAGGED = [(0, 7), (12, 1), (5, 40), (0, 1), (300, 1), (16, 16), (0, 150), (129, 3)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_attention_options(dtype, window, softcap, sinks):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -3.0]) if sinks else None
    Case(RAGGED, 6, 2, 32, dtype).check(AttentionOptions(0.31, window, softcap, logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [
        (9, 3, 64, 16),
        (4, 4, 16, 16),
        (8, 1, 48, 16),
        (20, 1, 80, 32),
        (7, 1, 128, 16),
        (2, 1, 256, 64),
        (70, 1, 16, 16),
        (6, 2, 32, 1),
        (6, 2, 32, 3),
        (6, 2, 64, 8),
    ],
)
def test_attention_shapes(dtype, heads, kv_heads, dim, block_size):
    case = Case(RAGGED, heads, kv_heads, dim, dtype, block_size)
    case.check(AttentionOptions(dim**-0.5))
    case.check(AttentionOptions(dim**-0.5, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20, 90])
def test_shared_beginnings(dtype, window):
    parts = [(97, 1), (128, 1), (95, 1), (400, 1), (96, 1), (90, 30), (500, 1)] + [(130, 1)] * 30
    families = [0, 0, 0, 1, 0, 0, 1] + [0] * 15 + [2] * 15
    case = Case(parts, 6, 2, 32, dtype, families=families, shared=6)
    case.check(AttentionOptions(0.2, window))


def test_one_long_sequence_is_split():
    Case([(3000, 1)], 4, 2, 64, torch.bfloat16).check(AttentionOptions(0.125))
    Case([(3000, 1)], 4, 2, 64, torch.float32).check(AttentionOptions(0.125))


def test_a_piece_outside_of_the_window_takes_nothing_from_another_requests_nan():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # So that all is computed in the same memory.
    try:
        spoilt = Case([(0, 40)], 4, 1, 64, torch.bfloat16)
        spoilt.query.fill_(math.nan)
        assert spoilt.native(AttentionOptions(0.125)).isnan().all()
        Case([(3000, 1)], 4, 1, 64, torch.bfloat16).check(AttentionOptions(0.125, 24))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(
    not (cpu_kernels(print) and torch.ops.shoal_cpu.amx_usable()), reason="no tile unit"
)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 300])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (70, 48), (5, 33), (576, 1536)])
def test_products_on_the_tile_unit(rows, n, k):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((rows, k), (n, k)))
    found = torch.ops.shoal_cpu.packed_linear(x, weight)
    torch.testing.assert_close(found, x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)


def test_a_broken_compiler_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("--no-such-flag",))
    assert not cpu_kernels()
    assert not cpu_kernels()
    assert len(caplog.records) == 1
    assert "no CPU kernels" in caplog.text
    assert "no-such-flag" in caplog.text


def test_no_compiler_is_a_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not cpu_kernels()
    assert "no C++ compiler (no-such-compiler)" in caplog.text
