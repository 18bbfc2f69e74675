"""Copies between the device and host memory, as a fact, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from kvbridge.telemetry.events import Fact
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import DIRECTIONS, DONE, TIER_COPIED, TIER_COPIES, TIER_COPY_SECONDS
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.stream import Reader

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnded(Fact):
    """An order to copy cached pages has ended; `direction` is `backup` or `load_back`."""

    direction: str
    pages: int
    """Of prompts and answers; one is a page of each space that grows with the tokens."""
    bytes: int
    """What was copied, over all ranks of this node, also when it has failed."""
    busy_s: float
    """While the slowest rank was copying."""
    seconds: float
    """From the order to its end."""
    code: str = ""
    """Why it has failed; empty when it has not."""
    reason: str = ""


@dataclass
class CopySums:
    """What was copied in one direction since the daemon was started."""

    pages: int = 0
    """That arrived."""
    bytes: int = 0
    failed: int = 0
    """Orders."""
    last_failure: str = ""
    longest_s: float = 0.0
    """From an order to its end, of the slowest one."""


class HostTierReader:
    """Counts copies, keeps sums for `/status`, and writes a line for each that has failed, a few a second."""

    def __init__(self, metrics: Metrics, seldom: Seldom) -> None:
        self._metrics = metrics
        self._seldom = seldom
        self.sums = {direction: CopySums() for direction in DIRECTIONS}
        self.table: Reader = {CopyEnded: self._ended}

    def _ended(self, _now_s: float, fact: CopyEnded) -> None:
        way, sums = fact.direction, self.sums[fact.direction]
        self._metrics.count(TIER_COPIES, way, fact.code or DONE)
        self._metrics.count(TIER_COPIED, way, by=fact.bytes)
        self._metrics.count(TIER_COPY_SECONDS, way, by=fact.busy_s)
        sums.bytes += fact.bytes
        sums.longest_s = max(sums.longest_s, fact.seconds)
        if not fact.code:
            sums.pages += fact.pages
            log.debug("pages_copied", direction=way, pages=fact.pages, bytes=fact.bytes, seconds=round(fact.seconds, 4))
            return
        sums.failed += 1
        sums.last_failure = fact.reason
        if self._seldom.admits("pages_not_copied", fact.code):
            log.warning("pages_not_copied", direction=way, pages=fact.pages, code=fact.code, reason=fact.reason)
