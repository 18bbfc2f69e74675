"""The bare kernels: what the benchmarks compare kvbridge's kernels with.

They are compiled by the same means as the product's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kvbridge.kernels.cuda.programs import Kernel, Source, kernel

GATHER_SHAPES = ((132, 256), (132, 1024))
"""Blocks and threads of the gather; the better of the two is quoted."""


@dataclass(frozen=True)
class BenchSource(Source):
    """A source that lies beside this file."""

    def text(self) -> str:
        """The source; it includes nothing."""
        return (Path(__file__).parent / f"{self.name}.cu").read_text()


SOURCE = BenchSource("bare_kernels")


@cache
def _kernel(name: str, device: int) -> Kernel:
    return kernel(SOURCE, name, device)


@dataclass(frozen=True)
class Gather:
    """C4 rows from one memory to another: addresses of int32 row numbers (page * 64 + slot) and of the first pages."""

    source_rows: int
    target_rows: int
    count: int
    source: int
    target: int
    page_bytes: int

    def launch(self, device: int, stream: int, shape: tuple[int, int]) -> None:
        """Gather once; `shape` is blocks and threads."""
        arguments = (
            self.source_rows,
            self.target_rows,
            np.int32(self.count),
            self.source,
            self.target,
            self.page_bytes,
        )
        _kernel("bare_gather", device).launch(arguments, grid=shape[0], block=shape[1], stream=stream)
