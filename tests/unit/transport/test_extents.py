"""Ranges inside and outside of registered extents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidInputError
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.extents import Extents


def require(extents: Extents, *ranges: tuple[int, int]) -> None:
    addresses, lengths = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
    extents.require(addresses, lengths)


def memory(*ranges: tuple[int, int]) -> list[Extent]:
    return [Extent(address=address, length_bytes=length) for address, length in ranges]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=8),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 14)), min_size=1, max_size=10),
)
def test_agrees_with_counting_bytes(wanted: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> None:
    extents, owner = Extents("this process"), {}
    for start, length in wanted:
        bytes_ = range(start, start + length)
        if any(byte in owner for byte in bytes_):
            with pytest.raises(InvalidInputError):
                extents.joined(memory((start, length)))
            continue
        extents = extents.joined(memory((start, length)))
        owner |= dict.fromkeys(bytes_, start)
    inside = all(
        length and len({owner.get(byte) for byte in range(start, start + length)}) == 1 and owner.get(start)
        for start, length in ranges
    )
    if inside:
        require(extents, *ranges)
    else:
        with pytest.raises(InvalidInputError):
            require(extents, *ranges)
