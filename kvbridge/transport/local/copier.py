"""What a local transport has the processor do: copies, and entering fresh mappings in this process's page table."""

from __future__ import annotations

import ctypes
import functools
import weakref

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.reference import copy_operations
from kvbridge.transport.pump import PumpedTransfer
from kvbridge.transport.windowed import DONE, Check, Window, WindowedTransfer, WindowLimits

SLICE_OPERATIONS = 4096
"""Bounds a slice of very short operations to about a millisecond as well."""
POPULATE_STEP_BYTES = 16 << 20
MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Copies:
    """Copies one slice a call, which is done when the call returns."""

    def __init__(self, operations: Operations, keep_alive: object) -> None:
        self._operations = operations
        self._keep_alive = keep_alive

    def start(self, first: int, stop: int) -> None:
        part = self._operations[first:stop]
        copy_operations(part.source, part.destination, part.length)

    def check(self, _: None) -> Check:
        return DONE


def copy_transfer(
    operations: Operations,
    *,
    peer: str,
    deadline_s: float,
    slice_bytes: int,
    keep_alive: object = None,
    clock: Clock = monotonic,
) -> PumpedTransfer:
    """Return a transfer between addresses of this process; `keep_alive` keeps them mapped, and is dropped at the end."""
    limits = WindowLimits(
        SLICE_OPERATIONS, slice_bytes, 1.0, SLICE_OPERATIONS, slice_bytes
    )  # nothing is ever in flight
    window = Window(limits)  # of its own: a small transfer never waits for a large one
    copies = _Copies(operations, keep_alive)
    make = functools.partial(
        WindowedTransfer, operations, copies, window, peer=peer, deadline_s=deadline_s, clock=clock
    )
    return PumpedTransfer(make)


class Populating:
    """Enters the pages of a fresh mapping into this process's page table, a step a call, until nobody keeps them mapped.

    The first write through a mapping is otherwise three times slower than later ones. For memory that exists already: pages that
    do not would be allocated.
    """

    def __init__(self, address: int, length_bytes: int, keep_alive: object) -> None:
        self._address = address
        self._left_bytes = length_bytes
        self._kept = weakref.ref(keep_alive)

    def __call__(self) -> bool:
        """Do one step; whether there are more."""
        kept = self._kept()  # and held while the kernel is at it
        if kept is None:
            return False
        step = min(self._left_bytes, POPULATE_STEP_BYTES)
        answer = _libc.madvise(self._address, step, MADV_POPULATE_WRITE)
        self._address += step
        self._left_bytes -= step
        return answer == 0 and self._left_bytes > 0  # an older kernel knows no such advice; then first writes are slow
