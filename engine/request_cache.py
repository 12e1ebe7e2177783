"""What a request has of the cache: the device's blocks, and the tiers below it.

Invariant: a request that runs has a table of the device's blocks, and one of the host tier's slots
if there is that tier; both begin with what was found of it, and are given back together.
"""

from dataclasses import dataclass

from cache.prefix import PrefixCache, RequestBlocks
from cache.tiers import LowerTiers
from engine.request import RequestState


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a request that is about to start; held until `release`."""

    table: RequestBlocks
    slots: RequestBlocks | None
    num_blocks: int
    """Full blocks from its first on, on the device or in host memory."""
    source: int = -1
    """A block of which the next one begins with a copy."""
    num_copied: int = 0
    """Tokens of that."""

    @property
    def num_loaded(self) -> int:
        """Blocks that only host memory has."""
        return self.num_blocks - len(self.table.block_ids)


class RequestCache:
    """The prefix cache by requests. Without `reuse` nothing is found, and nothing published."""

    def __init__(
        self, device: PrefixCache, block_size: int, reuse: bool, tiers: LowerTiers | None
    ) -> None:
        self.device = device
        self.tiers = tiers
        self.block_size = block_size
        self.reuse = reuse

    def advance(self, step: int) -> None:
        """A step is about to be planned."""
        self.device.advance(step)
        if self.tiers is not None:
            self.tiers.host.advance(step)

    def expect(self, request: RequestState) -> None:
        """A request begins to wait: notes what there is of it, and has the disk's part read."""
        if not self.reuse:
            return
        request.extend_keys(request.num_tokens // self.block_size)
        num_found = self.device.match(request.block_keys)
        if self.tiers is not None:
            limit = (request.num_tokens - 1) // self.block_size
            keys, root = request.block_keys, request.root.root
            request.promotion = self.tiers.promote(keys, root, num_found, limit)
            num_found = max(num_found, self.tiers.host.match(keys))
        request.expected_cached_tokens = num_found * self.block_size

    def find(self, request: RequestState) -> Found:
        """At least one token is left to compute, or there would be nothing to sample from."""
        slots = RequestBlocks() if self.tiers is not None else None
        if not self.reuse:
            return Found(RequestBlocks(), slots, 0)
        limit = (request.num_tokens - 1) // self.block_size
        table = self.device.start(request.block_keys, limit)
        if self.tiers is not None:
            slots = self.tiers.host.start(request.block_keys, limit)
        for each in (table, slots):
            if each is not None:
                each.retention, each.ttl = request.retention, request.pin_steps
        num_blocks = len(table.block_ids)
        if slots is not None and len(slots.block_ids) > num_blocks:
            # What comes from the host has no block yet whose children could be lent.
            return Found(table, slots, len(slots.block_ids))
        start = num_blocks * self.block_size
        end = min(start + self.block_size, request.num_tokens - 1)
        part = request.token_ids[start:end]
        source, run = self.device.borrow(table, request.root.root, part)
        return Found(table, slots, num_blocks, source, run)

    def load(self, table: RequestBlocks, slots: RequestBlocks, first: int) -> list[tuple[int, int]]:
        """Copies, (slot, block), that fill a table from its block number `first` on with what its
        slots hold. The slots are held until the plan is committed that makes them."""
        assert self.tiers is not None
        count = len(slots.block_ids)
        self.tiers.host.grow(slots, count)  # by nothing: counts as a use
        self.tiers.host.enter_plan(slots)
        self.tiers.counts.loaded += count - first
        return list(zip(slots.block_ids[first:], table.block_ids[first:count], strict=True))

    def publish(self, request: RequestState, table: RequestBlocks, at_least: int) -> None:
        """Makes full blocks findable that are computed, if so many of them are not so yet."""
        num_full = request.num_computed_tokens // self.block_size
        if num_full - table.num_published < at_least or not self.reuse:
            return
        request.extend_keys(num_full)
        root = request.root.root
        self.device.publish(table, root, num_full, request.token_ids)
        if self.tiers is not None and request.slots is not None:
            self.tiers.published(table, request.slots, root)

    def release(self, table: RequestBlocks, slots: RequestBlocks | None) -> None:
        self.device.release(table)
        if slots is not None and self.tiers is not None:
            self.tiers.host.release(slots)
