"""Sparse decode: the full C4 cache stays in host memory, and a small hot buffer of each request on the device."""

from kvbridge.core.process import NEEDS_TORCH

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(NEEDS_TORCH, name="torch") from missing

from kvbridge.core.geometry.costs import SparseBytes, SparseSettings
from kvbridge.core.wire.engine_messages import SparseRows
from kvbridge.sparse.cache import ReleasedRequest, RequestCounts, SparseCache

__all__ = [
    "ReleasedRequest",
    "RequestCounts",
    "SparseBytes",
    "SparseCache",
    "SparseRows",
    "SparseSettings",
]
