"""Engines beside daemons with a stand-in for CUDA: they look at device memory as at host memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.core.ids import MemoryKind
from kvbridge.engine import memory
from kvbridge.pool.memory.pools import MappedRegions
from tests.helpers.stand_in_cuda import cuda_stand_in

ROOT = Path(__file__).resolve().parents[2]


class SeenFromTheHost(MappedRegions):
    """Device memory that torch may treat as its own kind of memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kinds = {region.memory for region in self.regions}
        self.regions = tuple(one.model_copy(update={"memory": MemoryKind.DRAM, "device": 0}) for one in self.regions)


def prepare(replace: Callable[[object, str, object], object] = setattr) -> cuda_stand_in.Runtime:
    """Have this process use the stand-in as an engine; `replace` sets an attribute (`monkeypatch.setattr` undoes it again)."""
    torch.set_num_threads(1)  # several, on few cores, wait for one another
    replace(memory, "MappedRegions", SeenFromTheHost)
    return cuda_stand_in.install(replace)


@contextmanager
def stand_in_for_daemons() -> Iterator[None]:
    """Every daemon that is started meanwhile has the stand-in, and so have its rank workers; what the dead leave is removed."""
    folder = Path(cuda_stand_in.__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
        try:
            yield
        finally:
            cuda_stand_in.sweep()
