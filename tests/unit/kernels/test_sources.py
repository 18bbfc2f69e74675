"""Every kernel compiles, without a GPU, for the architecture that it was written for."""

from __future__ import annotations

import importlib
from importlib import resources

import pytest

from kvbridge.kernels import digest_device, page_copies, row_copies, stretch_copies
from kvbridge.kernels.cuda.programs import KernelBuildError, Source, compile_for
from kvbridge.kernels.places import PageMemory, RowPair

ALONE = sorted(
    item.name.removesuffix(".cu")
    for item in resources.files("kvbridge.kernels").joinpath("csrc").iterdir()
    if item.name.endswith(".cu")
)
C4_PAGES = PageMemory.contiguous(4096, page_count=2, page_stride_bytes=37_440)
DENSE_ROWS = PageMemory.contiguous(4096, page_count=2, page_stride_bytes=584)
AS_USED = [
    page_copies.source(),
    row_copies.source([RowPair(C4_PAGES, C4_PAGES, (576, 8), 64, 64)]),
    row_copies.source([RowPair(DENSE_ROWS, C4_PAGES, (576, 8), 1, 64)]),
    stretch_copies.source(),
    digest_device.source(),
]


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    for package in ("cuda.core", "cuda.bindings.nvrtc"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            pytest.skip(f"no compiler for kernels: {error}")


@pytest.mark.parametrize("name", ALONE)
def test_compiles_with_the_sizes_of_its_own(name: str):
    assert compile_for(Source(name), "sm_90a").startswith(b"\x7fELF")


@pytest.mark.parametrize("source", AS_USED, ids=lambda source: source.name)
def test_compiles_with_the_sizes_that_are_used(source: Source):
    assert compile_for(source, "sm_90a").startswith(b"\x7fELF")
    assert source.name in ALONE


def test_a_mistake_is_told_with_the_kernels_name():
    with pytest.raises(KernelBuildError, match="kernel copy_pages cannot be compiled"):
        compile_for(Source("copy_pages", (("LOADS", 0), ("MOST_TABLES", 3))), "sm_90a")
