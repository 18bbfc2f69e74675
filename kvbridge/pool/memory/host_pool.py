"""The host pool of a node: one set of shared files that every rank worker registers and every engine rank maps.

Owns: the name of that kind of pool. Must not know: which pages are free, layouts, transports.
"""

from __future__ import annotations

from typing import ClassVar

from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.mapped_pool import MappedPool


class HostPool(MappedPool):
    """Components that decode keeps in host memory. The node process creates it, others map it."""

    spaces: ClassVar[frozenset[IndexSpace]] = frozenset({IndexSpace.HOST})
