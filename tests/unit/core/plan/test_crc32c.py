from __future__ import annotations

import numpy as np
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.plan.crc32c import GENERATOR, ONE, bytes_power, followed_by, product

WORDS = st.integers(0, 2**32 - 1)


def bitwise(data: bytes) -> int:
    """The raw checksum by its definition: one bit at a time, register 0 at the start, no inversion."""
    register = 0
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (GENERATOR if register & 1 else 0)
    return register


@given(WORDS, WORDS, WORDS)
def test_products_are_those_of_a_ring(left, right, third):
    assert product(left, ONE) == left
    assert product(left, right) == product(right, left)
    assert product(product(left, right), third) == product(left, product(right, third))
    assert product(left, right ^ third) == product(left, right) ^ product(left, third)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_zeros_that_follow_multiply(data, count):
    found = followed_by(np.array([bitwise(data)], dtype=np.uint32), np.array([count]))
    assert found.tolist() == [bitwise(data + bytes(count))]
    assert product(bitwise(data), bytes_power(count)) == bitwise(data + bytes(count))


@given(st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 7, 8, 500])), min_size=1, max_size=30))
def test_many_checksums_are_multiplied_as_one_is(pairs):
    checksums, counts = zip(*pairs, strict=True)
    found = followed_by(np.array(checksums, dtype=np.uint32), np.array(counts))
    assert found.dtype == np.uint32
    assert found.tolist() == [product(one, bytes_power(count)) for one, count in pairs]


@given(st.binary(max_size=60))
def test_the_library_computes_the_same_once_its_inversions_are_undone(data):
    assert crc32c(data, 0xFFFFFFFF) ^ 0xFFFFFFFF == bitwise(data)
