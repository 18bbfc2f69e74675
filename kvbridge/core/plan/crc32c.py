"""Arithmetic of CRC-32C (Castagnoli) as polynomials over GF(2), for many checksums at once.

The *raw* checksum of bytes (register 0 at the start, no inversion at the end) is their polynomial times x^32, modulo
the generator. So it is linear: the raw checksum of a whole is the exclusive or of those of its parts, each times
x^(8n) for the n bytes that follow the part. Zeros in front change nothing, which is why only bytes at fixed places
are compared by it.

A checksum is a uint32 whose highest bit is the coefficient of x^0, as every library stores it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

ChecksumArray = npt.NDArray[np.uint32]

GENERATOR = 0x82F63B78
"""x^32 + x^28 + ... + 1 without its x^32."""
ONE = 0x80000000
"""The polynomial 1."""
_X8 = ONE >> 8
_BITS = np.arange(32, dtype=np.uint32)
_LOWEST = np.uint32(1)


def product(left: int, right: int) -> int:
    """Return the product of two polynomials modulo the generator."""
    result = 0
    while left:
        if left & ONE:
            result ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (GENERATOR if right & 1 else 0)
    return result


@lru_cache(maxsize=4_096)
def bytes_power(count: int) -> int:
    """Return x^(8 * count): what a raw checksum is multiplied by when `count` bytes follow. Requires count >= 0."""
    result, square = ONE, _X8
    while count:
        if count & 1:
            result = product(result, square)
        square = product(square, square)
        count >>= 1
    return result


@lru_cache(maxsize=4_096)
def _multiples(count: int) -> tuple[int, ...]:
    """Return x^(8 * count) times each power of x that a bit of a checksum stands for, the lowest bit first."""
    multiple, found = bytes_power(count), []
    for _ in range(32):
        found.append(multiple)
        multiple = multiple >> 1 ^ (GENERATOR if multiple & 1 else 0)
    return tuple(reversed(found))


def followed_by(checksums: ChecksumArray, counts: npt.NDArray[np.int64]) -> ChecksumArray:
    """Return what each raw checksum becomes when that many bytes of zeros follow; two arrays of equal length."""
    if not counts.any():
        return checksums
    distinct, which = np.unique(counts, return_inverse=True)
    multiples = np.array([_multiples(count) for count in distinct.tolist()], dtype=np.uint32)
    bits = checksums[:, np.newaxis] >> _BITS & _LOWEST
    # A product is the sum of the multiples at which there is a bit; the sum of polynomials is the exclusive or.
    products: ChecksumArray = np.bitwise_xor.reduce(bits * multiples[which], axis=1)
    return products
