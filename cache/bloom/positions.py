"""Where a key's bits are, and how many bits a filter should have.

Invariant: the size is a power of two, so a key's positions in a filter of half the size are the
same ones less their highest bit. A filter can therefore be halved, and stands for a larger one when
it is repeated.
"""

import math
from struct import Struct

NUM_HASHES = 4
"""Bits a key: its four 32-bit words, so that a look-up costs four ANDs. At 8 bits a key the best
count would be six, for 2.2 % instead of 2.4 %."""

MIN_BITS = 1 << 6
MAX_BITS = 1 << 26
"""Eight million keys at 8 bits a key."""

words_of = Struct("<4I").unpack
"""A position in a filter of n bits is a word modulo n. Raises `struct.error` when the key is not 16
bytes."""


def bits_for(num_keys: int, bits_per_key: int) -> int:
    """Smallest filter that has `bits_per_key` for each of them."""
    bits = 1 << max(num_keys * bits_per_key - 1, 0).bit_length()
    return min(max(bits, MIN_BITS), MAX_BITS)


def false_positive_rate(bits_per_key: float) -> float:
    """(1 - e^(-4 / c))^4 at c bits a key (Bloom 1970): 2.4 % at 8 bits, 0.24 % at 16."""
    if bits_per_key <= 0:
        return 1.0
    return float((1 - math.exp(-NUM_HASHES / bits_per_key)) ** NUM_HASHES)


def check_num_bits(num_bits: int) -> None:
    """Raises `ValueError` for what is no filter's size."""
    if not MIN_BITS <= num_bits <= MAX_BITS or num_bits & (num_bits - 1):
        raise ValueError(f"{num_bits} bits: a power of two from {MIN_BITS} to {MAX_BITS} is needed")
