"""The base of everything that copies pages or rows.

Owns: how copiers report page ids that do not exist, and how they are closed. Must not know: what is copied, how.
"""

from __future__ import annotations

from kvbridge.core.closing import Closing
from kvbridge.kernels.cuda.buffers import CopierBuffers


class Copier(Closing):
    """Copies pages or rows. On a device it holds buffers until `close`; on the CPU nothing, and ids are checked at once."""

    _buffers: CopierBuffers | None = None

    def check(self) -> None:
        """Wait for all copies; raise PageOutOfBoundsError if any of them met an id that does not exist."""
        if self._buffers is not None:
            self._buffers.check()

    def close(self) -> None:
        """Free its buffers. Its copies have ended, and no CUDA graph that contains one is launched again. Harmless when closed."""
        if self._buffers is not None:
            self._buffers.close()
