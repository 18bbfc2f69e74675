"""The page copy kernel against the reference, bit by bit, with everything around the pages unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvbridge.core.errors import PageOutOfBoundsError, RegistrationError, UnsupportedError
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.page_copies import CudaPageCopier, ReferencePageCopier
from kvbridge.kernels.places import IdPairs, PageMemory, PagePair
from tests.helpers.gpu import SMALL
from tests.helpers.kernel_memory import DEVICE, HOST, Bytes, Form, id_pairs, random_bytes

pytestmark = pytest.mark.gpu

C4_BYTES, C128_BYTES = 37_440, 1_728
WAYS = [(DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)]
COUNTS = (1, 2, 5, 8) if SMALL else (512, 64, 1, 200)
"""A number of pages for each layout."""
LAYOUTS = {
    "layer_first": {},
    "page_first": {"page_first": True},
    "extents": {"pages_per_extent": 7},
    "page_first_extents": {"pages_per_extent": 5, "page_first": True},
}


@dataclass
class World:
    """The same pages on the device (or registered host memory) and on the CPU."""

    device: int
    forms: tuple[Form, Form]
    memory: tuple[Bytes, Bytes]
    plain: tuple[np.ndarray, np.ndarray]

    def pairs(self, *, on_cpu: bool, page_bytes: int = 0, tables: tuple[int, ...] = ()) -> list[PagePair]:
        bases = [side.ctypes.data for side in self.plain] if on_cpu else [side.address for side in self.memory]
        return [
            PagePair(
                *(form.memory(base, layer) for form, base in zip(self.forms, bases, strict=True)),
                page_bytes or min(form.page_bytes for form in self.forms),
                group=layer,
                table=tables[layer] if tables else 0,
            )
            for layer in range(self.forms[0].layers)
        ]

    def ids(self, count: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.array([rng.permutation(form.pages)[:count] for form in self.forms], dtype=np.int32)

    def compare(self) -> None:
        for found, expected in zip(self.memory, self.plain, strict=True):
            assert np.array_equal(found.read(), expected)


@contextmanager
def world(device: int, way: tuple[str, str], forms: tuple[Form, Form]) -> Iterator[World]:
    plain = tuple(random_bytes(form.total_bytes, seed) for seed, form in enumerate(forms))
    with ExitStack() as stack:
        memory = [stack.enter_context(Bytes(kind, each, device)) for kind, each in zip(way, plain, strict=True)]
        yield World(device, forms, (memory[0], memory[1]), plain)


@pytest.mark.parametrize(("layout", "count"), list(zip(LAYOUTS, COUNTS, strict=True)))
@pytest.mark.parametrize("way", WAYS, ids="_to_".join)
def test_copies_what_the_reference_copies(device: int, stream: int, way: tuple[str, str], layout: str, count: int):
    pages = count + count // 2 + 2
    forms = (Form(3, pages, C4_BYTES, **LAYOUTS[layout]), Form(3, pages + 3, C4_BYTES + 64))
    with world(device, way, forms) as here:
        ids = here.ids(count, seed=count)
        ReferencePageCopier(here.pairs(on_cpu=True)).copy([id_pairs(ids, count)])
        with Bytes(DEVICE, ids, device) as named, CudaPageCopier(device, here.pairs(on_cpu=False)) as copier:
            copier.copy([id_pairs(named, count)], stream=stream)
            copier.check()
        here.compare()


@pytest.mark.parametrize(("page_bytes", "blocks"), [(16, 1), (528, 3), (C128_BYTES, 200), (8_448, 1)])
def test_any_size_and_any_number_of_blocks(device: int, stream: int, page_bytes: int, blocks: int):
    forms = (Form(2, 30, page_bytes + 16, gap_bytes=16), Form(2, 30, page_bytes, pages_per_extent=4, gap_bytes=80))
    with world(device, (DEVICE, HOST), forms) as here:
        ids = here.ids(23, seed=blocks)
        ReferencePageCopier(here.pairs(on_cpu=True)).copy([id_pairs(ids, 23)])
        with (
            Bytes(HOST, ids, device) as named,
            CudaPageCopier(device, here.pairs(on_cpu=False), blocks=blocks, signals=True) as copier,
        ):
            copier.copy([id_pairs(named, 23)], stream=stream)
            copier.check()
        here.compare()


def test_tables_and_holes(device: int, stream: int):
    forms = (Form(4, 40, C128_BYTES), Form(4, 40, C128_BYTES, page_first=True))
    tables, counts = (2, 0, 1, 2), (0, 17, 9)
    with world(device, (HOST, DEVICE), forms) as here, ExitStack() as stack:
        lists = [here.ids(count, seed=table) for table, count in enumerate(counts)]
        lists[2][0, 3] = lists[2][1, 5] = -1
        ReferencePageCopier(here.pairs(on_cpu=True, tables=tables)).copy(
            [id_pairs(ids, count) for ids, count in zip(lists, counts, strict=True)]
        )
        named = [stack.enter_context(Bytes(DEVICE, ids, device)) for ids in lists]
        copier = stack.enter_context(CudaPageCopier(device, here.pairs(on_cpu=False, tables=tables)))
        copier.copy([id_pairs(ids, count) for ids, count in zip(named, counts, strict=True)], stream=stream)
        copier.check()
        here.compare()


def test_ids_that_do_not_exist_are_left_out_and_told(device: int, stream: int):
    forms = (Form(2, 10, C128_BYTES), Form(2, 12, C128_BYTES))
    ids = np.array([[0, 10, 3, -2, 9], [11, 0, 12, 1, 2]], dtype=np.int32)
    kept = np.array([[0, 9], [11, 2]], dtype=np.int32)
    with world(device, (DEVICE, HOST), forms) as here:
        ReferencePageCopier(here.pairs(on_cpu=True)).copy([id_pairs(kept, 2)])
        with Bytes(DEVICE, ids, device) as named, CudaPageCopier(device, here.pairs(on_cpu=False)) as copier:
            copier.copy([id_pairs(named, 5)], stream=stream)
            with pytest.raises(PageOutOfBoundsError, match=r"^6 times a page copy"):
                copier.check()
        here.compare()


def test_a_group_is_done_before_the_copy_is(device: int, stream: int):
    """Another stream waits for the first layer only: it is early, and the bytes are there."""
    layers, pages = (3, 16) if SMALL else (21, 300)
    form = Form(layers, pages, C4_BYTES)
    first_bytes = pages * C4_BYTES
    with (
        world(device, (DEVICE, HOST), (form, form)) as here,
        Bytes(DEVICE, np.zeros(first_bytes, dtype=np.uint8), device) as seen,
        Bytes(DEVICE, here.ids(pages, seed=9), device) as named,
        CudaPageCopier(device, here.pairs(on_cpu=False), signals=True) as copier,
        runtime.Stream.create(device) as other,
    ):
        early = runtime.Event.create(device)
        main = runtime.Stream.of(device, stream)
        ids = named.read().view(np.int32).reshape(2, pages)
        for turn in range(3):
            content = random_bytes(form.total_bytes, 100 + turn)
            here.memory[0].write(content)
            copier.copy([id_pairs(named, pages)], stream=stream)
            copier.wait_group(0, stream=other.handle)
            runtime.copy(
                seen.address,
                here.memory[1].address + form.offset(0, 0),
                first_bytes,
                device=device,
                stream=other.handle,
            )
            early.record(other.handle)
            deadline = time.monotonic() + 10
            while not early.reached():
                assert time.monotonic() < deadline, "the stream that waits for a group still waits"
            was_busy = not main.idle()
            source = np.array([form.offset(0, page) for page in ids[0]])
            expected = np.empty((pages, C4_BYTES), dtype=np.uint8)
            expected[ids[1]] = content[source[:, np.newaxis] + np.arange(C4_BYTES)]
            assert np.array_equal(seen.read().reshape(pages, C4_BYTES), expected)
            assert was_busy or SMALL
        early.close()


def test_a_copy_of_nothing_keeps_nobody_waiting(device: int, stream: int):
    form = Form(3, 4, C128_BYTES)
    with (
        world(device, (DEVICE, HOST), (form, form)) as here,
        CudaPageCopier(device, here.pairs(on_cpu=False, tables=(0, 1, 0)), signals=True) as copier,
        Bytes(DEVICE, here.ids(4, seed=1), device) as named,
        runtime.Stream.create(device) as other,
    ):
        for count in (0, 3, 0):
            copier.copy([id_pairs(named, 0), IdPairs(named.address, named.address + 16, count)], stream=stream)
            for group in copier.groups:
                copier.wait_group(group, stream=other.handle)
            deadline = time.monotonic() + 10
            while not other.idle():
                assert time.monotonic() < deadline, "a stream waits for a group without pages"


def test_the_second_device_is_a_destination(device: int, second_device: int, stream: int):
    runtime.reach(device, second_device)
    form = Form(2, 30, C4_BYTES)
    plain = [random_bytes(form.total_bytes, seed) for seed in range(2)]
    with Bytes(DEVICE, plain[0], device) as source, Bytes(DEVICE, plain[1], second_device) as target:
        here = World(device, (form, form), (source, target), (plain[0], plain[1]))
        ids = here.ids(20, seed=1)
        ReferencePageCopier(here.pairs(on_cpu=True)).copy([id_pairs(ids, 20)])
        with Bytes(DEVICE, ids, device) as named, CudaPageCopier(device, here.pairs(on_cpu=False)) as copier:
            copier.copy([id_pairs(named, 20)], stream=stream)
            copier.check()
        here.compare()


def test_what_cannot_be_is_refused(device: int, stream: int):
    form = Form(1, 4, C128_BYTES)
    unregistered = random_bytes(form.total_bytes + 16, 0)
    base = -(-unregistered.ctypes.data // 16) * 16
    with Bytes(DEVICE, np.zeros(form.total_bytes, dtype=np.uint8), device) as target:
        to = form.memory(target.address, 0)
        with pytest.raises(RegistrationError, match="neither device memory nor host memory that is registered"):
            CudaPageCopier(device, [PagePair(form.memory(base, 0), to, C128_BYTES)])
        with (
            CudaPageCopier(device, [PagePair(to, to, C128_BYTES)]) as copier,
            pytest.raises(UnsupportedError, match="built without signals"),
        ):
            copier.wait_group(0, stream=stream)


def test_many_pairs_fit(device: int, stream: int):
    """More descriptions than 48 KiB of shared memory hold."""
    form = Form(1, 3, 64)
    plain = [random_bytes(form.total_bytes, seed) for seed in range(2)]
    with Bytes(DEVICE, plain[0], device) as source, Bytes(HOST, plain[1], device) as target:
        ids = np.array([[0, 1, 2], [2, 0, 1]], dtype=np.int32)
        for bases, on_cpu in (([each.ctypes.data for each in plain], True), ([source.address, target.address], False)):
            sides = [PageMemory.contiguous(base + 48, page_count=3, page_stride_bytes=64) for base in bases]
            pairs = [PagePair(sides[0], sides[1], 64, group=group) for group in range(700)]
            if on_cpu:
                ReferencePageCopier(pairs).copy([id_pairs(ids, 3)])
                continue
            with Bytes(DEVICE, ids, device) as named, CudaPageCopier(device, pairs, signals=True) as copier:
                copier.copy([id_pairs(named, 3)], stream=stream)
                copier.check()
        assert np.array_equal(target.read(), plain[1])
