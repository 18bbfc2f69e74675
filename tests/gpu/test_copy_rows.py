"""The row copy kernel against the reference, bit by bit, with everything around the rows unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvbridge.core.errors import PageOutOfBoundsError, RegistrationError
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.places import IdPairs, PageMemory, RowPair
from kvbridge.kernels.row_copies import CudaRowCopier, ReferenceRowCopier
from tests.helpers.gpu import SMALL
from tests.helpers.kernel_memory import DEVICE, HOST, Bytes, Form, Graph, id_pairs, random_bytes

pytestmark = pytest.mark.gpu

WAYS = [(DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)]
LAYERS = 2 if SMALL else 21
V4 = (576, 8)
CASES = {
    # parts, slots on either side, bytes a page has beside its rows
    "c4": (V4, (64, 64), (64, 64)),
    "c4_to_other_pages": (V4, (64, 16), (64, 0)),
    "dense_to_pages": (V4, (1, 64), (0, 64)),
    "native": ((2048,), (64, 64), (0, 16)),
    "long": ((6000, 40), (4, 2), (0, 8)),
    "narrow": ((20, 4, 16, 12), (8, 4), (4, 0)),
}


@pytest.fixture
def stream(device: int) -> Iterator[int]:
    with runtime.Stream.create(device) as made:
        yield made.handle


class World:
    """The same rows on the device (or registered host memory) and on the CPU."""

    def __init__(self, device: int, way: tuple[str, str], case: str, *, pages: int, layers: int) -> None:
        self.parts, self.slots, more = CASES[case]
        self.forms = [
            Form(
                layers,
                pages if slots > 1 else pages * 8,
                sum(self.parts) * slots + extra,
                pages_per_extent=3 * side,
                page_first=bool(side),
            )
            for side, (slots, extra) in enumerate(zip(self.slots, more, strict=True))
        ]
        self.plain = [random_bytes(form.total_bytes, seed) for seed, form in enumerate(self.forms)]
        self.memory = [Bytes(kind, content, device) for kind, content in zip(way, self.plain, strict=True)]

    def pairs(self, *, on_cpu: bool) -> list[RowPair]:
        bases = [side.ctypes.data if on_cpu else 0 for side in self.plain]
        if not on_cpu:
            bases = [side.address for side in self.memory]
        return [
            RowPair(
                self.forms[0].memory(bases[0], layer), self.forms[1].memory(bases[1], layer), self.parts, *self.slots
            )
            for layer in range(self.forms[0].layers)
        ]

    def ids(self, count: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        rows = [form.pages * slots for form, slots in zip(self.forms, self.slots, strict=True)]
        return np.array([rng.permutation(most)[:count] for most in rows], dtype=np.int32)

    def compare(self) -> None:
        for found, expected in zip(self.memory, self.plain, strict=True):
            assert np.array_equal(found.read(), expected)

    def close(self) -> None:
        for side in self.memory:
            side.close()


@pytest.fixture
def worlds() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("count", [1, 7, 64] if SMALL else [1, 7, 64, 512])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS, ids="_to_".join)
def test_copies_what_the_reference_copies(
    worlds, device: int, stream: int, way: tuple[str, str], case: str, count: int
):
    slots = min(slot for slot in CASES[case][1] if slot > 1)
    here = World(device, way, case, pages=-(-count // slots) + 4 if slots < 64 else count // 8 + 4, layers=LAYERS)
    worlds.callback(here.close)
    ids = here.ids(count, seed=count)
    if count > 3:
        ids[0, 1] = ids[1, 3] = -1
    ReferenceRowCopier(here.pairs(on_cpu=True)).copy(id_pairs(ids, count))
    with Bytes(DEVICE, ids, device) as named, CudaRowCopier(device, here.pairs(on_cpu=False)) as copier:
        copier.copy(id_pairs(named, count), stream=stream)
        copier.check()
    here.compare()


@pytest.mark.parametrize("blocks", [1, 5])
def test_any_number_of_blocks(worlds, device: int, stream: int, blocks: int):
    here = World(device, (DEVICE, HOST), "c4", pages=5, layers=3)
    worlds.callback(here.close)
    ids = here.ids(200, seed=1)
    ReferenceRowCopier(here.pairs(on_cpu=True)).copy(id_pairs(ids, 200))
    with Bytes(HOST, ids, device) as named, CudaRowCopier(device, here.pairs(on_cpu=False), blocks=blocks) as copier:
        copier.copy(id_pairs(named, 200), stream=stream)
        copier.check()
    here.compare()


def test_ids_that_do_not_exist_are_left_out_and_told(worlds, device: int, stream: int):
    here = World(device, (DEVICE, HOST), "c4", pages=4, layers=2)
    worlds.callback(here.close)
    ids = np.array([[0, 256, 3, -2, 255], [255, 0, 256, 1, 2]], dtype=np.int32)
    kept = np.array([[0, 255], [255, 2]], dtype=np.int32)
    ReferenceRowCopier(here.pairs(on_cpu=True)).copy(id_pairs(kept, 2))
    with Bytes(DEVICE, ids, device) as named, CudaRowCopier(device, here.pairs(on_cpu=False)) as copier:
        copier.copy(id_pairs(named, 5), stream=stream)
        with pytest.raises(PageOutOfBoundsError, match=r"^6 times a row copy"):
            copier.check()
    here.compare()


def test_a_captured_copy_takes_what_the_arrays_hold_at_each_replay(worlds, device: int, stream: int):
    here = World(device, (DEVICE, HOST), "c4", pages=8, layers=LAYERS)
    worlds.callback(here.close)
    most = 64
    named = worlds.enter_context(Bytes(DEVICE, here.ids(most, seed=0), device))
    said = worlds.enter_context(Bytes(DEVICE, np.zeros(1, dtype=np.int32), device))
    copier = worlds.enter_context(CudaRowCopier(device, here.pairs(on_cpu=False)))
    rows = id_pairs(named, most, count_address=said.address)
    graph = Graph(device, stream, lambda: copier.copy(rows, stream=stream))
    worlds.callback(graph.close)
    reference = ReferenceRowCopier(here.pairs(on_cpu=True))
    for replay, count in enumerate((64, 0, 1, 33)):
        ids = here.ids(most, seed=replay)
        named.write(ids)
        said.write(np.array([count], dtype=np.int32))
        graph.replay()
        reference.copy(IdPairs(ids.ctypes.data, ids.ctypes.data + 4 * most, count))
        here.compare()
    copier.check()


def test_unregistered_memory_is_refused(device: int):
    plain = np.zeros(4096, dtype=np.uint8)
    side = PageMemory.contiguous(-(-plain.ctypes.data // 16) * 16, page_count=2, page_stride_bytes=1024)
    with pytest.raises(RegistrationError, match="registered with CUDA"):
        CudaRowCopier(device, [RowPair(side, side, (16,), 1, 1)])
