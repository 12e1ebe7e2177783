"""Agreement without talk: who gets what, by hash alone.

Rendezvous hashing (Thaler and Ravishankar, 1998): each (replica, item) pair has a weight and the
item goes to the replica of the highest. A replica that joins takes over 1/n of the items, one that
leaves gives up its own, and nothing else moves.

A weight is the finaliser of splitmix64 (Steele et al., 2014) over a 64-bit hash of the replica and
one of the item: a few array operations for all replicas, and the same in every process.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)


def point(data: bytes) -> np.uint64:
    """A place among 2^64, for a replica (its seed) or an item."""
    return np.uint64(int.from_bytes(blake2b(data, digest_size=8).digest(), "little"))


def weights(seeds: NDArray[np.uint64], item: np.uint64) -> NDArray[np.uint64]:
    """`[n]`, of the n seeds: the highest gets the item."""
    mixed = seeds ^ item
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FACTOR_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _FACTOR_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
