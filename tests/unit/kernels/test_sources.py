"""Every kernel compiles, without a GPU, for the architecture that it was written for."""

import importlib
from importlib import resources

import pytest

from kvbridge.kernels import copies, digest, swap_in
from kvbridge.kernels.cuda.programs import Source, compile_for
from kvbridge.kernels.swap_in import SwapInShape

ALONE = sorted(
    item.name.removesuffix(".cu")
    for item in resources.files("kvbridge.kernels").joinpath("csrc").iterdir()
    if item.name.endswith(".cu")
)
AS_USED = [
    copies.source(),
    digest.source(),
    *(
        swap_in.source(SwapInShape(hot_rows=hot, ring_rows=128, max_rows=rows, top_k=top_k), form)
        for hot, rows, top_k in ((1024, 32_768, 512), (4096, 32_768, 1024), (4096, 262_144, 2048))
        for form in (swap_in.SMALL_BATCH, swap_in.LARGE_BATCH)
    ),
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
