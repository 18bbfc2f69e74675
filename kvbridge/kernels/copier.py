"""What copiers of pages and of rows have in common: they hold something on a device, and may have met ids that do not exist.

Owns: that part of their interface. Must not know: what is copied, how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Copier(ABC):
    """Something that copies and is closed. As a context it closes itself."""

    @abstractmethod
    def check(self) -> None:
        """Wait for all copies; raise PageOutOfBoundsError if any of them met an id that does not exist."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; its copies have ended, and no graph with one is launched again. Harmless when closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
