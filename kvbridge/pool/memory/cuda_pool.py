"""The pool of one rank's device, when that device is a GPU: allocations that the rank worker makes and exports.

Owns: those allocations. Must not know: which pages are free, layouts, transports, engines.

Freeing memory that another process still has open is undefined, so a pool is closed only when nobody else can have it open
any more. A rank worker leaves that to the end of its process, which the driver survives: it keeps such memory until the last
process that opened it has closed it, and nothing can be allocated in its place before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.device_memory import export
from kvbridge.pool.memory.extent import Progress, align_up, ignore_progress
from kvbridge.pool.memory.memory_pool import PlacedPool
from kvbridge.pool.memory.placement import Placement

SHARED_ALIGNMENT_BYTES = 2 << 20
"""Shorter allocations share a block of the driver's, and CUDA IPC would give all of that block away."""


class CudaPool(PlacedPool):
    """Components on the GPU of one rank. Made by `create`; other processes open it by `shared_regions`."""

    def __init__(self, placement: Placement, addresses: Sequence[int], stack: ExitStack) -> None:
        """Export the allocations of a placement. `stack` frees them."""
        exported = [export(placement.device, address) for address in addresses]
        for one in exported:
            stack.callback(one.forget)
        super().__init__(placement, [one.extent for one in exported])
        self._stack = stack

    @classmethod
    def create(cls, placement: Placement, *, on_progress: Progress = ignore_progress) -> Self:
        """Allocate every mapping of a placement in VRAM, zeroed.

        Raises RegistrationError with what is free when it does not fit, UnsupportedError without CUDA or without that
        device; then nothing is left.
        """
        if placement.memory is not MemoryKind.VRAM:
            raise InvalidInputError(f"a CUDA pool is made of VRAM, the placement asks for {placement.memory}")
        with ExitStack() as stack:
            addresses, device, done_bytes = [], placement.device, 0
            for mapping in placement.mappings:
                address = runtime.allocate(device, align_up(mapping.length_bytes, SHARED_ALIGNMENT_BYTES))
                stack.callback(runtime.free, device, address)
                runtime.fill(device, address, mapping.length_bytes)
                addresses.append(address)
                done_bytes += mapping.length_bytes
                on_progress(done_bytes, placement.total_bytes)
            runtime.synchronize(device)
            pool = cls(placement, addresses, stack)
            pool._stack = stack.pop_all()
            return pool

    def close(self) -> None:
        """Free it. Nobody else has it open, nothing on any device uses it. Harmless when closed."""
        self._stack.close()
