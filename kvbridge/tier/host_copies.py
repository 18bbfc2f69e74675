"""The host copies of prefixes: backups of what is on the device, pages that come from elsewhere, and who reads them there.

A page is on the host once its copy is proved done. Until then its host page is leased to the backup, like any page that a transfer
writes, and the copied pages are pinned. A backup that fails frees its own pages and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError, CapacityError, IntegrityError, NotFoundError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves, Pages
from kvbridge.core.process import Clock
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner, PageState
from kvbridge.tier.index import CHECKPOINT_SPACE, PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.readers import Reader, without_empty
from kvbridge.tier.records import RecordArray, join
from kvbridge.tier.residence import Inserted, Residence

log = structlog.get_logger(__name__)

CHECKPOINT_COPIES = HOST_COPIES[CHECKPOINT_SPACE]


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """One copy from the device to the host that is under way."""

    owner: Owner
    """Has the host pages until the backup ends."""
    moves: PageMoves
    """The pages to copy: nothing writes them, and they stay where they are."""
    start: int
    """The first record of its path that is copied; of those before, checkpoints may be."""
    reader: Reader
    checkpoints: dict[int, PageIdArray]
    """By record, the host pages of its checkpoint."""

    @property
    def records(self) -> RecordArray:
        """The records whose pages are copied."""
        return self.reader.path[self.start :]

    @property
    def pages(self) -> int:
        """Number of pages of prompts."""
        return len(self.records)


@dataclass(frozen=True, slots=True, eq=False)
class PinnedCopies:
    """Pages of a prompt on the host, from its first one on, that stay where they are until `HostCopies.unpin`."""

    reader: Reader
    pages: Pages
    checkpoints: Mapping[int, PageIdArray]
    """By the number of pages at whose end they are."""

    def __len__(self) -> int:
        return len(self.reader.path)


class CopyWatcher(Protocol):
    """Hears what the host has in the middle of the call that changes it; it calls nothing back."""

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """The pages of `keys[start:]` are on the host from now on: these host copies, and the pages of the home."""

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """The windows and states at the end of the page of this key are on the host from now on."""

    def removed(self, pages: Pages) -> None:
        """Nobody finds these host copies any more, and their pages will be used again; this may be said twice."""


class HostCopies:
    """The host's side of a prefix cache. Not thread-safe: only the one deciding thread uses it."""

    def __init__(
        self, book: PageBook, index: PrefixIndex, host: Residence, clock: Clock, *, end: Callable[[Reader], None]
    ) -> None:
        """`end`: is given every reader whose reading is over."""
        self._book, self.index, self._host, self._clock, self._end = book, index, host, clock, end
        self._page_counts = {space: sum(states.values()) for space, states in book.counts().items()}
        self._is_copied = np.zeros(index.capacity, dtype=np.bool_)
        """True for records that a backup under way copies."""
        self.backups: dict[Owner, Backup] = {}
        """The backups that are under way."""
        self._pinned: set[PinnedCopies] = set()
        self._watchers: list[CopyWatcher] = []

    def watch(self, watcher: CopyWatcher) -> None:
        """Tell `watcher` from now on."""
        self._watchers.append(watcher)

    @property
    def readers(self) -> list[Reader]:
        """The readers of all backups, and of all that is pinned here."""
        return [backup.reader for backup in self.backups.values()] + [pinned.reader for pinned in self._pinned]

    def cold(self, count: int) -> list[Keys]:
        """Return up to so many prompts that nobody reads and that end on the device only, the next to be evicted first."""
        leaves, records = self.index.device.leaves(), self.index.records
        kept = self._host.has(leaves) | self._is_copied[leaves] | records.is_hidden(leaves)
        return [records.keys(records.path(record)) for record in leaves[~kept][:count].tolist()]

    def pin(self, keys: Keys) -> PinnedCopies:
        """Keep what is on the host of a prompt there, so that somebody can read it: host copies, pages of the home, checkpoints."""
        path = self.index.match(keys)
        path = path[: self._host.depth(path)]
        ends = {at + 1: int(path[at]) for at in np.flatnonzero(self._host.checkpointed(path)).tolist()}
        checkpoints = {page_count: self._host.checkpoints.pages(record) for page_count, record in ends.items()}
        reader = Reader(path, 0, len(path), tuple((self._host, record) for record in ends.values()))
        pinned = PinnedCopies(reader, self._host.pages(path) | self.index.home_pages(path), checkpoints)
        reader.pin(self.index)
        self._pinned.add(pinned)
        return pinned

    def unpin(self, pinned: PinnedCopies) -> None:
        """End what `pin` began; harmless when it has been ended."""
        if pinned in self._pinned:
            self._pinned.remove(pinned)
            self._end(pinned.reader)

    # ------------------------------------------------------------------------------------- backups

    def start_backup(self, owner: Owner, keys: Keys, *, at_most: int, min_uses: int = 0) -> Backup | None:
        """Begin to copy what of a prompt is on the device and not on the host, parents first: at most so many pages.

        `min_uses`: only pages that were used so often, their arrival included. Checkpoints on the way come along, where there are
        host pages for them. `owner` is new, and has the host pages, leased, until `end_backup`. Returns None when there is nothing
        to copy, or only pages behind those of another backup. Raises CapacityError, and nothing has changed, when there are no host
        pages for it; ConflictError when the owner has pages.
        """
        path = self.index.match(keys)
        path = path[: self.index.device.depth(path)]
        stops = np.flatnonzero(self._is_copied[path] | (self.index.uses(path) < min_uses))
        path = path[: stops[0]] if len(stops) else path
        start = self._host.depth(path)
        path = path[: start + min(at_most, *(self._page_counts[space] for space in self._host.spaces))]
        lacking = self._lacking_checkpoints(path)
        path = path if len(path) > start else path[: max(lacking, default=-1) + 1]
        if not len(path):
            return None
        start, ends = min(start, len(path)), [int(path[at]) for at in lacking]
        try:
            return self._start(owner, path, start, ends)
        except CapacityError as error:
            if start == len(path) or error.lacking.keys() != {CHECKPOINT_COPIES}:
                raise
            return self._start(owner, path, start, [])  # checkpoints are no reason for pages to stay behind

    def _start(self, owner: Owner, path: RecordArray, start: int, ends: list[int]) -> Backup:
        device = self.index.device
        checkpoints = [device.checkpoints.pages(record) for record in ends]
        sources = without_empty(device.pages(path[start:]) | {CHECKPOINT_SPACE: join(checkpoints)})
        reader = Reader(path, len(path), start, tuple((device, record) for record in ends))
        reader.pin(self.index)
        try:
            demand = {HOST_COPIES[space]: len(ids) for space, ids in sources.items()}
            copies = self._book.reserve(owner, demand, state=PageState.LEASED)
        except BridgeError:
            self._end(reader)
            raise
        cuts = np.cumsum([len(ids) for ids in checkpoints])[:-1]
        of_ends = dict(zip(ends, np.split(copies[CHECKPOINT_COPIES], cuts), strict=True)) if ends else {}
        moves = {space: (ids, copies[HOST_COPIES[space]]) for space, ids in sources.items()}
        backup = self.backups[owner] = Backup(owner, moves, start, reader, of_ends)
        self._is_copied[backup.records] = True
        return backup

    def end_backup(self, backup: Backup, *, done: bool) -> int:
        """End a backup, once, by the proof that its copy touches nothing any more; return how many pages are on the host by it.

        `done`: it is whole, on every rank. Host pages that nobody needs are free then, unless the book has them in quarantine:
        those stay, and the copied pages are not pinned for them. Raises NotFoundError when it has been ended.
        """
        if self.backups.pop(backup.owner, None) is not backup:
            raise NotFoundError(f"{backup.owner} is not under way (any more)")
        self._is_copied[backup.records] = False
        added = 0
        if self._book.state(backup.owner) is PageState.LEASED:
            self._book.move(backup.owner, PageState.LEASED, PageState.HELD)
            added = self._enter(backup) if done else 0
            self._book.free(backup.owner)
        self._end(backup.reader)
        return added

    def _enter(self, backup: Backup) -> int:
        path = backup.reader.path
        path = path[: np.count_nonzero(~self.index.records.is_hidden(path))]
        here = self._host.depth(path)  # more than at the start, when others came first
        new = max(0, len(path) - here)
        if new:
            ids = {HOST_COPIES[space]: pair[1] for space, pair in backup.moves.items() if space != CHECKPOINT_SPACE}
            pages = {space: copies[here - backup.start : len(path) - backup.start] for space, copies in ids.items()}
            self._book.cache(backup.owner, pages)
            self.index.add_copies(path, here, pages)
            self._tell_added(path, here)
        for record, copies in backup.checkpoints.items():
            if record in path:
                self._keep_checkpoint(backup.owner, record, copies)
        return new

    def _lacking_checkpoints(self, path: RecordArray) -> list[int]:
        """Return the places in a path of checkpoints that are on the device only and not on their way: the last, if many."""
        under_way = {record for backup in self.backups.values() for record in backup.checkpoints}
        lacking = self.index.device.checkpointed(path) & ~self._host.checkpointed(path)
        found: list[int] = []
        left = self._page_counts.get(CHECKPOINT_COPIES, 0)
        for at in reversed(np.flatnonzero(lacking).tolist()):
            left -= len(self.index.device.checkpoints.pages(int(path[at])))
            if left < 0:
                break
            if int(path[at]) not in under_way:
                found.append(at)
        return found[::-1]

    # ------------------------------------------------------------------------------------- pages from elsewhere

    def insert(
        self,
        owner: Owner,
        keys: Keys,
        start: int,
        pages: Mapping[IndexSpace, PageIdArray],
        *,
        checkpoints: Mapping[int, PageIdArray] | None = None,
    ) -> int:
        """Keep an owner's pages that hold the pages of `keys[start:]`: host copies and pages of the home; return how many are new.

        `checkpoints`: host copies of them, by the number of pages at whose end they are. `keys[:start]` have to be on the host;
        nothing is kept when they are not (any more). Pages that are not kept stay the owner's. The owner's pages must be held:
        nobody writes them any more. Raises ConflictError when they are not.
        """
        self._book.cache(owner, {})  # refuses pages that are not held before the index takes anything
        if self._host.depth(self.index.match(keys, at_most=start)) < start:
            return 0
        inserted = self.index.insert(keys, start, pages, now=self._clock(), to_host=True)
        try:
            self._book.cache(owner, inserted.pages)
        except BridgeError:
            self.index.withdraw(inserted)
            raise
        tell_left_out(owner, inserted)
        path = self.index.match(keys, at_most=start + len(inserted.records))
        if len(inserted.new):
            self._tell_added(path, len(path) - len(inserted.new))
        for page_count, copies in (checkpoints or {}).items():
            if page_count <= len(path):
                self._keep_checkpoint(owner, int(path[page_count - 1]), copies)
        return len(inserted.new)

    def forgotten(self, pages: Pages) -> None:
        """Tell watchers of the host copies among pages that are not the index's any more."""
        copies = without_empty({space: ids for space, ids in pages.items() if space in HOST_COPIES.values()})
        for watcher in self._watchers if copies else ():
            watcher.removed(copies)

    def check_integrity(self) -> None:
        """Compare what is under way with the book. Raises IntegrityError."""
        copied = [backup.records for backup in self.backups.values()]
        states = {self._book.state(owner) for owner in self.backups}
        if np.count_nonzero(self._is_copied) != sum(map(len, copied)) or not all(
            self._is_copied[one].all() for one in copied
        ):
            raise IntegrityError(f"{len(copied)} backups do not copy the pages that are noted as being copied")
        if not states <= {PageState.LEASED, PageState.QUARANTINED}:
            raise IntegrityError(f"host pages of backups that are under way are {sorted(states)}")

    # ------------------------------------------------------------------------------------- inside

    def _keep_checkpoint(self, owner: Owner, record: int, copies: PageIdArray) -> None:
        if not self._host.checkpointed(np.array([record]))[0]:
            self._book.cache(owner, {CHECKPOINT_COPIES: copies})
            self._host.set_checkpoint(record, copies)
            for watcher in self._watchers:
                watcher.checkpoint_added(self.index.records.keys(np.array([record]))[0], copies)

    def _tell_added(self, path: RecordArray, start: int) -> None:
        for watcher in self._watchers:
            pages = self._host.pages(path[start:]) | self.index.home_pages(path[start:])
            watcher.added(self.index.records.keys(path), start, pages)


def tell_left_out(owner: Owner, inserted: Inserted) -> None:
    """Log pages of an owner that were left out for their keys: engines that compute keys by the rules never meet that."""
    if inserted.left_out:
        reason = "the page has a key that a page of another prompt has: an engine states keys that are not those of its tokens"
        log.warning(
            "prefix_not_kept", room=owner.room, generation=owner.generation, pages=inserted.left_out, reason=reason
        )
