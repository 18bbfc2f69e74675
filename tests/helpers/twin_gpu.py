"""The pools of `TwinPools` as a GPU has them, and streams for tests of copies between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, PageMoves
from kvbridge.kernels.cuda import runtime
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier
from tests.helpers.gpu import DEVICE, HOST, Bytes
from tests.helpers.twin_pools import TwinPools, pages

MOVES: PageMoves = {
    IndexSpace.FULL: (pages(7, 0, 3, 4, 5), pages(2, 9, 5, 6, 7)),
    IndexSpace.SWA: (pages(1, 4), pages(3, 0)),
}
PATIENCE_S = 10.0


class Gpu:
    """The pools of one rank and its node's twins, as a GPU has them."""

    def __init__(self, pools: TwinPools, device: int, rank: int, stack: ExitStack) -> None:
        self.pools, self.device, self.rank = pools, device, rank
        self.sides = [
            [stack.enter_context(Bytes(kind, each, device)) for each in pools.memory[which]]
            for kind, which in ((DEVICE, rank), (HOST, -1))
        ]
        self.regions: list[tuple[Region, ...]] = [
            pools.placements[which].regions_at([each.address for each in side])
            for which, side in zip((rank, -1), self.sides, strict=True)
        ]

    def copier(self, direction: Direction, backend: CopyBackend = CopyBackend.KERNEL, blocks: int = 8) -> HostCopier:
        means = CopyMeans(backend, self.device, blocks)
        return HostCopier(self.pools.geometry, *self.regions, direction=direction, means=means)

    def compare(self, expected: list[list[np.ndarray]]) -> None:
        for side, which in zip(self.sides, (self.rank, -1), strict=True):
            for found, wanted in zip(side, expected[which], strict=True):
                assert np.array_equal(found.read(), wanted)


@contextmanager
def on_gpu(pools: TwinPools, device: int, rank: int = 0) -> Iterator[Gpu]:
    with ExitStack() as stack:
        yield Gpu(pools, device, rank, stack)


@dataclass(frozen=True)
class Streams:
    """Made one after another, so that none of them shares a hardware queue with one that is held."""

    main: runtime.Stream
    other: runtime.Stream
    later: runtime.Stream

    @classmethod
    @contextmanager
    def on(cls, device: int) -> Iterator[Streams]:
        with ExitStack() as stack:
            yield cls(*(stack.enter_context(runtime.Stream.create(device)) for _ in range(3)))


def reached(stream: runtime.Stream) -> None:
    """Wait for a stream, but not for ever."""
    deadline = time.monotonic() + PATIENCE_S
    while not stream.idle():
        assert time.monotonic() < deadline, "a stream still waits"
