"""Waits for copies between a GPU and its host copies: streams that are held, and a host that goes on.

Not for compute-sanitizer, which has the host wait for each launch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.models import preset
from kvbridge.kernels.copies import array_at
from kvbridge.tier.copies import Direction
from tests.helpers.gpu import HOST, Bytes, wait_value
from tests.helpers.twin_pools import MOVES, Streams, TwinPools, on_gpu, reached

pytestmark = pytest.mark.gpu
TINY = preset("tiny-v4")


class Gate:
    """Holds streams until it is opened, by a word in host memory: opening it needs no stream."""

    def __init__(self, device: int, stack: ExitStack) -> None:
        self._device = device
        self._word = stack.enter_context(Bytes(HOST, np.zeros(1, dtype=np.uint32), device))

    @contextmanager
    def holding(self, stream: int) -> Iterator[None]:
        wait_value(self._device, self._word.address, 1, stream)
        try:
            yield
        finally:
            array_at(self._word.address, (1,), np.uint32)[0] = 1


@pytest.mark.parametrize("backend", CopyBackend)
def test_nothing_on_the_host_waits_and_the_arrays_are_free_at_once(device, stream, streams, backend):
    """The stream is held: all calls return, and ids are taken from what the arrays held when `copy` was called."""
    with (
        TwinPools(TINY, layout=HostLayout.PAGE_FIRST, page_first=True) as pools,
        on_gpu(pools, device) as gpu,
        ExitStack() as stack,
        gpu.copier(Direction.LOAD_BACK, backend) as copier,
    ):
        gate, other = Gate(device, stack), streams.other
        expected = pools.expected(MOVES, Direction.LOAD_BACK)
        copier.copy({}, stream=stream)  # a kernel that is not loaded yet would wait for the stream
        reached(streams.main)
        given = {space: (ids[0].copy(), ids[1].copy()) for space, ids in MOVES.items()}
        with gate.holding(stream):
            tickets = [copier.copy(given, stream=stream)]
            for ids in given.values():
                for each in ids:
                    each[:] = 0
            tickets += [copier.copy({}, stream=stream) for _ in range(9)]
            for layer in range(TINY.layer_count):
                copier.wait_layer(layer, tickets[0], stream=other.handle)
            copier.wait(tickets[-1], stream=other.handle)
            assert [copier.done(ticket) for ticket in tickets] == [False] * 10
            assert not other.idle()
        reached(other)
        assert [copier.done(ticket) for ticket in tickets] == [True] * 10
        gpu.compare(expected)


def test_a_wait_is_for_its_own_copy(device: int, stream: int, streams: Streams):
    """A later copy is held: who waits for a layer of the earlier one, or for all of it, gets through."""
    with (
        TwinPools(TINY) as pools,
        on_gpu(pools, device) as gpu,
        ExitStack() as stack,
        gpu.copier(Direction.LOAD_BACK) as copier,
    ):
        gate, other, later = Gate(device, stack), streams.other, streams.later
        first = copier.copy(MOVES, stream=stream)
        with gate.holding(stream):
            second = copier.copy(MOVES, stream=stream)
            for layer in range(TINY.layer_count):
                copier.wait_layer(layer, first, stream=other.handle)
            copier.wait(first, stream=other.handle)
            copier.wait_layer(0, second, stream=later.handle)
            reached(other)
            assert (copier.done(first), copier.done(second), later.idle()) == (True, False, False)
        reached(later)
