"""Number formats and functions that kernels share.

Invariant: plain arithmetic only, no vendor's library and no instruction that only some cards have,
so all of it runs on every card and under the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Of float32; relative error below 1e-6."""
    # Near 0 the quotient below would lose its digits, and a few terms of the series are exact.
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    )
    shrunk = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def from_float8(bits):
    """The numbers, float16, that uint8 holds as e4m3: sign, exponent and mantissa are moved to
    where float16 has them, whose exponent is biased by 8 more. Exact, below normal numbers too."""
    wide = bits.to(tl.uint16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_float8(x):
    """Float32 as e4m3 in uint8: the nearest, of two the even one, at most ±448; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.uint32, bitcast=True)
    # Three bits of the mantissa stay; what carries over raises the exponent, as it should.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 all steps are 2**-9: adding 2**23 rounds to whole ones.
    steps = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0.015625, steps, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_kv(pointers, x, mask, FLOAT8: tl.constexpr):
    """Stores float32 `x` in a cache, whose 8-bit floats come as uint8."""
    if FLOAT8:
        tl.store(pointers, to_float8(x), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)
