"""The index of a router with ten times the blocks that it could follow exactly.

Invariant: what is measured is memory that was traced, at its highest, while engines publish and
while they send snapshots; and all of it passes through the stream's own follower. Only the engines'
end is made here, from keys that exist before memory is traced.
"""

import random
import tracemalloc
from collections.abc import Iterator

from bench.figures import Figures
from cache.events import BlockKey, Tier, digest_with
from cluster.routing.index import PrefixIndex
from engine.stream import Need, StreamFollower
from engine.wire import BlocksStored, CacheDelta, SnapshotChunk, StreamFrame

_HOLDERS = 8
_KEYS_A_FRAME = 64
_KEYS_A_CHUNK = 128
_SHARE = 10
_SEED = 9


class _Engine:
    """Publishes its keys in order, and none leaves. What it sends are copies, as off the wire."""

    def __init__(self, keys: list[BlockKey]) -> None:
        self.num_published = 0
        self._keys = keys
        self._sequence = 0
        self._digest = 0

    @property
    def is_done(self) -> bool:
        return self.num_published == len(self._keys)

    def publish(self) -> StreamFrame:
        start, end = self.num_published, self.num_published + _KEYS_A_FRAME
        keys = self._copies(start, end)
        self.num_published = start + len(keys)
        for key in keys:
            self._digest = digest_with(self._digest, key, Tier.DEVICE)
        self._sequence += 1
        delta = CacheDelta((BlocksStored(bytes(16), keys),))
        return StreamFrame(1, self._sequence, self._digest, delta)

    def snapshot(self) -> Iterator[SnapshotChunk]:
        starts = range(0, max(1, self.num_published), _KEYS_A_CHUNK)
        for index, start in enumerate(starts):
            end = min(start + _KEYS_A_CHUNK, self.num_published)
            keys = tuple([(key, Tier.DEVICE) for key in self._copies(start, end)])
            is_last = index == len(starts) - 1
            yield SnapshotChunk(1, self._sequence, self._digest, index, is_last, keys)

    def _copies(self, start: int, end: int) -> tuple[BlockKey, ...]:
        return tuple([bytes(bytearray(key)) for key in self._keys[start:end]])


def measure_capped(num_keys: int, key_bytes: float, num_probes: int) -> Figures:
    """Engines with `num_keys` blocks each, none of them shared, in a tenth of the memory that they
    would take at `key_bytes` a block."""
    rng = random.Random(_SEED)
    cap = int(num_keys * _HOLDERS * key_bytes / _SHARE)
    engines = [_Engine([rng.randbytes(16) for _ in range(num_keys)]) for _ in range(_HOLDERS)]
    tracemalloc.start()
    index = PrefixIndex(cap)
    followers = [
        StreamFollower(1, keys=index.view(f"replica-{number}")) for number in range(_HOLDERS)
    ]
    num_snapshots = _follow(engines, followers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(follower.in_sync for follower in followers)
    num_wrong = sum(len(index.match([rng.randbytes(16)])) for _ in range(num_probes))
    return {
        "index_memory_cap_bytes": cap,
        "index_memory_peak_bytes": peak,
        "index_keys_offered": num_keys * _HOLDERS,
        "index_bloom_replicas": index.num_rough,
        "index_snapshots": num_snapshots,
        "index_false_positive_pct": round(
            100 * num_wrong / num_probes / max(1, index.num_rough), 3
        ),
    }


def _follow(engines: list[_Engine], followers: list[StreamFollower]) -> int:
    """Until all is published and nobody wants a snapshot; returns how many were loaded."""
    is_open = True
    while is_open:
        is_open = not all(engine.is_done for engine in engines)
        for engine, follower in zip(engines, followers, strict=True):
            follower.on_frame(engine.publish())
            if follower.need is not Need.NOTHING:
                is_open = True
                for chunk in engine.snapshot():
                    follower.on_snapshot(chunk)
    return sum(follower.counts.snapshots for follower in followers)
