"""Who holds which KV block.

Invariant: a block is free, or held by as many owners as its reference count says; the two never
overlap and nothing is lost between them. All is laid out once: lists of small or shared integers,
so no call allocates anything per block. (An `array` would take half the memory, but writing to one
takes ten times as long.)
"""

from collections.abc import Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0, and a stack of the free ones.

    A block whose count reaches zero is *idle*, not free: its owner decides whether its content is
    worth keeping (`cache.prefix`) and calls `free` when not.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Popped from the end: low numbers first, the block freed last is used first.
        self._free = list(range(num_blocks - 1, -1, -1))
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
        references = self._references
        for block_id in taken:
            references[block_id] = 1
        self.num_held += count
        return taken

    def hold(self, block_ids: Sequence[int]) -> None:
        """One more reference on each."""
        references = self._references
        num_idle = 0
        for block_id in block_ids:
            count = references[block_id]
            if not count:
                num_idle += 1
            references[block_id] = count + 1
        self.num_held += num_idle

    def drop(self, block_ids: Sequence[int]) -> list[int]:
        """One reference less on each; returns those that have none left, in the same order. Raises
        `ValueError` at a block that has none, with those before it dropped."""
        references = self._references
        idle: list[int] = []
        for block_id in block_ids:
            count = references[block_id] - 1
            if count <= 0:
                if count < 0:
                    self.num_held -= len(idle)
                    raise ValueError(f"block {block_id} is dropped once too often")
                idle.append(block_id)
            references[block_id] = count
        self.num_held -= len(idle)
        return idle

    def free(self, block_ids: Sequence[int]) -> None:
        """Returns idle blocks to the stack; the last of them is used first."""
        references = self._references
        for block_id in block_ids:
            assert not references[block_id], "still held"
        self._free.extend(block_ids)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if a block is free twice, or free and held."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._references[block_id] == 0 for block_id in self._free), "free yet held"
        assert min(self._references) >= 0
        assert self.num_held == sum(count > 0 for count in self._references), "holds are miscounted"
