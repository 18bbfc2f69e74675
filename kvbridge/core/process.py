"""Small needs of every process: its clock, the base of things to close, and imports at its start."""

from __future__ import annotations

import gc
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

Clock = Callable[[], float]
"""Returns the present time in seconds, on a scale that never goes back. Pure code takes a clock, which tests turn by hand."""

monotonic: Clock = time.monotonic

NEEDS_TORCH: Final = "kvbridge's library for engines needs torch; in a checkout of kvbridge: pip install '.[engine]'"
UNUSED_BY_DAEMONS = ("rich", "pygments", "trio")
"""structlog and httpx load the first two for coloured output, httpcore the third for its event loop, wherever they are
installed."""


def moment(ago_s: float = 0.0) -> float:
    """Return the wall-clock time `ago_s` ago in Unix seconds, to the millisecond, as documents for operators tell moments."""
    return round(time.time() - ago_s, 3)


class Closing(ABC):
    """Something to use in a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Let everything go. Harmless when closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import without the cycle collector, which would walk modules again and again; `unused` packages count as not installed."""
    hidden = [name for name in unused if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None there is an ImportError
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
