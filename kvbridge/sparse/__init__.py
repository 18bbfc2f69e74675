"""Sparse decode: the full C4 cache stays in host memory, and a small hot buffer of each request on the device.

Owns: which row is where, what is loaded and what is evicted. Must not know: rooms, transports, daemons; it runs in the engine's
process, on the engine's stream. torch is imported when `SparseCache` is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvbridge.core.geometry.hot_buffer import SparseBytes, SparseSettings

if TYPE_CHECKING:
    from kvbridge.sparse.cache import SparseCache
    from kvbridge.sparse.reading import RequestCounts
    from kvbridge.sparse.streams import PendingCopies

_NEED_TORCH = {"PendingCopies": "streams", "RequestCounts": "reading", "SparseCache": "cache"}
"""The module of this package that each name is taken from when it is first used."""

__all__ = ["PendingCopies", "RequestCounts", "SparseBytes", "SparseCache", "SparseSettings"]


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
