"""Who holds which KV block.

Invariant: a block is free, or held by as many owners as its reference count says; the two never
overlap and nothing is lost between them. Arrays are laid out once; no call allocates per block.
"""

from array import array
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0, and a stack of the free ones.

    A block whose count reaches zero is *idle*, not free: its owner decides whether its content is
    worth keeping (`cache.prefix`) and calls `free` when not.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = array("l", bytes(array("l").itemsize * num_blocks))
        # Popped from the end: low numbers first, the block freed last is used first.
        self._free = array("l", range(num_blocks - 1, -1, -1))
        self.num_held = 0
        """Blocks with a reference."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Raises `IndexError` if there are
        fewer; nothing is taken then."""
        free = self._free
        if count > len(free):
            raise IndexError(f"{count} blocks wanted, {len(free)} free")
        if count == 0:
            return []
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        for block_id in taken:
            self._references[block_id] = 1
        self.num_held += count
        return taken.tolist()

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more reference on each."""
        for block_id in block_ids:
            count = self._references[block_id]
            self.num_held += count == 0
            self._references[block_id] = count + 1

    def drop(self, block_id: int) -> bool:
        """One reference less; True if it was the last."""
        count = self._references[block_id] - 1
        if count < 0:
            raise ValueError(f"block {block_id} is dropped once too often")
        self._references[block_id] = count
        self.num_held -= count == 0
        return count == 0

    def free(self, block_ids: Sequence[int]) -> None:
        """Returns idle blocks to the stack; the last of them is used first."""
        for block_id in block_ids:
            assert self._references[block_id] == 0, f"block {block_id} is still held"
        self._free.extend(block_ids)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if a block is free twice, or free and held."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._references[block_id] == 0 for block_id in self._free), "free yet held"
        assert min(self._references) >= 0
        assert self.num_held == sum(count > 0 for count in self._references), "holds are miscounted"
