"""The prefix cache: which blocks already hold the KV of a prefix, and which to give up first.

Invariants:
- *Closure*: when a key is in the index, so is its parent. So the keys of a chain that are present
  are a prefix of it, and the end of that prefix is found by halving.
- A keyed block is evictable only with no reference and no keyed child (counted by key).
- A block is in exactly one state: held, evictable, keyed and idle above its children, or free.
- Who holds a block holds all before it. So of a table's blocks only the deepest keyed one, its
  *tail*, can be in the wheel or go there, and a use is noted at the tail alone: the blocks above
  inherit it when what is below them is given up.
- A part of a block is only ever reused by copy, and only below the same parent: so never across
  roots, that is cache domains or models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.events import BlockKey, CacheEvent, Removed, Stored, Tier
from cache.pool import BlockPool
from cache.siblings import TOKEN_BYTES, Packed, Siblings, pack
from cache.wheel import EvictionWheel, Retention

_NONE = -1
_BLOCKS_PER_EVICTED = 512
"""A pool gives up one block in so many at a time: a run of a chain costs little more than one."""


@dataclass(slots=True)
class RequestBlocks:
    """The block table of one request: level one of the composite hash (request id → blocks).

    `in_flight` counts what uses the blocks and has not ended: plans that are not yet committed, and
    reads and writes of a disk. Blocks given back while it is above zero stay held until the last of
    them has.
    """

    keys: list[BlockKey] = field(default_factory=list)
    """Keys of its full blocks, as far as they are known."""
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    """Blocks, from the first, whose keys are in the index (theirs or a twin's)."""
    twins: list[int] = field(default_factory=list)
    """Blocks of other requests that hold the same content as own ones which therefore have no key.
    Held so that the chain below stays closed."""
    loans: list[int] = field(default_factory=list)
    """Blocks of which the plan in flight copies the beginning; held until it is committed."""
    tail: int = _NONE
    """The keyed block of the last published key; -1 before there is one."""
    counted: bool = False
    """The hit that it began with has been counted as reuse."""
    retention: Retention = Retention.NORMAL
    """Taken over by the blocks when they are given back."""
    ttl: int = 0
    """Ticks that a pin lasts from then on."""
    in_flight: int = 0
    released: bool = False


class PrefixCache:
    """Owns the pool. `grow` evicts as needed; `publish` makes full blocks findable.

    What is known of a keyed block lies in tables by block number: its key, its parent's block
    (-1 at the start of a chain) and how many keyed blocks follow it.
    """

    def __init__(
        self,
        num_blocks: int,
        wheel_slots: int = 1024,
        wheel_slot_width: int = 16,
        block_size: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """`block_size`: tokens in a block, for finding parts of one; 0: whole blocks only."""
        self.tier = tier
        self.pool = BlockPool(num_blocks)
        self.wheel = EvictionWheel(num_blocks, wheel_slots, wheel_slot_width)
        self._index: dict[BlockKey, int] = {}
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._parent = [_NONE] * num_blocks
        self._num_children = [0] * num_blocks
        self._eviction_batch = max(1, num_blocks // _BLOCKS_PER_EVICTED)
        self._block_bytes = block_size * TOKEN_BYTES
        self._siblings = Siblings() if block_size else None
        # Of keyed blocks that are among the siblings: their tokens, and the root of a first one.
        self._tokens_of: list[Packed] = [b""] * (num_blocks if block_size else 0)
        self._root_of: dict[int, BlockKey] = {}
        self._events: list[CacheEvent] = []
        self.num_evicted = 0
        self.num_holes = 0
        """Chains found with a key missing in the middle: none, unless closure was broken."""

    # ------------------------------------------------------------ reading

    @property
    def num_available(self) -> int:
        """Blocks that `grow` could hand out now. A block that nobody holds can always be evicted,
        perhaps after its children: whoever holds a child holds its parents too."""
        return self.pool.num_blocks - self.pool.num_held

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    def __len__(self) -> int:
        """Keys in the index."""
        return len(self._index)

    def match(self, keys: Sequence[BlockKey], limit: int | None = None) -> int:
        """How many of the first `limit` keys, from the first, are present.

        Presence is monotone along a chain, so the last key tells a full hit, the first a miss, and
        halving finds any other end: log2(n) + 2 look-ups, each of which may well be a miss in the
        processor's caches, instead of n.
        """
        index = self._index
        high = len(keys) if limit is None else min(limit, len(keys))
        high -= 1
        if high < 0:
            return 0
        if keys[high] in index:
            return high + 1
        if keys[0] not in index:
            return 0
        low = 0
        while high - low > 1:
            middle = (low + high) >> 1
            if keys[middle] in index:
                low = middle
            else:
                high = middle
        return low + 1

    def drain_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ a request's life

    def advance(self, now: int) -> None:
        """Tells the time: a tick that never goes back."""
        self.wheel.advance(now)

    def start(self, keys: list[BlockKey], max_hit: int) -> RequestBlocks:
        """A table that begins with the longest cached prefix, of at most `max_hit` blocks, held."""
        table = RequestBlocks(keys)
        count = self.match(keys, max_hit)
        if not count:
            return table
        block_ids = self._path(keys[:count])
        self.pool.hold(block_ids)
        table.block_ids = block_ids
        table.num_published = len(block_ids)
        if block_ids:
            table.tail = block_ids[-1]
            if table.tail in self.wheel:
                self.wheel.remove(table.tail)
        return table

    def grow(self, table: RequestBlocks, num_blocks: int) -> list[int] | None:
        """Extends `table` to `num_blocks` and returns the new blocks, or None, with nothing
        changed, if there are too few."""
        if not table.counted:
            # Here and not in `start`, which a request that waits for room repeats.
            table.counted = True
            if table.tail != _NONE:
                self.wheel.credit(table.tail)
        count = num_blocks - len(table.block_ids)
        if count <= 0:
            return []
        if count > self.num_available:
            return None
        if (missing := count - self.pool.num_free) > 0:
            num_idle = self.num_available - self.pool.num_free
            self._evict(min(max(missing, self._eviction_batch), num_idle))
        fresh = self.pool.allocate(count)
        table.block_ids.extend(fresh)
        return fresh

    def borrow(
        self, table: RequestBlocks, root: BlockKey, token_ids: Sequence[int]
    ) -> tuple[int, int]:
        """The block after the table's last that begins with most of `token_ids` (less than a block
        of them), and of how many it holds the KV; 0 if there is none. It is held until the plan
        that copies it is committed, which must be the table's next."""
        if self._siblings is None:
            return _NONE, 0
        parent = root if table.tail == _NONE else table.tail
        block_id, run = self._siblings.nearest(parent, pack(token_ids))
        if run:
            self.pool.hold((block_id,))
            table.loans.append(block_id)
            if block_id in self.wheel:
                self.wheel.remove(block_id)
        return block_id, run

    def publish(
        self,
        table: RequestBlocks,
        root: BlockKey,
        num_full: int,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Makes the first `num_full` blocks findable. Their KV must be computed and verified, and
        `table.keys` must reach that far. With `token_ids`, from the first, they can also be
        borrowed."""
        first = table.num_published
        if num_full <= first:
            return
        index, tail, size = self._index, table.tail, self._block_bytes
        packed = pack(token_ids[first * size // TOKEN_BYTES : num_full * size // TOKEN_BYTES])
        for position in range(first, num_full):
            key = table.keys[position]
            twin = index.get(key)
            if twin is not None:
                self.pool.hold((twin,))
                table.twins.append(twin)
                if twin in self.wheel:
                    self.wheel.remove(twin)
                tail = twin
                continue
            block_id = table.block_ids[position]
            index[key] = block_id
            self._key_of[block_id] = key
            self._parent[block_id] = tail
            if tail != _NONE:
                self._num_children[tail] += 1
            parent = table.keys[position - 1] if position else root
            self._events.append(Stored(key, parent, self.tier))
            if packed and self._siblings is not None:
                start = (position - first) * size
                tokens = self._tokens_of[block_id] = packed[start : start + size]
                if tail == _NONE:
                    self._root_of[block_id] = root
                self._siblings.add(root if tail == _NONE else tail, tokens, block_id)
            tail = block_id
        table.num_published = num_full
        table.tail = tail

    def release(self, table: RequestBlocks) -> None:
        """Gives all blocks back, at once or when the last plan that uses them is committed."""
        table.released = True
        if table.in_flight == 0:
            self._give_back(table)

    def enter_plan(self, *tables: RequestBlocks) -> None:
        for table in tables:
            table.in_flight += 1

    def leave_plan(self, *tables: RequestBlocks) -> None:
        for table in tables:
            left = table.in_flight = table.in_flight - 1
            assert left >= 0
            if table.loans:
                self._return_loans(table)
            if table.released and not left:
                self._give_back(table)

    # ------------------------------------------------------------ inside

    def _path(self, keys: list[BlockKey]) -> list[int]:
        """Blocks of a chain whose last key is present, found from its end by the parents, and
        checked against the keys; if they differ, the index is walked from the start."""
        parent, key_of = self._parent, self._key_of
        block_id = self._index[keys[-1]]
        path = []
        for _ in keys:
            path.append(block_id)
            block_id = parent[block_id]
        path.reverse()
        if block_id == _NONE and [key_of[block_id] for block_id in path] == keys:
            return path
        self.num_holes += 1
        path = []
        for key in keys:
            found = self._index.get(key)
            if found is None:
                break
            path.append(found)
        return path

    def _return_loans(self, table: RequestBlocks) -> None:
        for block_id in self.pool.drop(table.loans):
            if not self._num_children[block_id]:
                self.wheel.insert(block_id)
        table.loans.clear()

    def _give_back(self, table: RequestBlocks) -> None:
        if table.loans:
            self._return_loans(table)
        key_of, tail = self._key_of, table.tail
        # In reverse, so that of one request the chain's end is used again first.
        table.block_ids.reverse()
        idle = self.pool.drop(table.block_ids)
        if table.twins:
            idle += self.pool.drop(table.twins)
        self.pool.free([block_id for block_id in idle if key_of[block_id] is None])
        if tail != _NONE:
            self.wheel.touch(tail, table.retention, table.ttl)
            if not self._num_children[tail] and not self.pool.references(tail):
                self.wheel.insert(tail)
        table.block_ids.clear()
        table.twins.clear()

    def _evict(self, count: int) -> None:
        """Frees `count` blocks; the parent of one may become evictable in its place, and goes next
        unless it was used beyond its child: so a chain goes from its end, in one run."""
        wheel, index, key_of = self.wheel, self._index, self._key_of
        parent, children, references = self._parent, self._num_children, self.pool.references
        siblings, tokens_of = self._siblings, self._tokens_of
        note, tier = self._events.append, self.tier
        freed: list[int] = []
        while len(freed) < count:
            first = block_id = wheel.evict()
            while True:
                key = key_of[block_id]
                assert key is not None
                del index[key]
                key_of[block_id] = None
                note(Removed(key, tier))
                freed.append(block_id)
                parent_id = parent[block_id]
                if siblings is not None and (tokens := tokens_of[block_id]):
                    tokens_of[block_id] = b""
                    above = parent_id if parent_id != _NONE else self._root_of.pop(block_id)
                    siblings.remove(above, tokens)
                if parent_id == _NONE:
                    break
                left = children[parent_id] = children[parent_id] - 1
                if left or references(parent_id) or len(freed) >= count:
                    wheel.inherit(parent_id, first)
                    if not left and not references(parent_id):
                        wheel.insert(parent_id, first=True)
                    break
                if wheel.outlives(parent_id, first):
                    wheel.inherit(parent_id, first)
                    wheel.insert(parent_id, first=True)
                    break
                block_id = parent_id
        wheel.forget(freed)
        self.pool.free(freed)
        self.num_evicted += count

    def check_references(self, tables: Iterable[RequestBlocks | None]) -> None:
        """Raises `AssertionError` unless blocks are held by these tables, and by nothing else."""
        references = [0] * self.pool.num_blocks
        for table in {id(table): table for table in tables if table is not None}.values():
            for block_id in (*table.block_ids, *table.twins, *table.loans):
                references[block_id] += 1
        for block_id, expected in enumerate(references):
            assert self.pool.references(block_id) == expected, f"{self.tier} {block_id} leaks"

    def check_integrity(self) -> None:
        """Raises `AssertionError` if an invariant of this file is broken."""
        self.pool.check_integrity()
        self.wheel.check_integrity()
        children = [0] * self.pool.num_blocks
        for key, block_id in self._index.items():
            assert self._key_of[block_id] == key, "a key points to another key's block"
            parent_id = self._parent[block_id]
            if parent_id != _NONE:
                assert self._key_of[parent_id] in self._index, "a key's parent is gone"
                children[parent_id] += 1
        if self._siblings is not None:
            self._siblings.check_integrity()
            listed = {block_id: tokens for _, tokens, block_id in self._siblings.entries()}
            assert listed == {block: each for block, each in enumerate(self._tokens_of) if each}
            for above, _, block_id in self._siblings.entries():
                assert self._key_of[block_id] in self._index, "a block without a key is a sibling"
                parent_id = self._parent[block_id]
                expected = self._root_of[block_id] if parent_id == _NONE else parent_id
                assert above == expected, "a sibling is listed in another place"
        num_keyed = sum(key is not None for key in self._key_of)
        assert num_keyed == len(self._index), "a block keeps the key of another"
        assert children == self._num_children, "children are miscounted"
        num_idle = num_evictable = 0
        for block_id in self._index.values():
            idle = self.pool.references(block_id) == 0
            num_idle += idle
            parent_id = self._parent[block_id]
            if not idle and parent_id != _NONE:
                assert self.pool.references(parent_id) > 0, "a child is held without its parent"
            evictable = idle and children[block_id] == 0
            num_evictable += evictable
            assert (block_id in self.wheel) == evictable, "wrongly (un)evictable"
        assert num_evictable == sum(1 for _ in self.wheel), "a block without a key is evictable"
        assert self.pool.num_held + num_idle + self.pool.num_free == self.pool.num_blocks, (
            "blocks are lost"
        )
