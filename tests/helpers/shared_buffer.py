"""Shared memory behind a file, as a numpy array, and as the `Extent` that a transport registers.

Two processes that open the same file see the same bytes, so a test can look into a peer that is
stopped.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbridge.core.wire.shared_memory import FileOrigin
from kvbridge.pool.memory.extent import Extent


class SharedBuffer:
    """`length_bytes` of `path`, mapped; created (zeroed) unless it exists. `bytes` is a uint8 array over it."""

    def __init__(self, path: Path, length_bytes: int) -> None:
        self.path = path
        mode = "r+b" if path.exists() else "w+b"
        with path.open(mode) as file:
            if mode == "w+b":
                file.truncate(length_bytes)
            self._mapping = mmap.mmap(file.fileno(), length_bytes)
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.length_bytes = length_bytes

    def memory(self, offset_bytes: int = 0, length_bytes: int | None = None) -> Extent:
        """Part of the buffer (all of it by default) as something to register."""
        length = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        return Extent(
            address=self.address + offset_bytes,
            length_bytes=length,
            origin=FileOrigin(path=str(self.path)),
            offset_bytes=offset_bytes,
            label=self.path.name,
        )

    def read(self, offset: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a view of some bytes: it changes with them."""
        return self.bytes[offset : self.length_bytes if length is None else offset + length]

    def write(self, content: npt.NDArray[np.uint8], offset: int = 0) -> None:
        """Replace some bytes."""
        self.bytes[offset : offset + content.nbytes] = content

    def fill(self, value: int, offset: int = 0, length: int | None = None) -> None:
        """Set every byte of a part."""
        self.read(offset, length)[:] = value

    def close(self) -> None:
        """Does nothing: the mapping goes with the last view of it."""
