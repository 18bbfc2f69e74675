"""The pool of one rank's device, when that device is the CPU.

Owns: the name of that kind of pool. Must not know: which pages are free, layouts, transports.
"""

from __future__ import annotations

from typing import ClassVar

from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.mapped_pool import MappedPool


class DevicePool(MappedPool):
    """Components on the device of one rank. One process creates it, others map it."""

    spaces: ClassVar[frozenset[IndexSpace]] = frozenset(IndexSpace) - {IndexSpace.HOST}
