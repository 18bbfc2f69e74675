"""The host copies of prefixes: backups of device pages and when they are made, pages that come from elsewhere, readers.

A page is on the host once its copy is proved done. Until then its host page is leased to the backup, like any page that a transfer
writes, and the copied pages are pinned. A backup that fails frees its own pages and changes nothing else.

One order of backups at a time goes to the rank workers. An order has pages of several prompts, those of a prompt in their order, up
to `tier.host.backup.order_pages`. An order begins when a reader lets go, before the pages that the reader kept can be evicted; when
the order before has ended; and with a tick, for pages that are read for long or have to be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from kvbridge.config.tier import BackupPolicy, HostBackup
from kvbridge.core.errors import BridgeError, CapacityError, NotFoundError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves, Pages
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.tier.index import CHECKPOINT_SPACE, PrefixIndex, Reader
from kvbridge.tier.keys import Keys
from kvbridge.tier.records import RecordArray, join, without_empty
from kvbridge.tier.residence import Inserted, Residence

log = structlog.get_logger(__name__)

CHECKPOINT_COPIES = HOST_COPIES[CHECKPOINT_SPACE]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after an order that has failed; twice as long after the next failure."""
MOST_WAITING = 4_096
"""The most prompts that wait for their turn; the one that has waited longest is forgotten then."""
MOST_IN_VAIN = 32
"""The most prompts without a page to copy that one order looks at: a look walks along a prompt. The next order goes on."""
OLDEST = 64
"""The most prompts that one order looks at when the oldest are copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """One copy from the device to the host that is under way."""

    owner: Owner
    """Has the host pages until the backup ends."""
    moves: PageMoves
    """The pages to copy. Nothing writes these pages, and they stay where they are."""
    start: int
    """The place in the reader's path of the first copied record; checkpoints of records before it may be copied, too."""
    reader: Reader
    checkpoints: dict[int, PageIdArray]
    """By record, the host pages of its checkpoint."""

    @property
    def records(self) -> RecordArray:
        """Records whose pages are copied."""
        return self.reader.path[self.start :]

    @property
    def pages(self) -> int:
        """Number of pages of prompts."""
        return len(self.records)


@dataclass(frozen=True, slots=True, eq=False)
class PinnedCopies:
    """First pages of a prompt that stay on the host until `HostCopies.unpin`."""

    reader: Reader
    pages: Pages
    checkpoints: Mapping[int, PageIdArray]
    """Host copies of checkpoints, by the number of pages before."""

    def __len__(self) -> int:
        return len(self.reader.path)


class CopyWatcher(Protocol):
    """Hears of changes on the host, in the middle of the call that makes a change; it calls nothing back."""

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """The pages of `keys[start:]` are on the host from now on: host copies, and home pages."""

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """The windows and states at the end of the page of this key are on the host from now on."""

    def removed(self, pages: Pages) -> None:
        """Nobody finds these host copies any more, and their pages will be used again. This may be said twice."""


