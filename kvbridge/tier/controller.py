"""The policy of backups: which cached pages are copied to host memory, and when.

One order at a time goes to the rank workers. It has what several prompts need, the pages of each in their order, up to
`tier.host.backup.order_pages`. The order begins when a reader lets go, before the pages that the reader kept can be evicted; when
the order before has ended; and with a tick, for pages that are read for long or have to be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbridge.config.tier import BackupPolicy, HostBackup
from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import HOST_COPIES
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner
from kvbridge.tier.host_copies import Backup, HostCopies
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After an order that has failed nothing is begun for so long, twice as long after the next failure."""
MOST_WAITING = 4_096
"""Prompts that wait for their turn; the one that has waited longest is forgotten then."""
MOST_IN_VAIN = 32
"""Prompts without a page to copy that one order looks at: each look walks along a prompt, and the next order looks on."""
OLDEST = 64
"""Prompts that are looked at for one order, when the oldest are copied."""


class BackupController:
    """Decides for one node. Watches its cache. Not thread-safe: only the one deciding thread uses it."""

    def __init__(
        self,
        cache: PrefixCache,
        copies: HostCopies,
        book: PageBook,
        settings: HostBackup,
        *,
        clock: Clock = monotonic,
    ) -> None:
        """`copies`: those of the cache."""
        self._cache, self._copies, self._book, self._settings, self._clock = cache, copies, book, settings, clock
        [self._space, *_] = cache.spaces
        counts = book.counts()
        self._low_pages = int(settings.low_share * sum(counts[self._space].values()))
        self._order_pages = min(settings.order_pages, sum(counts[HOST_COPIES[self._space]].values()))
        self._waiting: dict[bytes, Keys] = {}
        """Prompts with pages to copy, by the keys of their last pages."""
        self._under_way: dict[Owner, Keys] = {}
        """The prompts of the present order, by the owners of its backups."""
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0
        self.refused = 0
        """Prompts for which host memory had no page without a reader."""
        self.on_due: Callable[[], None] = lambda: None
        """Called when something waits that can be evicted soon."""
        cache.watch(self)

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._waiting)

    # ------------------------------------------------------------------------------------- the cache's watcher

    def kept(self, keys: Keys) -> None:
        """Let a prompt with new pages on the device wait for its turn."""
        if self._settings.policy is BackupPolicy.WRITE_THROUGH:
            self._wait(keys)

    def used(self, keys: Keys) -> None:
        """Let a used prefix wait for its turn: pages that were refused, or evicted from the host, are tried again."""
        if self._settings.policy is not BackupPolicy.WRITE_BACK:
            self._wait(keys)

    def ending(self) -> None:
        """Say that something is due: an owner is about to let go."""
        if self._waiting:
            self.on_due()

    def _wait(self, keys: Keys) -> None:
        self._waiting.setdefault(keys[-1], keys)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    # ------------------------------------------------------------------------------------- orders

    def begin(self, owner: Callable[[], Owner]) -> list[Backup]:
        """Reserve host pages for the next order, and return what it is to copy; empty when there is nothing to do now.

        `owner` makes a new owner. Not to be called again before `ended`.
        """
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
                    break  # perhaps there is room when those are on the host, and nobody reads them
                backup = None
            if backup is not None:
                started.append(backup)
                self._under_way[backup.owner] = keys
                left -= backup.pages
            # A prompt that cannot begin beside others perhaps has to wait for what this order copies.
            is_over = not started if backup is None else backup.start + backup.pages == len(keys)
            if is_over:
                self._waiting.pop(keys[-1], None)
            in_vain += backup is None
            if left <= 0 or in_vain == MOST_IN_VAIN:
                break
        return started

    def _refuse(self, keys: Keys) -> bool:
        """Note that host memory has no room for a prompt. Returns whether the next one can be looked at now."""
        self.refused += 1
        if self._waiting.pop(keys[-1], None) is not None:
            return True
        self._not_before_s = self._clock() + FIRST_PAUSE_S  # it will be the oldest again
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
        """Device pages that a reservation can have without losing anything: free ones, and those on the host or on their way."""
        on_way = sum(backup.pages for backup in self._copies.backups.values())  # pinned, and not on the host yet
        return self._book.available_pages()[self._space] - self._cache.residency().device + 2 * on_way

    def ended(self, backups: Sequence[Backup], *, done: bool) -> None:
        """End the order of these backups: nothing touches its pages any more, but for those that the book has in quarantine.

        After one that has failed nothing is begun for a while.
        """
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
