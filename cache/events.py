"""What the world may know of a cache: which keys it holds, in which tier, and a digest of that set.

Invariant: the digest depends only on the set, not on its history, so that a follower that has
applied the same events, or loaded a snapshot, can compare one number.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

BlockKey = bytes
"""128-bit content key of a block (`cache.keys`)."""

_MASK = (1 << 62) - 1
# Odd multipliers keep a key's contribution distinct from tier to tier.
_WEIGHTS = {"device": 1, "host": 0x9E3779B97F4A7C15, "disk": 0xC2B2AE3D27D4EB4F}


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


# Structs, because an eviction makes one a block: a frozen dataclass takes ten times as long.
class Stored(msgspec.Struct, frozen=True, gc=False):
    """First copy of `key` in a tier; `parent` is the key before it in its chain, or the root."""

    key: BlockKey
    parent: BlockKey
    tier: Tier = Tier.DEVICE


class Removed(msgspec.Struct, frozen=True, gc=False):
    """The last copy of `key` has left a tier."""

    key: BlockKey
    tier: Tier = Tier.DEVICE


CacheEvent = Stored | Removed


class KeySet:
    """A set of (key, tier) with a digest: the sum, modulo 2^62, of the keys' low 64 bits times a
    weight by tier. Keys are themselves keyed hashes, so a chance collision has odds of 2^-62."""

    wants_snapshot = False
    """Whether it is to be loaded anew, though nothing is wrong with it."""

    def __init__(self) -> None:
        self.digest = 0
        self._tiers: dict[Tier, set[BlockKey]] = {tier: set() for tier in Tier}

    def begin_load(self) -> None:
        """A snapshot comes: from here to `end_load` keys are only added, and they and the digest
        are the snapshot's alone. One that has broken off is followed by another `begin_load`."""
        self.clear()

    def end_load(self) -> None:
        """The snapshot was whole."""

    def add(self, key: BlockKey, tier: Tier) -> bool:
        """Returns False, and changes nothing, when it is there already."""
        keys = self._tiers[tier]
        if key in keys:
            return False
        keys.add(key)
        self.digest = digest_with(self.digest, key, tier)
        return True

    def remove(self, key: BlockKey, tier: Tier) -> bool:
        """Returns False, and changes nothing, when it is not there."""
        keys = self._tiers[tier]
        if key not in keys:
            return False
        keys.remove(key)
        self.digest = digest_without(self.digest, key, tier)
        return True

    def clear(self) -> None:
        self.digest = 0
        for keys in self._tiers.values():
            keys.clear()

    def __contains__(self, key: BlockKey) -> bool:
        return any(key in keys for keys in self._tiers.values())

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._tiers.values())

    def __iter__(self) -> Iterator[tuple[BlockKey, Tier]]:
        for tier, keys in self._tiers.items():
            for key in keys:
                yield key, tier


def digest_with(digest: int, key: BlockKey, tier: Tier) -> int:
    """Of a set to which a key is added."""
    return (digest + _element(key, tier)) & _MASK


def digest_without(digest: int, key: BlockKey, tier: Tier) -> int:
    """Of a set from which a key is removed."""
    return (digest - _element(key, tier)) & _MASK


def _element(key: BlockKey, tier: Tier) -> int:
    return int.from_bytes(key[:8], "little") * _WEIGHTS[tier]
