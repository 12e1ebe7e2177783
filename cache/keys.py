"""Content keys of KV blocks.

Invariant: two blocks have the same key only if they hold the KV of the same tokens after the same
prefix, under the same model, in the same cache domain. A key is a keyed hash (BLAKE2b, RFC 7693,
128 bits) of its parent's key and its own tokens; its chain starts at a root that takes in whatever
else KV depends on. Without the secret nobody can make two prefixes collide, or tell from a key what
it stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Any

from cache.events import BlockKey

KEY_SCHEMA = 1
"""Changes with anything that changes keys; ingress and engine must agree on it."""
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyRoot:
    """Where the chains of one (model, domain) start."""

    secret: bytes = field(repr=False)
    root: BlockKey
    block_size: int
    _keyed: Any = field(init=False, repr=False, compare=False)
    """A hash that has taken in the secret and nothing else: copied for each block."""
    _pack: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keyed", blake2b(digest_size=KEY_BYTES, key=self.secret))
        object.__setattr__(self, "_pack", Struct(f"<{self.block_size}i").pack)

    def keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of all full blocks of `token_ids`, in one pass."""
        return self.extend(self.root, token_ids)

    def extend(self, parent: BlockKey, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of the full blocks of `token_ids` that follow the block keyed `parent`."""
        size, pack, copy = self.block_size, self._pack, self._keyed.copy
        keys = []
        for start in range(0, len(token_ids) - size + 1, size):
            hasher = copy()
            hasher.update(parent + pack(*token_ids[start : start + size]))
            parent = hasher.digest()
            keys.append(parent)
        return keys


def key_root(secret: bytes, fingerprint: str, domain: str, block_size: int) -> KeyRoot:
    """The root for one model and cache domain. `secret` is 16 to 64 bytes."""
    hasher = blake2b(digest_size=KEY_BYTES, key=secret)
    # Each part is tagged and has its length before it, so that no two lists of parts read alike.
    for tag, value in (("model", fingerprint), ("domain", domain), ("block", str(block_size))):
        for part in (tag.encode(), value.encode()):
            hasher.update(len(part).to_bytes(4, "little") + part)
    return KeyRoot(secret, hasher.digest(), block_size)
