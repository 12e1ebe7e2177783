"""Random steps over a cache in which everything that is not a sequence's is NaN."""

import itertools
import math
import os
import random

import numpy as np
import torch

from engine.kernels.batch import AttentionBatch, SequenceSlice

# See tests/conftest.py.
IS_COMPILED = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")

# Largest difference from the reference, relative to the largest result: what float32 sums in
# another order leave, and for the others a few units of their last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert expected.isfinite().all()
    largest = expected.abs().max().item() if expected.numel() else 0.0
    atol = TOLERANCES[expected.dtype] * max(largest, 1e-3)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


class Step:
    """`parts` are (start, length) of the sequences that are packed into one step."""

    def __init__(self, parts, heads, kv_heads, dim, block_size, dtype, cache_dtype=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-(start + length) // block_size) for start, length in parts]
        order = torch.randperm(sum(needed) + 2, generator=generator).numpy().astype(np.int32)
        ends = np.cumsum(needed)
        tables = [order[end - count : end] for end, count in zip(ends, needed, strict=True)]
        shape = (len(order), kv_heads, block_size, dim)
        self.caches = []
        for _ in range(2):
            cache = torch.full(shape, math.nan)
            for (start, length), table in zip(parts, tables, strict=True):
                tokens = torch.randn(kv_heads, start + length, dim, generator=generator)
                for i, block in enumerate(table.tolist()):
                    piece = tokens[:, i * block_size : (i + 1) * block_size]
                    cache[block, :, : piece.shape[1]] = piece
            self.caches.append(cache.to(cache_dtype or dtype).to(DEVICE))
        num_tokens = sum(length for _, length in parts)
        self.query = torch.randn(num_tokens, heads, dim, generator=generator).to(dtype).to(DEVICE)
        self.slices = [SequenceSlice(s, n, t) for (s, n), t in zip(parts, tables, strict=True)]
        self.batch = AttentionBatch.build(self.slices, block_size, DEVICE)


def pairwise(seed=0, **parameters):
    """Few combinations in which any two values of any two parameters meet."""
    rng = random.Random(seed)
    names = list(parameters)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(parameters[a]))
        for y in range(len(parameters[b]))
    }
    cases = []
    while missing:
        # A pair that is missing, and of 30 ways to fill up the rest the one that covers most.
        fixed = dict(min(missing))
        tries = [
            {name: fixed.get(name, rng.randrange(len(parameters[name]))) for name in names}
            for _ in range(30)
        ]
        covered = [set(itertools.combinations(choice.items(), 2)) & missing for choice in tries]
        best = max(range(len(tries)), key=lambda i: len(covered[i]))
        missing -= covered[best]
        cases.append({name: parameters[name][index] for name, index in tries[best].items()})
    return cases
