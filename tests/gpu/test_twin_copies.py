"""Copies between a GPU and twins on the host, against the reference's expectation, with everything around the pages unchanged."""

import numpy as np
import pytest

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.kernels.copies import StretchCopier
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import HostRegistration
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier
from tests.helpers.gpu import DEVICE, Bytes
from tests.helpers.twin_pools import COMBINATIONS, MOVES, Streams, TwinPools, on_gpu, reached

pytestmark = pytest.mark.gpu
TINY, GQA = preset("tiny-v4"), preset("tiny-gqa")
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_each_legal_combination_copies_what_twins_keep(device: int, streams: Streams, combination: tuple):
    host, layout, backend, direction = combination
    page_first = layout is DeviceLayout.PAGE_FIRST
    for geometry, tp_size, rank in ((TINY, 1, 0), (GQA, 2, 1)):
        moves = {space: MOVES[space] for space in MOVES if space is FULL or geometry is TINY}
        with (
            TwinPools(geometry, tp_size=tp_size, layout=host, page_first=page_first) as pools,
            on_gpu(pools, device, rank) as gpu,
            gpu.copier(direction, backend) as copier,
        ):
            expected = pools.expected(moves, direction, ranks=[rank])
            ticket = copier.copy(moves, stream=streams.main.handle)
            copier.wait(ticket, stream=streams.other.handle)
            reached(streams.other)
            assert copier.done(ticket)
            gpu.compare(expected)
            kernel = isinstance(copier._copier, StretchCopier)
            assert kernel is (backend is CopyBackend.KERNEL), "another backend than the one that was asked for"


def test_the_copy_engines_cross_no_border_of_registered_memory(device, stream, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PIECE_BYTES", 64 * 1024)
    with (
        TwinPools(TINY, layout=HostLayout.PAGE_FIRST, page_first=True) as pools,
        MemoryPool.in_files(pools.placements[-1], DEFAULT_DIRECTORY, f"kvbridge-test-{tmp_path.name}") as twins,
        HostRegistration(twins.mappings, extents=twins.extents, device=device),
        Bytes(DEVICE, pools.memory[0][0], device) as memory,
    ):
        regions = pools.placements[0].regions_at([memory.address])
        (mapping,) = twins.mappings
        held = np.frombuffer(mapping.buffer, dtype=np.uint8)
        for direction in Direction:
            memory.write(pools.memory[0][0])
            held[:] = pools.memory[-1][0]
            expected = pools.expected(MOVES, direction)
            means = CopyMeans(CopyBackend.DIRECT, device)
            with HostCopier(TINY, regions, twins.regions, direction=direction, means=means) as copier:
                copier.copy(MOVES, stream=stream)
            assert np.array_equal(memory.read(), expected[0][0])
            assert np.array_equal(held, expected[-1][0])
        del held
