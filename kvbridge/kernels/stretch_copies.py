"""Copies by address, in one launch: stretches of any length at any alignment, wherever the device reaches.

For many short stretches this is faster than the copy engines, which need about 2 us for each; for long ones it is not.
"""

from __future__ import annotations

from kvbridge.core.closing import Closing
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import programs
from kvbridge.kernels.cuda.segments import Segments, StagingPool

SEGMENT_BYTES = 4096
"""What a warp copies at once."""
THREADS = 512
DEFAULT_BLOCKS = 32
"""Enough to read host memory at the speed of the link; between devices more are faster."""


class StretchCopier(Closing):
    """Copies stretches of device memory, of host memory that is registered with CUDA, and of peers' device memory.

    Holds staging for the arrays of as many submissions as run at once (about 60 bytes an operation on either side), and reuses
    it. For one thread at a time.
    """

    def __init__(self, device: int, *, blocks: int = DEFAULT_BLOCKS) -> None:
        """`blocks`: the most blocks of 512 threads that one submission uses, unless it says otherwise."""
        self.device = device
        self._blocks = blocks
        self._kernel = programs.kernel(source(), "copy_stretches", device)
        self._staging = StagingPool(device)

    def submit(self, operations: Operations, *, stream: int, blocks: int = 0) -> None:
        """Have all bytes copied, in stream order; nothing on the host waits, and the arrays may be dropped at once.

        Addresses are those of this process, and stay valid until the copies are done: this is not checked. `stream` is not
        being captured into a graph.
        """
        if not len(operations):
            return
        segments = Segments.of(operations.destination, operations.length, SEGMENT_BYTES)
        columns = (operations.source, operations.destination, operations.length, segments.first)
        staging = self._staging.take(sum(column.nbytes for column in columns))
        addresses = staging.put(columns)
        staging.send(stream=stream)
        grid = max(1, min(blocks or self._blocks, segments.count))
        arguments = [*addresses, len(operations), segments.count]
        self._kernel.launch(arguments, grid=grid, block=THREADS, stream=stream)
        staging.record(stream)

    def reserve(self, operations: int, submissions: int) -> None:
        """Make the staging of so many submissions at once of so many operations now, so that none of them allocates."""
        self._staging.reserve(operations * (3 * 8 + 4), submissions)

    def close(self) -> None:
        """Wait for what was submitted, and give everything back. Harmless when closed."""
        self._staging.close()


def source() -> programs.Source:
    """What is compiled."""
    return programs.Source("copy_stretches", (("SEGMENT", SEGMENT_BYTES), ("THREADS", THREADS)))
