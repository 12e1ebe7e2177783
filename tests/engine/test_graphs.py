"""Decode graphs, with a capture that runs the recorded step again: all but the GPU's own part."""

import numpy as np
import pytest
import torch

from engine.kernels.batch import AttentionBatch, SequenceSlice
from engine.models.graphs import DecodeGraphs, graph_sizes, with_graphs
from engine.models.kv_cache import KVCache
from engine.models.load import load_model
from engine.models.transformers_model import TransformersModel
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
BLOCK = 16


def again(step):
    step()
    return step


class Steps:
    """Sequences whose blocks lie scattered in a cache that is full of NaN."""

    def __init__(self, model, num_seqs, make=lambda model, cache: model):
        generator = torch.Generator().manual_seed(3)
        self.ids = [
            torch.randint(3, 384, (length,), generator=generator).tolist()
            for length in range(5, 5 + 7 * num_seqs, 7)
        ]
        self.cache = KVCache(model.traits, 16 * num_seqs, BLOCK, CPU)
        self.cache.storage.fill_(float("nan"))
        order = np.random.default_rng(0).permutation(16 * num_seqs).astype(np.int32)
        self.tables = order.reshape(num_seqs, 16)
        self.model = make(model, self.cache)

    def run(self, slices, ids, rows):
        batch = AttentionBatch.build(
            [SequenceSlice(start, length, self.tables[s]) for s, start, length in slices], BLOCK
        )
        return self.model.forward(torch.tensor(ids), batch, torch.tensor(rows), self.cache)

    def prefill(self):
        slices = [(s, 0, len(ids)) for s, ids in enumerate(self.ids)]
        ends = np.cumsum([len(ids) for ids in self.ids]) - 1
        logits = self.run(slices, [i for ids in self.ids for i in ids], ends.tolist())
        for ids, token in zip(self.ids, logits.argmax(dim=-1).tolist(), strict=True):
            ids.append(token)

    def decode(self, sequences):
        slices = [(s, len(self.ids[s]) - 1, 1) for s in sequences]
        logits = self.run(slices, [self.ids[s][-1] for s in sequences], range(len(sequences)))
        for s, token in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            self.ids[s].append(token)
        return logits.clone()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "fused"),
        ("gemma2", "fused"),
        ("qwen3_moe", "fused"),
        ("mixtral", "fused"),
        ("llama", "transformers"),
        ("gemma2", "transformers"),
    ],
)
@torch.inference_mode()
def test_replayed_steps_are_those_of_the_model(name, kind, monkeypatch):
    if kind == "fused":
        monkeypatch.setattr("engine.models.fused_decoder.try_native_decoder", lambda *args: None)
        model = load_model(tiny_model(name), CPU)
    else:
        model = TransformersModel.load(tiny_model(name), CPU)
    own = Steps(model, 9)
    graphs = Steps(model, 9, lambda model, cache: DecodeGraphs(model, cache, 9, again))
    own.prefill()
    graphs.prefill()
    for sequences in ([4], [0, 8], [7, 1, 3], list(range(9)), [8, 2, 5, 6, 0], [4]):
        expected, found = own.decode(sequences), graphs.decode(sequences)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert graphs.ids == own.ids
    assert graphs.model.num_replayed == 6
    # What others have in the cache is as it was.
    torch.testing.assert_close(
        graphs.cache.storage, own.cache.storage, atol=1e-4, rtol=1e-4, equal_nan=True
    )
    model.close()


@torch.inference_mode()
def test_what_no_graph_covers_runs_as_it_is():
    model = load_model(tiny_model("llama"), CPU)
    steps = Steps(model, 3, lambda model, cache: DecodeGraphs(model, cache, 2, again))
    steps.prefill()
    steps.decode([0, 1, 2])
    # The second to last token again: one token, and no draw.
    steps.run([(0, len(steps.ids[0]) - 2, 1)], [steps.ids[0][-2]], [])
    assert steps.model.num_replayed == 0
    steps.decode([2, 0])
    assert steps.model.num_replayed == 1


def test_sizes_cover_every_step():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 4)
    assert graph_sizes(9) == (1, 2, 4, 8, 16)
    assert graph_sizes(256) == (1, 2, 4, *range(8, 257, 8)) == graph_sizes(10_000)


def test_a_cpu_has_none():
    model = load_model(tiny_model("llama"), CPU)
    cache = KVCache(model.traits, 4, BLOCK, CPU)
    assert with_graphs(model, cache, 8) is model
