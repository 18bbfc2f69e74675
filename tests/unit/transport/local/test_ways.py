"""Who copies what: every operation once, long ones by engines, short ones and those across registrations by the kernel."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.plan.operations import Operations
from kvbridge.transport.local.memory import HOST
from kvbridge.transport.local.ways import HostEnds, Route, Way, only_route, split

CHUNK = 1 << 20
BASE = 0x1000
BELOW = 256


def routes(*rows: tuple[int, int, int, int, int], base: int = BASE) -> dict[Route, list[int]]:
    """From rows (source, source device, destination, destination device, bytes)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    source, source_device, target, target_device, length = table.T
    operations = Operations(*(column.astype(np.uint64) for column in (source, target, length)))
    ends = HostEnds(
        np.where(source_device == HOST, base, 0).astype(np.uint64),
        np.where(target_device == HOST, base, 0).astype(np.uint64),
        CHUNK,
    )
    found = split(
        operations, source_device.astype(np.int32), target_device.astype(np.int32), ends, kernel_below_bytes=BELOW
    )
    return {route: indices.tolist() for route, indices in found.items()}


@given(st.integers(HOST, 2), st.integers(HOST, 2), st.lists(st.integers(1, 2 * BELOW), min_size=1, max_size=5))
def test_the_only_route_is_the_one_that_each_takes(source: int, target: int, lengths: list[int]) -> None:
    route = only_route(source, target, max(lengths), kernel_below_bytes=BELOW)
    assert (route is not None) == (max(lengths) < BELOW and (source, target) != (HOST, HOST))
    if route is not None:
        each = [(BASE, source, BASE, target, length) for length in lengths]
        assert routes(*each) == {route: list(range(len(lengths)))}


@given(
    st.lists(
        st.tuples(
            st.integers(BASE, BASE + 3 * CHUNK),
            st.integers(HOST, 2),
            st.integers(BASE, BASE + 3 * CHUNK),
            st.integers(HOST, 2),
            st.integers(1, CHUNK),
        ),
        max_size=40,
    )
)
def test_every_operation_takes_one_way_that_can_carry_it(rows: list[tuple[int, int, int, int, int]]) -> None:
    found = routes(*rows)
    assert sorted(index for indices in found.values() for index in indices) == list(range(len(rows)))
    for route, indices in found.items():
        for source, source_device, target, target_device, length in (rows[index] for index in indices):
            on_host = [
                address for address, device in ((source, source_device), (target, target_device)) if device == HOST
            ]
            assert (route.way is Way.PROCESSOR) == (len(on_host) == 2)
            if route.way is not Way.PROCESSOR:
                assert route.device == (source_device if source_device != HOST else target_device)
                assert route.over_host_link == bool(on_host)
            if route.way is Way.ENGINES:
                assert length >= BELOW
                assert all((at - BASE) // CHUNK == (at + length - 1 - BASE) // CHUNK for at in on_host)