class HostCopies:
    """The host's side of a prefix cache. Used by the event loop's thread only."""

    def __init__(
        self, book: PageBook, index: PrefixIndex, host: Residence, clock: Clock, *, end: Callable[[Reader], None]
    ) -> None:
        """`end`: called with every reader that has read to the end."""
        self.book, self.index, self.host, self._clock, self._end = book, index, host, clock, end
        self._page_counts = {space: sum(states.values()) for space, states in book.counts().items()}
        self._is_copied = np.zeros(index.capacity, dtype=np.bool_)
        """By record: a backup that is under way copies it."""
        self.backups: dict[Owner, Backup] = {}
        """Backups that are under way."""
        self._pinned: set[PinnedCopies] = set()
        self.watchers: list[CopyWatcher] = []

    def cold(self, count: int) -> list[Keys]:
        """Return up to so many unread prompts whose last page is on the device only, the next to be evicted first."""
        leaves, records = self.index.device.leaves(), self.index.records
        kept = self.host.has(leaves) | self._is_copied[leaves] | records.is_hidden(leaves)
        return [records.keys(records.path(record)) for record in leaves[~kept][:count].tolist()]

    def pin(self, keys: Keys) -> PinnedCopies:
        """Keep the host copies, home pages and checkpoints of a prompt on the host, to be read."""
        path = self.index.match(keys)
        path = path[: self.host.depth(path)]
        ends = {at + 1: int(path[at]) for at in np.flatnonzero(self.host.checkpointed(path)).tolist()}
        checkpoints = {page_count: self.host.checkpoint_pages(record) for page_count, record in ends.items()}
        reader = Reader(path, 0, len(path), tuple((self.host, record) for record in ends.values()))
        pinned = PinnedCopies(reader, self.host.pages(path) | self.index.home_pages(path), checkpoints)
        reader.pin(self.index)
        self._pinned.add(pinned)
        return pinned

    def unpin(self, pinned: PinnedCopies) -> None:
        """Undo `pin`; harmless when it is undone."""
        if pinned in self._pinned:
            self._pinned.remove(pinned)
            self._end(pinned.reader)

    # ------------------------------------------------------------------------------------- backups

    def start_backup(self, owner: Owner, keys: Keys, *, at_most: int, min_uses: int = 0) -> Backup | None:
        """Begin to copy the pages of a prompt that are on the device and not on the host, parents first: at most so many pages.

        `min_uses`: only pages that were used so often; the arrival counts. Checkpoints come along where host pages suffice. `owner`
        is new, and has the host pages, leased, until `end_backup`. Returns None when nothing can be copied now. Raises
        CapacityError when host pages are too few, ConflictError when the owner has pages; nothing has changed then.
        """
        path = self.index.match(keys)
        path = path[: self.index.device.depth(path)]
        stops = np.flatnonzero(self._is_copied[path] | (self.index.uses[path] < min_uses))
        path = path[: stops[0]] if len(stops) else path
        start = self.host.depth(path)
        path = path[: start + min(at_most, *(self._page_counts[space] for space in self.host.spaces))]
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
            return self._start(owner, path, start, [])  # pages go to the host even if there is no room for checkpoints

    def _start(self, owner: Owner, path: RecordArray, start: int, ends: list[int]) -> Backup:
        device = self.index.device
        checkpoints = [device.checkpoint_pages(record) for record in ends]
        sources = without_empty(device.pages(path[start:]) | {CHECKPOINT_SPACE: join(checkpoints)})
        reader = Reader(path, len(path), start, tuple((device, record) for record in ends))
        reader.pin(self.index)
        try:
            demand = {HOST_COPIES[space]: len(ids) for space, ids in sources.items()}
            copies = self.book.reserve(owner, demand, state=PageState.LEASED)
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
        """End a backup, once, when its copy is proved to touch nothing any more; return how many pages it brought to the host.

        `done`: the copy is whole on every rank. Host pages that are not needed are free then, unless they are in quarantine. Raises
        NotFoundError when the backup has been ended.
        """
        if self.backups.pop(backup.owner, None) is not backup:
            raise NotFoundError(f"{backup.owner} is not under way (any more)")
        self._is_copied[backup.records] = False
        added = 0
        if self.book.state(backup.owner) is PageState.LEASED:
            self.book.move(backup.owner, PageState.LEASED, PageState.HELD)
            added = self._enter(backup) if done else 0
            self.book.free(backup.owner)
        self._end(backup.reader)
        return added

    def _enter(self, backup: Backup) -> int:
        path = backup.reader.path
        path = path[: np.count_nonzero(~self.index.records.is_hidden(path))]
        here = self.host.depth(path)  # more than at the start, when others were faster
        new = max(0, len(path) - here)
        if new:
            ids = {HOST_COPIES[space]: pair[1] for space, pair in backup.moves.items() if space != CHECKPOINT_SPACE}
            pages = {space: copies[here - backup.start : len(path) - backup.start] for space, copies in ids.items()}
            self.book.cache(backup.owner, pages)
            self.index.add_copies(path, here, pages)
            self._tell_added(path, here)
        for record, copies in backup.checkpoints.items():
            if record in path:
                self._keep_checkpoint(backup.owner, record, copies)
        return new

    def _lacking_checkpoints(self, path: RecordArray) -> list[int]:
        """Return where in a path there are checkpoints on the device only that no backup copies; the last ones, if too many."""
        under_way = {record for backup in self.backups.values() for record in backup.checkpoints}
        lacking = self.index.device.checkpointed(path) & ~self.host.checkpointed(path)
        found: list[int] = []
        left = self._page_counts.get(CHECKPOINT_COPIES, 0)
        for at in reversed(np.flatnonzero(lacking).tolist()):
            left -= len(self.index.device.checkpoint_pages(int(path[at])))
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
        """Keep an owner's pages that hold the pages of `keys[start:]`: host copies and home pages; return how many are new.

        `checkpoints`: host copies of checkpoints, by the number of pages before. Nothing is kept unless the pages of `keys[:start]`
        are on the host. Pages that are not kept stay the owner's. Raises ConflictError unless the owner's pages are held.
        """
        self.book.cache(owner, {})  # refuses pages that are not held before the index takes anything
        if self.host.depth(self.index.match(keys, at_most=start)) < start:
            return 0
        inserted = self.index.insert(keys, start, pages, now=self._clock(), to_host=True)
        cache_inserted(self.book, self.index, owner, inserted)
        path = self.index.match(keys, at_most=start + len(inserted.records))
        if len(inserted.new):
            self._tell_added(path, len(path) - len(inserted.new))
        for page_count, copies in (checkpoints or {}).items():
            if page_count <= len(path):
                self._keep_checkpoint(owner, int(path[page_count - 1]), copies)
        return len(inserted.new)

    def forgotten(self, pages: Pages) -> None:
        """Tell watchers of the host copies among pages that have left the index."""
        copies = without_empty({space: ids for space, ids in pages.items() if space in HOST_COPIES.values()})
        for watcher in self.watchers if copies else ():
            watcher.removed(copies)

    # ------------------------------------------------------------------------------------- inside

    def _keep_checkpoint(self, owner: Owner, record: int, copies: PageIdArray) -> None:
        if not self.host.checkpointed(np.array([record]))[0]:
            self.book.cache(owner, {CHECKPOINT_COPIES: copies})
            self.host.set_checkpoint(record, copies)
            for watcher in self.watchers:
                watcher.checkpoint_added(self.index.records.keys(np.array([record]))[0], copies)

    def _tell_added(self, path: RecordArray, start: int) -> None:
        for watcher in self.watchers:
            pages = self.host.pages(path[start:]) | self.index.home_pages(path[start:])
            watcher.added(self.index.records.keys(path), start, pages)


