"""Backups of a node on their way: copy orders to its rank workers, and their answers.

An order is done when every rank has proved its copy. When a rank fails, ends, or says nothing within `timeouts.copy_s`, the host
pages that were reserved for the order go back, and nothing else changes: the pages are on the device as before. Host pages that a
rank may still write are quarantined until it has answered or its process has ended; until then no order begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import structlog

from kvbridge.core.errors import DeadlineError
from kvbridge.core.geometry.tiers import copy_space
from kvbridge.core.ids import IndexSpace, PageIdArray, PageTable, Rank
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import CopyPages, PageMove, PagesCopied
from kvbridge.node.rooms import WORKER_GONE
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner
from kvbridge.telemetry.facts import CopyEnded, EventStream
from kvbridge.tier.host_copies import Backup, BackupController

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Order:
    number: int
    backups: list[Backup]
    owing: set[Rank]
    """Ranks that have not answered."""
    begun_s: float
    until_s: float
    writing: set[Rank] = field(default_factory=set)
    """Ranks that may still write, although nobody waits for them any more."""
    bytes: int = 0
    busy_s: float = 0.0
    """Copy time of the slowest rank."""
    code: str = ""
    reason: str = ""

    def fail(self, code: str, reason: str) -> None:
        """Note the first cause."""
        if not self.code:
            self.code, self.reason = code, reason

    @property
    def pages(self) -> int:
        return sum(backup.pages for backup in self.backups)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """The limits of an order: `timeouts.copy_s` and `tier.host.backup.link_share`."""

    copy_s: float
    link_share: float


@dataclass
class Backups:
    """Carries out the decisions of a BackupController. Called from the event loop's thread only."""

    controller: BackupController
    workers: WorkerSet
    book: PageBook
    events: EventStream
    limits: CopyLimits
    clock: Clock = monotonic
    _order: _Order | None = None
    _late: dict[int, _Order] = field(default_factory=dict)
    """Failed orders that a rank may still be carrying out."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _owners: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.controller.on_due = self._begin

    def new_owner(self) -> Owner:
        """Return an owner for the pages of one copy between tiers; each is new on this node."""
        return Owner(NO_ROOM, next(self._owners))

    def tick(self) -> None:
        """Give up an order that takes too long, and begin the next one when there is something to copy."""
        order = self._order
        if order is not None and order.until_s <= self.clock():
            ranks = ", ".join(sorted(map(str, order.owing)))
            order.fail(DeadlineError.code, f"rank workers {ranks} have not copied it (limit: timeouts.copy_s)")
            order.writing |= order.owing
            order.owing.clear()
            self._conclude(order)
        self._begin()

    def _begin(self) -> None:
        if self._order is not None or self._late or self.workers.missing():
            return
        number = next(self._numbers)
        backups = self.controller.begin(self.new_owner)
        if not backups:
            return
        now_s = self.clock()
        self._order = _Order(number, backups, set(self.workers.layers), now_s, now_s + self.limits.copy_s)
        order = CopyPages(order=number, moves=_merged(backups), link_share=self.limits.link_share)
        for rank in self.workers.layers:
            self.workers.send(rank, order)

    def copied(self, message: PagesCopied) -> None:
        """Take a rank's answer to an order. An answer that nobody waits for (any more) can only end a quarantine."""
        rank, order = message.rank, self._order
        if order is None or order.number != message.order or rank not in order.owing:
            if message.quiet:
                self._quiet(rank, message.order)
            return
        order.owing.discard(rank)
        order.bytes += message.bytes
        order.busy_s = max(order.busy_s, message.seconds)
        if message.error_code:
            order.fail(message.error_code, f"rank worker {rank}: {message.error}")
        if not message.quiet:
            order.writing.add(rank)
        self._settle(order)

    def gone(self, rank: Rank, reason: str) -> None:
        """Fail the order of a rank worker whose process has ended: it writes nothing any more."""
        order = self._order
        if order is not None and rank in order.owing | order.writing:
            order.fail(WORKER_GONE, f"rank worker {rank} died: {reason}")
            order.owing.discard(rank)
            order.writing.discard(rank)
            self._settle(order)
        for number in list(self._late):
            self._quiet(rank, number)

    def _settle(self, order: _Order) -> None:
        if not order.owing:
            self._conclude(order)
            self._begin()

    def _quiet(self, rank: Rank, number: int) -> None:
        """Note that a rank writes no more for a failed order: when no rank does, the order's host pages are free."""
        if self._order is not None and self._order.number == number:
            self._order.writing.discard(rank)
        late = self._late.get(number)
        if late is None:
            return
        late.writing.discard(rank)
        if not late.writing:
            del self._late[number]
            for backup in late.backups:
                self.book.release_quarantined(backup.owner)

    def _conclude(self, order: _Order) -> None:
        """End an order whose ranks have all answered, or had their time."""
        self._order = None
        if order.writing:
            ranks = ", ".join(sorted(map(str, order.writing)))
            why = (
                f"backup order {order.number}: rank workers {ranks} may still write to its host copies; {order.reason}"
            )
            self._late[order.number] = order
            for backup in order.backups:
                self.book.quarantine(backup.owner, why)
        self.controller.ended(order.backups, done=not order.code)
        self.events.emit(
            CopyEnded(
                direction="backup",
                pages=order.pages,
                bytes=order.bytes,
                busy_s=order.busy_s,
                seconds=self.clock() - order.begun_s,
                code=order.code,
                reason=order.reason,
            )
        )

    @property
    def pages_in_flight(self) -> int:
        """Count the pages that rank workers are copying."""
        return 0 if self._order is None else self._order.pages


def _merged(backups: Sequence[Backup]) -> tuple[PageMove, ...]:
    """Return the moves of several backups as one."""
    pages: dict[IndexSpace, list[tuple[PageIdArray, PageIdArray]]] = {}
    for backup in backups:
        for space, both in backup.moves.items():
            pages.setdefault(space, []).append(both)
    moves = []
    for space, parts in pages.items():
        device, copies = (np.concatenate(ids) for ids in zip(*parts, strict=True))
        [on_device] = to_wire({space: PageTable(space, device)})
        [on_host] = to_wire({space: PageTable(copy_space(space), copies)})
        moves.append(PageMove(device=on_device, twins=on_host))
    return tuple(moves)
