"""Copies of a rank worker's GPU that wait in their stream at a gate, so that a test strikes with a transfer in its midst."""

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.transport.local.gpu import CopyStream

OPEN = 0x7FFF_0000
"""More slices than any test has copied."""
LOOK_AGAIN_S = 0.005


class Gate:
    """How many slices may pass, counted over the worker's life, and how many have come to the gate."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """`path`: in shared memory, since CUDA locks pages of no other files."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        if create:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        self._numbers = (ctypes.c_uint32 * 2).from_buffer(self._memory)
        if create:
            self.open()

    @property
    def address(self) -> int:
        """The address of the number of slices that may pass: uint32, at the beginning of a page of memory."""
        return ctypes.addressof(self._numbers)

    @property
    def passing(self) -> int:
        return int(self._numbers[0])

    @property
    def come(self) -> int:
        """How many have been started, whether they may pass or not."""
        return int(self._numbers[1])

    def arrive(self) -> int:
        """One more has come; returns its number, from 1 on."""
        self._numbers[1] += 1
        return int(self._numbers[1])

    def restart(self) -> None:
        """Another worker counts from the beginning."""
        self._numbers[1] = 0

    def close_behind(self, slices: int) -> int:
        """Let so many more pass; returns the number of the first one that does not."""
        self._numbers[0] = self.come + slices
        return self.passing + 1

    def open(self) -> None:
        self._numbers[0] = OPEN


def install(path: str) -> None:
    gate, start, registered = Gate(Path(path)), CopyStream.start, set[int]()
    gate.restart()
    stands_in = type(runtime.library()).__module__.endswith("cuda_stand_in")

    def gated(stream: Any, operations: Operations) -> None:
        number, device = gate.arrive(), stream._route.device
        if stands_in:
            while gate.passing < number:
                time.sleep(LOOK_AGAIN_S)
        else:
            from tests.helpers.gpu import wait_value

            if not registered:
                runtime.register_host(gate.address, mmap.PAGESIZE, device=device, label="the gate of a test")
                registered.add(device)
            wait_value(device, gate.address, number, stream._stream.handle)
        start(stream, operations)

    CopyStream.start = gated  # type: ignore[method-assign]
