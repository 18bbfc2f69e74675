"""Imports at the start of a process, and those of optional dependencies."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NEEDS_TORCH: Final = "kvbridge's library for engines needs torch; in a checkout of kvbridge: pip install '.[engine]'"
UNUSED_BY_DAEMONS = ("rich", "pygments", "trio")
"""structlog and httpx load two of them for coloured output, httpcore the third for its event loop, wherever they are installed."""


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import without the cycle collector, which would walk again and again through modules that stay.

    Packages in `unused` are treated as not installed meanwhile.
    """
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
