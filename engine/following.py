"""Prefixes that a running request is computing, so that one who waits for the same does not.

Invariant: a request follows only one that runs, is no weaker, and has yet to publish what both need
next. It waits until that is published or the other no longer runs, whichever is first.
"""

from itertools import takewhile

from cache.events import BlockKey
from engine.request import Following, RequestState


class PrefixesUnderWay:
    """Running requests by the key of the first block that they have yet to publish of what they
    began with. One entry a request, moved on once a slice."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, RequestState] = {}
        self._keys: dict[int, BlockKey] = {}
        """By run id."""

    def advance(self, request: RequestState) -> None:
        """It has started, or has published more."""
        run_id, table = request.run_id, request.table
        assert run_id is not None
        assert table is not None
        self.leave(run_id)
        if table.num_published < len(request.block_keys):
            key = request.block_keys[table.num_published]
            if self._by_key.setdefault(key, request) is request:
                self._keys[run_id] = key

    def leave(self, run_id: int) -> None:
        """It no longer runs."""
        key = self._keys.pop(run_id, None)
        if key is not None:
            del self._by_key[key]

    def follow(self, request: RequestState, num_found: int) -> bool:
        """Whether `request`, of which the cache has `num_found` blocks, had better wait; then it
        knows for what."""
        limit = (request.num_tokens - 1) // request.root.block_size
        if not self._by_key or num_found >= min(limit, len(request.block_keys)):
            return False
        keys = request.block_keys[num_found:limit]
        leader = self._by_key.get(keys[0])
        if leader is None or leader.run_id is None or leader.rank > request.rank:
            return False
        pairs = zip(keys, leader.block_keys[num_found:], strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        request.following = Following(leader, leader.run_id, num_found + num_shared)
        request.expected_cached_tokens = request.following.num_blocks * request.root.block_size
        return True
