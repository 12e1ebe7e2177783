"""Decode steps replayed from CUDA graphs: one launch a step instead of one an op.

Invariant: a replayed step leaves the KV and the logits that `forward` of the model itself leaves. A
step that no graph covers is run op by op, and so is every step where capturing fails.

A graph has the addresses of all that it reads and writes built in: the cache's, and those of the
tensors here, which each step's layout is copied to before the replay. A step with fewer sequences
than a graph has is padded.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.batch import AttentionBatch
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.models.kv_cache import KVCache
from engine.models.load import ServedModel
from engine.models.traits import ModelTraits

_log = logging.getLogger(__name__)

_LARGEST = 256
_WARM_UPS = 2
"""Runs before a capture: what is compiled or allocated on first use is no part of the graph."""

Step = Callable[[], None]
Capture = Callable[[Step], Step]
"""Records a step; returns what does the same again."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sequences that a graph is captured for: 1, 2, 4, then multiples of 8, up to the first that
    holds `max_num_seqs`, or 256."""
    most = min(max_num_seqs, _LARGEST)
    steps = (1, 2, 4, *range(8, _LARGEST + 1, 8))
    return steps[: bisect_left(steps, most) + 1]


class CudaCapture:
    """Captures into one pool of memory: graphs that never run at the same time share it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Graph:
    token_ids: torch.Tensor
    batch: PaddedDecodeBatch
    replay: Step


class DecodeGraphs:
    """A `ServedModel` that replays the decode steps of one cache."""

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache,
        max_num_seqs: int,
        capture: Capture,
        progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._model = model
        self._cache = cache
        self.num_replayed = 0
        """Steps."""
        sizes = graph_sizes(max_num_seqs)
        max_blocks = -(-model.traits.max_model_len // cache.block_size)
        device = model.device
        self._whole = PaddedDecodeBatch.allocate(sizes[-1], max_blocks, cache.block_size, device)
        self._token_ids = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        # All graphs write here, so that none has to keep logits of its own.
        self._logits = torch.zeros(sizes[-1], model.traits.vocab_size, device=device)
        self._graphs: dict[int, _Graph] = {}
        # The largest first: the others fit into the memory that it takes.
        for number, size in enumerate(reversed(sizes), start=1):
            progress(f"capturing decode graphs: {number} of {len(sizes)}")
            self._graphs[size] = self._captured(size, capture)
        self._sizes = sizes

    @property
    def traits(self) -> ModelTraits:
        return self._model.traits

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """See `TransformersModel.forward`. What a replay returns is valid until the next one."""
        num_seqs, width = batch.block_tables.shape
        is_decode = batch.num_tokens == num_seqs == len(rows)
        fits = num_seqs <= self._sizes[-1] and width <= self._whole.block_tables.shape[1]
        if cache is not self._cache or not is_decode or not fits:
            return self._model.forward(token_ids, batch, rows, cache)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, num_seqs)]]
        graph.batch.fill(batch)
        graph.token_ids[:num_seqs].copy_(token_ids, non_blocking=True)
        graph.replay()
        self.num_replayed += 1
        return self._logits[:num_seqs]

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.row_max(logits)

    def close(self) -> None:
        self._graphs.clear()
        self._model.close()

    def _captured(self, size: int, capture: Capture) -> _Graph:
        whole = self._whole
        batch = PaddedDecodeBatch.from_tensors(
            whole.positions[:size],
            whole.slot_blocks[:size],
            whole.slot_offsets[:size],
            whole.lengths[:size],
            whole.block_tables[:size],
            whole.block_size,
        )
        token_ids, logits = self._token_ids[:size], self._logits[:size]
        rows = torch.arange(size, device=self.device)

        def step() -> None:
            logits.copy_(self._model.forward(token_ids, batch, rows, self._cache))

        return _Graph(token_ids, batch, capture(step))


def with_graphs(
    model: ServedModel,
    cache: KVCache,
    max_num_seqs: int,
    progress: Callable[[str], None] = lambda message: None,
) -> ServedModel:
    """On a GPU `model` with graphs, if they can be captured; else `model`, as with a `max_num_seqs`
    of 0."""
    if model.device.type != "cuda" or not max_num_seqs:
        return model
    try:
        with torch.inference_mode():
            return DecodeGraphs(model, cache, max_num_seqs, CudaCapture(), progress)
    except RuntimeError as error:
        _log.warning("no CUDA graphs, so each decode step is launched op by op: %s", error)
        return model
