"""Whole models over the Triton kernels give what they give over plain torch."""

import numpy as np
import pytest
import torch

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.torch_ops import TorchOps
from engine.kernels.triton.ops import TritonOps
from engine.models import fused_decoder, transformers_model
from engine.models.fused_decoder import FusedDecoder
from engine.models.kv_cache import KVCache
from engine.models.op_decoder import OpDecoder
from engine.models.transformers_model import TransformersModel
from tests.engine.triton.rig import DEVICE, randn
from tests.tiny_models import reference_greedy, tiny_model

BLOCK_SIZE = 8
LENGTHS = (37, 1, 12)


def load(name, ops, monkeypatch):
    """The comparison with `transformers` at load runs over `ops` too."""
    monkeypatch.setattr(fused_decoder, "try_native_decoder", lambda *args: None)
    monkeypatch.setattr(fused_decoder, "select_ops", lambda device: ops)
    model = FusedDecoder.load(tiny_model(name), DEVICE)
    assert isinstance(model.backend, OpDecoder)
    return model


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in LENGTHS]


class Run:
    """Sequences in a cache full of NaN."""

    def __init__(self, model, room=8):
        self.model = model
        counts = [-(-(length + room) // BLOCK_SIZE) for length in LENGTHS]
        self.cache = KVCache(model.traits, sum(counts), BLOCK_SIZE, DEVICE)
        self.cache.storage.fill_(float("nan"))
        order = np.arange(sum(counts), dtype=np.int32)[::-1]
        ends = np.cumsum(counts)
        self.tables = [order[end - n : end] for end, n in zip(ends, counts, strict=True)]

    @torch.inference_mode()
    def step(self, parts, rows, padded=None):
        """`parts`: (sequence, start, token ids); logits of the packed `rows`."""
        slices = [SequenceSlice(start, len(ids), self.tables[s]) for s, start, ids in parts]
        batch = AttentionBatch.build(slices, BLOCK_SIZE, DEVICE)
        tokens = torch.tensor([i for _, _, ids in parts for i in ids], device=DEVICE)
        if padded is not None:
            padded.fill(batch)
            batch = padded
            tokens = torch.nn.functional.pad(tokens, (0, padded.num_tokens - len(tokens)))
        index = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        return self.model.forward(tokens, batch, index, self.cache)


def greedy(model, steps, padded=None):
    """Three sequences, the first in two chunks beside the others."""
    run = Run(model)
    texts = prompts()
    logits = [run.step([(2, 0, texts[2]), (0, 0, texts[0][:20])], [11])]
    logits.append(run.step([(0, 20, texts[0][20:]), (1, 0, texts[1])], [16, 17]))
    last = torch.cat([logits[1], logits[0]])
    for _ in range(steps):
        for text, token in zip(texts, model.row_max(last)[1].tolist(), strict=True):
            text.append(token)
        parts = [(s, len(text) - 1, text[-1:]) for s, text in enumerate(texts)]
        last = run.step(parts, range(3), padded)
    return [text[length:] for text, length in zip(texts, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "olmo2"])
def test_greedy_tokens_are_the_same(name, monkeypatch):
    found = greedy(load(name, TritonOps(DEVICE), monkeypatch), 4)
    assert found == greedy(load(name, TorchOps(), monkeypatch), 4)
    assert found[0] == reference_greedy(name, prompts()[0], 4)


@pytest.mark.parametrize("ops", [TritonOps(DEVICE), TorchOps()], ids=["triton", "torch"])
def test_a_padded_batch_gives_the_same_tokens(ops, monkeypatch):
    expected = greedy(load("qwen3", TorchOps(), monkeypatch), 3)
    padded = PaddedDecodeBatch.allocate(5, 9, BLOCK_SIZE, DEVICE)
    assert greedy(load("qwen3", ops, monkeypatch), 3, padded) == expected


def test_a_transformers_model_attends_by_the_kernels(monkeypatch):
    """One with sinks and alternating windows, which no fused decoder knows."""
    results = []
    for ops in (TritonOps(DEVICE), TorchOps()):
        monkeypatch.setattr(transformers_model, "select_ops", lambda device, ops=ops: ops)
        model = TransformersModel.load(tiny_model("gpt_oss"), DEVICE)
        run = Run(model)
        texts = prompts()
        run.step([(0, 0, texts[0][:20])], [])
        results.append(run.step([(0, 20, texts[0][20:]), (2, 0, texts[2])], range(29)))
        model.close()
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def test_a_cache_copies_blocks_by_the_kernels(monkeypatch):
    model = load("llama", TorchOps(), monkeypatch)
    cache = KVCache(model.traits, 5, BLOCK_SIZE, DEVICE)
    cache.storage.copy_(randn(*cache.storage.shape))
    cache._ops = TritonOps(DEVICE)
    before = cache.storage.clone()
    cache.copy_blocks([(0, 1), (1, 2), (4, 3)])
    assert torch.equal(cache.storage, before[:, :, [0, 0, 0, 4, 4]])
