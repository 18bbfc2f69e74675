"""Streams on which one device copies, each in one way.

Four streams a device (engines and kernel, over the host link and between devices), so that what goes over NVLink does
not wait for what goes over PCIe. How much may be on a stream is bounded, which bounds how long an aborted transfer takes
to become quiet, how long a short transfer waits behind long ones, and what still arrives from a process that was killed.
"""

from __future__ import annotations

from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.stretch_copies import StretchCopier
from kvbridge.transport.local.ways import Route, Way

STREAM_SLICES = 4
"""Slices on a stream at a time, over all transfers: half a GiB at the default size, 10 ms over a PCIe 5 link."""

SLICE_OPERATIONS = {Way.ENGINES: 128, Way.KERNEL: 8192}
"""The engines' queue holds about a thousand copies, and a call waits when it is full."""

FIRST_OPERATIONS = {Way.ENGINES: 16, Way.KERNEL: 256}
"""Of a transfer: few, so that the device begins at once and copies these while it is given the next ones."""


class CopyStream:
    """Copies slices one after another, without the caller's waiting for them."""

    def __init__(self, route: Route, *, kernel_blocks: int) -> None:
        """`kernel_blocks`: for copies to and from the host; between devices every multiprocessor works.

        Raises UnsupportedError or KernelBuildError when the device cannot copy this way.
        """
        self.slice_operations = SLICE_OPERATIONS[route.way]
        """The most that one slice may hold, so that starting it takes a fraction of a millisecond."""
        self.first_operations = FIRST_OPERATIONS[route.way]
        """The most that a transfer's first slice may hold."""
        self._route = route
        self._stream = runtime.Stream.create(route.device)
        self._free: list[runtime.Event] = []
        self._kernel: StretchCopier | None = None
        if route.way is Way.KERNEL:
            all_blocks = runtime.device_facts(route.device).multiprocessors
            self._kernel = StretchCopier(route.device, blocks=kernel_blocks if route.over_host_link else all_blocks)
            self._kernel.reserve(self.slice_operations, STREAM_SLICES)  # later it would stop an engine of this process

    def start(self, operations: Operations) -> None:
        """Give operations to the device. After an error some of them may be on their way."""
        if self._kernel is not None:
            self._kernel.submit(operations, stream=self._stream.handle)
            return
        runtime.copy_batch(
            operations.destination.tolist(),
            operations.source.tolist(),
            operations.length.tolist(),
            device=self._route.device,
            stream=self._stream.handle,
        )

    def mark(self) -> runtime.Event:
        """Mark the present end of the stream."""
        event = self._free.pop() if self._free else runtime.Event.create(self._route.device)
        event.record(self._stream.handle)
        return event

    def release(self, mark: runtime.Event) -> None:
        """Return a mark that was reached."""
        self._free.append(mark)

    def close(self) -> None:
        """Give everything up. Nothing is on its way."""
        for event in self._free:
            event.close()
        self._free.clear()
        if self._kernel is not None:
            self._kernel.close()
        self._stream.close()
