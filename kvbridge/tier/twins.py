"""The way of prefixes to the host: backups of what is on the device, and pages that come from elsewhere.

A page is on the host once its copy is proved done. Until then its twin is leased to the copy, like any page that a transfer writes,
and what it copies is pinned. A copy that fails frees its own pages and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, CapacityError, IntegrityError, NotFoundError
from kvbridge.core.ids import TWINS, IndexSpace, PageIdArray, PageMoves
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner, PageState
from kvbridge.tier.index import CHECKPOINT_SPACE, PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.readers import Reader, some, tell_left_out
from kvbridge.tier.records import RecordArray, join
from kvbridge.tier.residence import Pages, Residence

CHECKPOINT_TWINS = TWINS[CHECKPOINT_SPACE]


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """One copy from the device to the host that is under way."""

    owner: Owner
    """Has the twins until it ends."""
    moves: PageMoves
    """The pages to copy: nothing writes them, and they stay where they are."""
    start: int
    """The first record of its path that is copied; of those before, checkpoints may be."""
    reader: Reader
    checkpoints: dict[int, PageIdArray]
    """By record, the twins of its checkpoint."""

    @property
    def records(self) -> RecordArray:
        """Whose pages are copied."""
        return self.reader.path[self.start :]

    @property
    def pages(self) -> int:
        """Number of pages of prompts."""
        return len(self.records)


class TwinWatcher(Protocol):
    """Told what the host has, in the middle of the call that changes it: takes note, and calls nothing back."""

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """The pages of `keys[start:]` are on the host from now on: these twins, and those of the home."""

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """The windows and states at the end of the page of this key are, too."""

    def removed(self, pages: Pages) -> None:
        """These twins hold nothing any more that anybody finds, and will be somebody else's; it may be said twice."""


