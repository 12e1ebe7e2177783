"""The prefix cache: which blocks already hold the KV of a prefix, and which to give up first.

Invariants:
- *Closure*: when a key is in the index, so is its parent. So the keys of a chain that are present
  are a prefix of it.
- A keyed block is evictable only with no reference and no keyed child (counted by key).
- A block is in exactly one state: held, evictable, or free.

Eviction takes the least recently used evictable block. Exact order is kept by a heap with lazy
removal: an entry counts only while its stamp is the block's own.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.events import BlockKey, CacheEvent, Removed, Stored
from cache.pool import BlockPool


@dataclass(slots=True)
class RequestBlocks:
    """The block table of one request: level one of the composite hash (request id → blocks).

    `in_flight` counts plans that use the blocks and are not yet committed. Blocks given back while
    it is above zero stay held until the last of them is.
    """

    keys: list[BlockKey] = field(default_factory=list)
    """Keys of its full blocks, as far as they are known."""
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    """Blocks, from the first, whose keys are in the index (theirs or a twin's)."""
    twins: list[int] = field(default_factory=list)
    """Blocks of other requests that hold the same content as own ones which therefore have no key.
    Held so that the chain below stays closed."""
    in_flight: int = 0
    released: bool = False


@dataclass(slots=True)
class _Entry:
    """A key in the index."""

    block_id: int
    parent: BlockKey | None
    """None at the start of a chain."""
    num_children: int = 0


class PrefixCache:
    """Owns the pool. `allocate` evicts as needed; `publish` makes full blocks findable."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._index: dict[BlockKey, _Entry] = {}
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        # Tick of the last use of each block, and the heap of (tick, block) of evictable ones.
        self._tick = 0
        self._used: list[int] = [0] * num_blocks
        self._heap: list[tuple[int, int]] = []
        self._evictable: set[int] = set()
        self._events: list[CacheEvent] = []
        self.num_evicted = 0

    # ------------------------------------------------------------ reading

    @property
    def num_available(self) -> int:
        """Blocks that `grow` could hand out now. A block that nobody holds can always be evicted,
        perhaps after its children: whoever holds a child holds its parents too."""
        return self.pool.num_blocks - self.pool.num_held

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first, are present. By closure the first miss ends it."""
        index = self._index
        for count, key in enumerate(keys):
            if key not in index:
                return count
        return len(keys)

    def drain_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ a request's life

    def start(self, keys: list[BlockKey], max_hit: int) -> RequestBlocks:
        """A table that begins with the longest cached prefix, of at most `max_hit` blocks, held."""
        count = self.match(keys[:max_hit])
        table = RequestBlocks(keys)
        for key in keys[:count]:
            block_id = self._index[key].block_id
            self._hold(block_id)
            table.block_ids.append(block_id)
        table.num_published = count
        return table

    def grow(self, table: RequestBlocks, num_blocks: int) -> list[int] | None:
        """Extends `table` to `num_blocks` and returns the new blocks, or None, with nothing
        changed, if there are too few."""
        count = num_blocks - len(table.block_ids)
        if count <= 0:
            return []
        if count > self.num_available:
            return None
        while self.pool.num_free < count:
            self._evict()
        fresh = self.pool.allocate(count)
        table.block_ids.extend(fresh)
        return fresh

    def publish(self, table: RequestBlocks, root: BlockKey, num_full: int) -> None:
        """Makes the first `num_full` blocks findable. Their KV must be computed and verified, and
        `table.keys` must reach that far."""
        for position in range(table.num_published, num_full):
            key = table.keys[position]
            entry = self._index.get(key)
            if entry is not None:
                self._hold(entry.block_id)
                table.twins.append(entry.block_id)
                continue
            parent = table.keys[position - 1] if position else None
            block_id = table.block_ids[position]
            self._index[key] = _Entry(block_id, parent)
            self._key_of[block_id] = key
            if parent is not None:
                self._index[parent].num_children += 1
            self._events.append(Stored(key, parent or root))
        table.num_published = max(table.num_published, num_full)

    def release(self, table: RequestBlocks) -> None:
        """Gives all blocks back, at once or when the last plan that uses them is committed."""
        table.released = True
        if table.in_flight == 0:
            self._give_back(table)

    def enter_plan(self, table: RequestBlocks) -> None:
        table.in_flight += 1

    def leave_plan(self, table: RequestBlocks) -> None:
        table.in_flight -= 1
        assert table.in_flight >= 0
        if table.released and table.in_flight == 0:
            self._give_back(table)

    # ------------------------------------------------------------ inside

    def _give_back(self, table: RequestBlocks) -> None:
        # In reverse, so that of one request the chain's end is given up first.
        self._tick += 1
        for block_id in reversed(table.twins):
            self._drop(block_id)
        for block_id in reversed(table.block_ids):
            self._drop(block_id)
        table.block_ids.clear()
        table.twins.clear()

    def _hold(self, block_id: int) -> None:
        self._evictable.discard(block_id)
        self.pool.hold((block_id,))

    def _drop(self, block_id: int) -> None:
        self._used[block_id] = self._tick
        if not self.pool.drop(block_id):
            return
        key = self._key_of[block_id]
        if key is None:
            self.pool.free((block_id,))
        elif self._index[key].num_children == 0:
            self._make_evictable(block_id)

    def _make_evictable(self, block_id: int) -> None:
        self._evictable.add(block_id)
        heapq.heappush(self._heap, (self._used[block_id], block_id))
        if len(self._heap) > 2 * self.pool.num_blocks + 64:
            self._heap = [(self._used[block], block) for block in self._evictable]
            heapq.heapify(self._heap)

    def _evict(self) -> None:
        """Frees the least recently used evictable block; its parent may become evictable."""
        while True:
            tick, block_id = heapq.heappop(self._heap)
            if block_id in self._evictable and self._used[block_id] == tick:
                break
        self._evictable.remove(block_id)
        key = self._key_of[block_id]
        assert key is not None
        entry = self._index.pop(key)
        self._key_of[block_id] = None
        self.pool.free((block_id,))
        self._events.append(Removed(key))
        self.num_evicted += 1
        if entry.parent is not None:
            parent = self._index[entry.parent]
            parent.num_children -= 1
            if parent.num_children == 0 and self.pool.references(parent.block_id) == 0:
                self._make_evictable(parent.block_id)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if an invariant of this file is broken."""
        self.pool.check_integrity()
        children: dict[BlockKey, int] = {}
        for key, entry in self._index.items():
            assert self._key_of[entry.block_id] == key, "a key points to another key's block"
            if entry.parent is not None:
                assert entry.parent in self._index, "a key's parent is gone"
                children[entry.parent] = children.get(entry.parent, 0) + 1
        num_keyed = sum(key is not None for key in self._key_of)
        assert num_keyed == len(self._index), "a block keeps the key of another"
        num_idle = 0
        for key, entry in self._index.items():
            assert entry.num_children == children.get(key, 0), "children are miscounted"
            idle = self.pool.references(entry.block_id) == 0
            num_idle += idle
            if not idle and entry.parent is not None:
                parent_id = self._index[entry.parent].block_id
                assert self.pool.references(parent_id) > 0, "a child is held without its parent"
            evictable = idle and entry.num_children == 0
            assert (entry.block_id in self._evictable) == evictable, "wrongly (un)evictable"
        assert self.pool.num_held + num_idle + self.pool.num_free == self.pool.num_blocks, (
            "blocks are lost"
        )
