"""Which rows of a batch are recorded in the output, and which were met in the input.

Invariant: each key is met once; the second row of a key is told from the first.

A row is known by its `custom_id`, so rows may be added to an input, moved or removed between runs.
One without a `custom_id` of its own (none, no string, or one that an earlier row has) is known by
the number of its line: between runs of an input that has such rows, lines may be added at its end
only.

Keys are 128 bits of BLAKE2b, and a row takes some 150 bytes: ten million rows fit in 2 GB.
"""

from enum import Enum
from hashlib import blake2b

_KEY_BYTES = 16
_RECORDED, _FAILED, _MET = 1, 2, 4


class Standing(Enum):
    """What is known of a row when it is met in the input."""

    NEW = "new"
    SUCCEEDED = "succeeded"
    """Recorded by an earlier run."""
    FAILED = "failed"
    """Recorded by an earlier run, as an error."""
    DUPLICATE = "duplicate"


def key_of_custom_id(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=_KEY_BYTES, person=b"custom_id").digest()


def key_of_line(number: int) -> bytes:
    """`number` counts from 1."""
    return blake2b(b"%d" % number, digest_size=_KEY_BYTES, person=b"line").digest()


class RowIndex:
    """The standing of every row, by key."""

    def __init__(self) -> None:
        self._flags: dict[bytes, int] = {}
        self.num_recorded = 0

    def record(self, key: bytes, failed: bool) -> None:
        """Takes in that the output has an outcome of this key."""
        flags = self._flags.get(key, 0)
        self.num_recorded += not flags & _RECORDED
        self._flags[key] = flags | _RECORDED | (_FAILED if failed else 0)

    def meet(self, key: bytes) -> Standing:
        """Takes in that the input has a row of this key."""
        flags = self._flags.get(key, 0)
        self._flags[key] = flags | _MET
        if flags & _MET:
            return Standing.DUPLICATE
        if not flags & _RECORDED:
            return Standing.NEW
        return Standing.FAILED if flags & _FAILED else Standing.SUCCEEDED