class BackupController:
    """Decides which cached pages of a node are copied to the host, and when. Used by the event loop's thread only.

    A prefix cache tells its `controller` of prefixes on the device, in the middle of the call that changes them.
    """

    def __init__(self, copies: HostCopies, settings: HostBackup, *, clock: Clock = monotonic) -> None:
        self._copies, self._settings, self._clock = copies, settings, clock
        [self._space, *_] = copies.index.spaces
        counts = copies.book.counts()
        self._low_pages = int(settings.low_share * sum(counts[self._space].values()))
        self._order_pages = min(settings.order_pages, sum(counts[HOST_COPIES[self._space]].values()))
        self._waiting: dict[bytes, Keys] = {}
        """Prompts with pages to copy, by the key of the last page."""
        self._under_way: dict[Owner, Keys] = {}
        """The prompts of the present order, by the owner of each backup."""
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0
        self.refused = 0
        """Prompts for which every host page had a reader."""
        self.on_due: Callable[[], None] = lambda: None
        """Called when pages of a waiting prompt can be evicted soon."""

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for their turn."""
        return len(self._waiting)

    def kept(self, keys: Keys) -> None:
        """Let a prompt whose last pages are new on the device wait for its turn."""
        if self._settings.policy is BackupPolicy.WRITE_THROUGH:
            self._wait(keys)

    def used(self, keys: Keys) -> None:
        """Let a prefix that was found wait for its turn: pages that were refused, or evicted from the host, are tried again."""
        if self._settings.policy is not BackupPolicy.WRITE_BACK:
            self._wait(keys)

    def ending(self) -> None:
        """An owner is about to let go of its pages, which can be evicted from then on: backups may begin now."""
        if self._waiting:
            self.on_due()

    def _wait(self, keys: Keys) -> None:
        self._waiting.setdefault(keys[-1], keys)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def begin(self, owner: Callable[[], Owner]) -> list[Backup]:
        """Reserve host pages for the next order, and return its backups. `owner` makes a new owner. `ended` comes next."""
        started: list[Backup] = []
        in_vain = 0
        if self._clock() < self._not_before_s:
            return started
        settings, left = self._settings, self._order_pages
        min_uses = settings.uses if settings.policy is BackupPolicy.WRITE_THROUGH_SELECTIVE else 0
        for keys in self._candidates():
            try:
                backup = self._copies.start_backup(owner(), keys, at_most=left, min_uses=min_uses)
            except CapacityError:
                if started or not self._refuse(keys):
                    break  # perhaps there is room when the started backups have ended
                backup = None
            if backup is not None:
                started.append(backup)
                self._under_way[backup.owner] = keys
                left -= backup.pages
            # A prompt that cannot begin beside others may have to wait for pages that this order copies.
            is_over = not started if backup is None else backup.start + backup.pages == len(keys)
            if is_over:
                self._waiting.pop(keys[-1], None)
            in_vain += backup is None
            if left <= 0 or in_vain == MOST_IN_VAIN:
                break
        return started

    def _refuse(self, keys: Keys) -> bool:
        """Note that the host has no room for a prompt. Returns whether the next prompt can be looked at now."""
        self.refused += 1
        if self._waiting.pop(keys[-1], None) is not None:
            return True
        self._not_before_s = self._clock() + FIRST_PAUSE_S  # this prompt will be the oldest again
        return False

    def _candidates(self) -> Iterator[Keys]:
        """Yield the prompts with pages to copy, in their turn."""
        if self._settings.policy is not BackupPolicy.WRITE_BACK:
            yield from list(self._waiting.values())
        elif self._safe_pages < self._low_pages:
            for keys in self._copies.cold(OLDEST):
                yield keys
                if self._safe_pages >= self._low_pages:
                    return

    @property
    def _safe_pages(self) -> int:
        """Device pages that a reservation can take without losing anything: free ones, and those on the host or on their way."""
        copies = self._copies
        on_way = sum(backup.pages for backup in copies.backups.values())  # pinned, and not on the host yet
        on_device_only = len(copies.index) - len(copies.host)
        return copies.book.available_pages()[self._space] - on_device_only + 2 * on_way

    def ended(self, backups: Sequence[Backup], *, done: bool) -> None:
        """End the order of these backups: nothing touches its pages any more, except for those in quarantine."""
        for backup in backups:
            self._copies.end_backup(backup, done=done)
            keys = self._under_way.pop(backup.owner)
            if not done and self._settings.policy is not BackupPolicy.WRITE_BACK:
                self._wait(keys)
        if done:
            self._pause_s = FIRST_PAUSE_S
            return
        self._not_before_s = self._clock() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)


def cache_inserted(book: PageBook, index: PrefixIndex, owner: Owner, inserted: Inserted) -> None:
    """Give the pages that the index has taken from an owner to the page cache, or withdraw them from the index.

    Raises ConflictError for pages that are not the owner's own. Logs pages that were left out for their keys.
    """
    try:
        book.cache(owner, inserted.pages)
    except BridgeError:
        index.withdraw(inserted)
        raise
    if inserted.left_out:
        reason = "a page of another prompt has the same key: an engine states keys that are not those of its tokens"
        log.warning(
            "prefix_not_kept", room=owner.room, generation=owner.generation, pages=inserted.left_out, reason=reason
        )
