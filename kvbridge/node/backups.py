"""Copies of cached pages to host memory: orders to the rank workers of a node, one at a time, and their answers.

An order is done when every rank has proved its copy. When a rank fails, ends, or says nothing within `timeouts.copy_s`, the host
pages that were reserved for the order go back, and nothing else changes: the pages are on the device as before. Host pages that a
rank may still write are quarantined until it has answered or its process has ended; until then no order begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvbridge.core.errors import DeadlineError
from kvbridge.core.geometry.tiers import copy_space
from kvbridge.core.ids import IndexSpace, PageIdArray, PageTable, Rank
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import CopyPages, PageMove, PagesCopied
from kvbridge.node.rooms import WORKER_GONE
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook
from kvbridge.telemetry.facts import CopyEnded, EventStream
from kvbridge.tier.host_copies import Backup, BackupController


@dataclass(eq=False)
class _Order:
    number: int
    backups: list[Backup]
    owing: set[Rank]
    """Ranks that have not answered."""
    begun_s: float
    writing: set[Rank] = field(default_factory=set)
    """Ranks that may still write, although nobody waits for them any more."""
    bytes: int = 0
    busy_s: float = 0.0
    """Copy time of the slowest rank."""
    code: str = ""
    reason: str = ""
    is_over: bool = False
    """Whether the copies are kept or given up; while ranks are `writing`, the host pages are in quarantine."""

    def fail(self, code: str, reason: str) -> None:
        """Note the first cause."""
        if not self.code:
            self.code, self.reason = code, reason

    @property
    def pages(self) -> int:
        return sum(backup.pages for backup in self.backups)


@dataclass
class Backups:
    """Carries out the decisions of a BackupController. Called from the event loop's thread only."""

    controller: BackupController
    workers: WorkerSet
    book: PageBook
    events: EventStream
    copy_s: float
    """`timeouts.copy_s`."""
    link_share: float
    """`tier.host.backup.link_share`."""
    clock: Clock = monotonic
    _order: _Order | None = None
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _owners: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.controller.on_due = self._begin

    def new_owner(self) -> Owner:
        """Return an owner for the pages of one copy between tiers; each is new on this node."""
        return Owner(NO_ROOM, next(self._owners))

    @property
    def pages_in_flight(self) -> int:
        """Count the pages that rank workers are copying."""
        return 0 if self._order is None or self._order.is_over else self._order.pages

    def tick(self) -> None:
        """Give up an order that takes too long, and begin the next one when there is something to copy."""
        order = self._order
        if order is not None and not order.is_over and order.begun_s + self.copy_s <= self.clock():
            ranks = ", ".join(sorted(map(str, order.owing)))
            order.fail(DeadlineError.code, f"rank workers {ranks} have not copied it (limit: timeouts.copy_s)")
            order.writing |= order.owing
            order.owing.clear()
            self._settle(order)
        self._begin()

    def _begin(self) -> None:
        if self._order is not None or self.workers.missing():
            return
        number = next(self._numbers)
        backups = self.controller.begin(self.new_owner)
        if not backups:
            return
        self._order = _Order(number, backups, set(self.workers.layers), self.clock())
        order = CopyPages(order=number, moves=_merged(backups), link_share=self.link_share)
        for rank in self.workers.layers:
            self.workers.send(rank, order)

    def copied(self, message: PagesCopied) -> None:
        """Take a rank's answer to an order. An answer that nobody waits for (any more) can only end a quarantine."""
        rank, order = message.rank, self._order
        if order is None or order.number != message.order:
            return
        if rank in order.owing:
            order.owing.discard(rank)
            order.bytes += message.bytes
            order.busy_s = max(order.busy_s, message.seconds)
            if message.error_code:
                order.fail(message.error_code, f"rank worker {rank}: {message.error}")
            if not message.quiet:
                order.writing.add(rank)
        elif message.quiet:
            order.writing.discard(rank)
        self._settle(order)

    def gone(self, rank: Rank, reason: str) -> None:
        """Fail the order of a rank worker whose process has ended: it writes nothing any more."""
        order = self._order
        if order is not None and rank in order.owing | order.writing:
            order.fail(WORKER_GONE, f"rank worker {rank} died: {reason}")
            order.owing.discard(rank)
            order.writing.discard(rank)
            self._settle(order)

    def _settle(self, order: _Order) -> None:
        """End an order whose ranks have all answered or had their time; free its host pages when no rank writes them any more."""
        if order.owing:
            return
        if not order.is_over:
            self._conclude(order)
        elif not order.writing:
            for backup in order.backups:
                self.book.release_quarantined(backup.owner)
        if not order.writing:
            self._order = None
            self._begin()

    def _conclude(self, order: _Order) -> None:
        order.is_over = True
        if order.writing:
            ranks = ", ".join(sorted(map(str, order.writing)))
            why = f"rank workers {ranks} may still write to its host copies; {order.reason}"
            for backup in order.backups:
                self.book.quarantine(backup.owner, f"backup order {order.number}: {why}")
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