class Twins:
    """The host's side of a prefix cache. Not thread-safe: it belongs to the one deciding thread."""

    def __init__(
        self, book: PageBook, index: PrefixIndex, host: Residence, clock: Clock, *, end: Callable[[Reader], None]
    ) -> None:
        """`end`: is given every reader whose reading is over."""
        self._book, self._index, self._host, self._clock, self._end = book, index, host, clock, end
        self._page_counts = {space: sum(states.values()) for space, states in book.counts().items()}
        self._is_copied = np.zeros(index.capacity, dtype=np.bool_)
        """Which records a backup that is under way copies."""
        self.backups: dict[Owner, Backup] = {}
        """The backups that are under way."""
        self._watchers: list[TwinWatcher] = []

    def watch(self, watcher: TwinWatcher) -> None:
        """Tell `watcher` from now on."""
        self._watchers.append(watcher)

    def cold(self, count: int) -> list[Keys]:
        """Return up to so many prompts that nobody reads and that end on the device only, those that would be evicted first."""
        leaves, records = self._index.device.victims.leaves(), self._index.records
        kept = self._host.has(leaves) | self._is_copied[leaves] | records.is_hidden(leaves)
        return [records.keys(records.path(record)) for record in leaves[~kept][:count].tolist()]

    # ------------------------------------------------------------------------------------- backups

    def start_backup(self, owner: Owner, keys: Keys, *, at_most: int, min_uses: int = 0) -> Backup | None:
        """Begin to copy what of a prompt is on the device and not on the host, parents first: at most so many pages.

        `min_uses`: only what was used so often, its arrival included. Checkpoints on the way come along, where there are twins for
        them. `owner` is one of its own, and has the twins, leased, until `end_backup`. Returns None when there is nothing to copy,
        or only behind what another backup is copying. Raises CapacityError, and nothing has changed, when there are no twins for
        it; ConflictError when the owner has pages.
        """
        path = self._index.match(keys)
        path = path[: self._index.device.depth(path)]
        stops = np.flatnonzero(self._is_copied[path] | (self._index.uses(path) < min_uses))
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
            if start == len(path) or error.lacking.keys() != {CHECKPOINT_TWINS}:
                raise
            return self._start(owner, path, start, [])  # checkpoints are no reason for pages to stay behind

    def _start(self, owner: Owner, path: RecordArray, start: int, ends: list[int]) -> Backup:
        device = self._index.device
        checkpoints = [device.checkpoints.pages(record) for record in ends]
        sources = device.pages(path[start:]) | {CHECKPOINT_SPACE: join(checkpoints)}
        sources = some(sources)
        reader = Reader(path, len(path), start, tuple((device, record) for record in ends))
        reader.pin(self._index)
        try:
            demand = {TWINS[space]: len(ids) for space, ids in sources.items()}
            twins = self._book.reserve(owner, demand, state=PageState.LEASED)
        except BridgeError:
            self._end(reader)
            raise
        cuts = np.cumsum([len(ids) for ids in checkpoints])[:-1]
        of_ends = dict(zip(ends, np.split(twins[CHECKPOINT_TWINS], cuts), strict=True)) if ends else {}
        moves = {space: (ids, twins[TWINS[space]]) for space, ids in sources.items()}
        backup = self.backups[owner] = Backup(owner, moves, start, reader, of_ends)
        self._is_copied[backup.records] = True
        return backup

    def end_backup(self, backup: Backup, *, done: bool) -> int:
        """End a backup, once, by the proof that its copy touches nothing any more; return how many pages are on the host by it.

        `done`: it is whole, on every rank. Twins that nobody needs are free then, unless the book has them in quarantine: so they
        stay, and what was copied is not pinned for them. Raises NotFoundError when it has been ended.
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
        path = path[: np.count_nonzero(~self._index.records.is_hidden(path))]
        here = self._host.depth(path)  # more than at the start, when others came first
        new = max(0, len(path) - here)
        if new:
            ids = {TWINS[space]: pair[1] for space, pair in backup.moves.items() if space != CHECKPOINT_SPACE}
            pages = {space: twins[here - backup.start : len(path) - backup.start] for space, twins in ids.items()}
            self._book.cache(backup.owner, pages)
            self._index.add_twins(path, here, pages)
            self._tell_added(path, here)
        for record, twins in backup.checkpoints.items():
            if record in path:
                self._keep_checkpoint(backup.owner, record, twins)
        return new

    def _lacking_checkpoints(self, path: RecordArray) -> list[int]:
        """Places in a path of checkpoints that are on the device, and neither on the host nor on their way: the last, if many."""
        under_way = {record for backup in self.backups.values() for record in backup.checkpoints}
        lacking = self._index.device.checkpointed(path) & ~self._host.checkpointed(path)
        found: list[int] = []
        left = self._page_counts.get(CHECKPOINT_TWINS, 0)
        for at in reversed(np.flatnonzero(lacking).tolist()):
            left -= len(self._index.device.checkpoints.pages(int(path[at])))
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
        """Keep an owner's pages that hold what belongs to `keys[start:]`, of twins and of the home; return how many are new there.

        `checkpoints`: by the number of pages at whose end they are, twins of them. `keys[:start]` have to be on the host; nothing
        is kept when they are not (any more). What is not kept stays the owner's, whose pages must be held: nobody writes them any
        more. Raises ConflictError when they are not.
        """
        self._book.cache(owner, {})  # refuses what is not held before the index takes anything
        if self._host.depth(self._index.match(keys, at_most=start)) < start:
            return 0
        inserted = self._index.insert(keys, start, pages, now=self._clock(), to_host=True)
        try:
            self._book.cache(owner, inserted.pages)
        except BridgeError:
            self._index.withdraw(inserted)
            raise
        tell_left_out(owner, inserted)
        path = self._index.match(keys, at_most=start + len(inserted.records))
        if len(inserted.new):
            self._tell_added(path, len(path) - len(inserted.new))
        for page_count, twins in (checkpoints or {}).items():
            if page_count <= len(path):
                self._keep_checkpoint(owner, int(path[page_count - 1]), twins)
        return len(inserted.new)

    def forgotten(self, pages: Pages) -> None:
        """These pages are not the index's any more."""
        twins = some({space: ids for space, ids in pages.items() if space in TWINS.values()})
        for watcher in self._watchers if twins else ():
            watcher.removed(twins)

    def check_integrity(self) -> None:
        """Compare what is under way with the book. Raises IntegrityError."""
        copied = [backup.records for backup in self.backups.values()]
        states = {self._book.state(owner) for owner in self.backups}
        if np.count_nonzero(self._is_copied) != sum(map(len, copied)) or not all(
            self._is_copied[one].all() for one in copied
        ):
            raise IntegrityError(f"{len(copied)} backups do not copy the pages that are noted as being copied")
        if not states <= {PageState.LEASED, PageState.QUARANTINED}:
            raise IntegrityError(f"twins of backups that are under way are {sorted(states)}")

    # ------------------------------------------------------------------------------------- inside

    def _keep_checkpoint(self, owner: Owner, record: int, twins: PageIdArray) -> None:
        if not self._host.checkpointed(np.array([record]))[0]:
            self._book.cache(owner, {CHECKPOINT_TWINS: twins})
            self._host.set_checkpoint(record, twins)
            for watcher in self._watchers:
                watcher.checkpoint_added(self._index.records.keys(np.array([record]))[0], twins)

    def _tell_added(self, path: RecordArray, start: int) -> None:
        for watcher in self._watchers:
            pages = self._host.pages(path[start:]) | self._index.home_pages(path[start:])
            watcher.added(self._index.records.keys(path), start, pages)
