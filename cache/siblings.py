"""Blocks that follow the same prefix, in the order of their tokens: whose beginning is most alike.

Invariant: among keys in order, the longest common beginning with any key is that of one of its two
neighbours. So of a parent's children the one that shares the longest run of tokens with a prompt is
found by one search. Few children lie in a sorted list, many in a skip list, where putting one in
moves no other. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from random import Random
from struct import pack as pack_struct
from typing import Any, TypeAlias

Packed: TypeAlias = bytes
"""Token ids of a block, 4 bytes each. They are compared as bytes: any order does."""
Entry: TypeAlias = tuple[Packed, int]
"""Tokens, and the block that holds their KV."""
Parent: TypeAlias = int | bytes
"""A block, or the root of a chain."""

TOKEN_BYTES = 4
_MAX_LEVELS = 16
_SPARSENESS = 4
"""One node in so many reaches the next level."""


def pack(token_ids: Sequence[int]) -> Packed:
    return pack_struct(f"<{len(token_ids)}i", *token_ids)


def common_run(one: Packed, other: Packed) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    a, b = int.from_bytes(one[:length], "big"), int.from_bytes(other[:length], "big")
    return (8 * length - (a ^ b).bit_length()) // 8 // TOKEN_BYTES


class SkipList:
    """Entries in order; O(log n) expected (Pugh, CACM 1990). The same calls give the same list."""

    def __init__(self) -> None:
        # A node: tokens, block, then the next node at each of its levels.
        self._head: list[Any] = [b"", -1, *[None] * _MAX_LEVELS]
        self._random = Random(0)
        self._height = 1
        """Levels in use: the rest of the head's are empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        node = self._head[2]
        while node is not None:
            yield node[0], node[1]
            node = node[2]

    def insert(self, tokens: Packed, block_id: int) -> None:
        """`tokens` must not be there yet."""
        height = 1
        while height < _MAX_LEVELS and self._random.randrange(_SPARSENESS) == 0:
            height += 1
        self._height = max(self._height, height)
        node: list[Any] = [tokens, block_id, *[None] * height]
        for level, before in enumerate(self._path(tokens)[:height], 2):
            node[level] = before[level]
            before[level] = node
        self._size += 1

    def remove(self, tokens: Packed) -> None:
        """Raises `KeyError` if they are not there."""
        path = self._path(tokens)
        node = path[0][2]
        if node is None or node[0] != tokens:
            raise KeyError(tokens)
        for level, before in enumerate(path[: len(node) - 2], 2):
            before[level] = node[level]
        self._size -= 1

    def around(self, tokens: Packed) -> list[Entry]:
        """The last entry before `tokens`, and the first that is not."""
        before = self._path(tokens)[0]
        nodes = [before if before is not self._head else None, before[2]]
        return [(node[0], node[1]) for node in nodes if node is not None]

    def _path(self, tokens: Packed) -> list[list[Any]]:
        """On each level, lowest first, the last node before `tokens`."""
        node = self._head
        path = []
        for level in range(self._height + 1, 1, -1):
            while (following := node[level]) is not None and following[0] < tokens:
                node = following
            path.append(node)
        path.reverse()
        return path


class Siblings:
    """The keyed children of each parent."""

    def __init__(self, most_listed: int = 64) -> None:
        """With more children than `most_listed` a parent has a skip list."""
        self._most_listed = most_listed
        self._children: dict[Parent, list[Entry] | SkipList] = {}

    def add(self, parent: Parent, tokens: Packed, block_id: int) -> None:
        """A parent has one child with these tokens."""
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = [(tokens, block_id)]
        elif isinstance(children, SkipList):
            children.insert(tokens, block_id)
        else:
            children.insert(bisect_left(children, (tokens, block_id)), (tokens, block_id))
            if len(children) > self._most_listed:
                many = self._children[parent] = SkipList()
                for entry in children:
                    many.insert(*entry)

    def remove(self, parent: Parent, tokens: Packed) -> None:
        """Raises `KeyError` if there is no such child."""
        children = self._children[parent]
        if len(children) == 1 and isinstance(children, list) and children[0][0] == tokens:
            del self._children[parent]
            return
        if isinstance(children, SkipList):
            children.remove(tokens)
        else:
            at = bisect_left(children, (tokens, -1))
            if at == len(children) or children[at][0] != tokens:
                raise KeyError(tokens)
            del children[at]
        if not children:
            del self._children[parent]

    def nearest(self, parent: Parent, tokens: Packed) -> tuple[int, int]:
        """The child that begins most like `tokens`, and how many tokens both begin with; 0 of them
        when there is none."""
        children = self._children.get(parent)
        if children is None:
            return -1, 0
        if isinstance(children, SkipList):
            around = children.around(tokens)
        else:
            at = bisect_left(children, (tokens, -1))
            around = children[max(0, at - 1) : at + 1]
        run, block_id = max((common_run(tokens, each), block) for each, block in around)
        return block_id, run

    def entries(self) -> Iterator[tuple[Parent, Packed, int]]:
        """All of them, for checks."""
        for parent, children in self._children.items():
            for tokens, block_id in children:
                yield parent, tokens, block_id

    def check_integrity(self) -> None:
        """Raises `AssertionError` if children are out of order or a parent has none."""
        for children in self._children.values():
            listed = [tokens for tokens, _ in children]
            assert listed == sorted(set(listed)), "children are out of order"
            assert listed, "a parent without children is kept"
            assert len(children) == len(listed)
