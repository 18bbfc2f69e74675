"""The base of everything that copies pages or rows on a device.

Owns: how copiers report page ids that do not exist, and how they are closed. Must not know: what is copied, how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Copier(ABC):
    """Copies pages or rows, and holds buffers on a device until `close`; as a context manager it closes itself."""

    @abstractmethod
    def check(self) -> None:
        """Wait for all copies; raise PageOutOfBoundsError if any of them met an id that does not exist."""

    @abstractmethod
    def close(self) -> None:
        """Free its buffers. Its copies have ended, and no CUDA graph that contains one is launched again. Harmless when closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
