"""The prefixes that stay on one node: the index of prefixes and the page book, changed together.

The book knows that a page is cached, the index knows the page's prefix and the number of its readers, and the cache knows which
owners read it. Each can be recounted from the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, InvalidInputError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.core.prefixes import Evicted
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.accounts.book import Owner, PageBook
from kvbridge.tier.host_copies import BackupController, HostCopies, cache_inserted
from kvbridge.tier.index import CHECKPOINT_SPACE, PrefixIndex, Reader
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.records import RecordArray, without_empty
from kvbridge.tier.residence import EvictedPages
from kvbridge.tier.retention import Claim

Demand = Callable[[Mapping[IndexSpace, int]], Mapping[IndexSpace, int]]
"""Maps the numbers of cached pages that an owner is to read to the numbers of pages that it needs beside them, by space."""


class Residency(NamedTuple):
    """Numbers of pages of prompts by where they are; one is a page of each space."""

    device: int
    """On the device alone."""
    both: int
    host: int
    """On the host alone."""
    evicted: EvictedPages
    """Pages evicted from the host so far."""


class Dropped(NamedTuple):
    """Numbers of forgotten pages; one is a page of each space that grows with the tokens."""

    pages: int
    """Pages of prompts and answers. No request finds them any more."""
    read: int
    """Those among them that are still read."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Admitted:
    """The pages that an owner got: cached ones of its prompt's first `prefix_pages` pages, and its own for the rest."""

    prefix: Pages
    """Cached pages, to be read only, until the owner lets go: device pages of the first `device_pages`, home pages of all."""
    prefix_pages: int
    device_pages: int
    copies: Pages
    """Host copies of the others, which are on the host only. They are to be loaded into the first of the `own` device pages."""
    checkpoint: PageIdArray
    """Windows and states at the end of the prefix, to be read only; empty unless they were asked for and are on the device."""
    checkpoint_copy: PageIdArray
    """The same when they are on the host only: they are to be loaded into `checkpoint_own`."""
    checkpoint_own: PageIdArray
    own: Pages
    """Pages that are the owner's alone, beside `checkpoint_own`."""


class PrefixCache:
    """The cached prefixes of one node; the book's PageCache. Used by the event loop's thread only."""

    def __init__(self, book: PageBook, index: PrefixIndex, *, clock: Clock = monotonic, restores: bool = False) -> None:
        """`restores`: owners can load pages back from the host, so they are given prefixes that are on the host only."""
        self._book, self.index, self._clock = book, index, clock
        self._restores = restores and index.host is not None
        self._readers: dict[Owner, Reader] = {}
        self.copies = HostCopies(book, index, index.host, clock, end=self._end) if index.host is not None else None
        """The host copies of prefixes; None: there are none."""
        self.controller: BackupController | None = None
        """Decides about backups; set by the node that carries them out."""
        self._empty_at_s = clock()
        """The time at which everything was last forgotten at once."""
        self.retention_refused = 0
        """Owners whose claims do not count, because their namespace, or all, retained as many pages as they may."""
        self.evicted_checkpoints = 0
        book.page_cache = self

    def admit(
        self, owner: Owner, keys: Keys, demand: Demand, *, at_most: int | None = None, from_checkpoint: bool = False
    ) -> Admitted:
        """Give a new owner the longest cached prefix of its prompt, of `at_most` pages, and pages of its own for the rest.

        All or nothing, until `let_go`. `from_checkpoint`: only a prefix that ends with a checkpoint is of use. Raises as
        `PageBook.reserve`.
        """
        path = self.index.match(keys, at_most=at_most)
        if not self._restores:
            path = path[: self.index.device.depth(path)]
        if from_checkpoint:
            path = path[: max(self._restorable(path), default=0)]
        try:
            return self._admit(owner, keys, path, demand, from_checkpoint=from_checkpoint)
        except (CapacityError, InvalidInputError) as error:
            if not (from_checkpoint and len(path)):
                raise  # a prefix only ever lowers the demand, so it would not fit without one either
            try:  # but a checkpoint takes pages that the owner may need for its own windows
                return self._admit(owner, keys, path[:0], demand, from_checkpoint=False)
            except CapacityError as without:
                raise (error if isinstance(error, CapacityError) else without) from None

    def _admit(self, owner: Owner, keys: Keys, path: RecordArray, demand: Demand, *, from_checkpoint: bool) -> Admitted:
        if owner in self._readers:
            raise ConflictError(f"{owner} was admitted already, with a prefix of {self.reads(owner)} pages")
        reader = Reader.of(self.index, path, self.index.device.depth(path), from_checkpoint=from_checkpoint)
        reader.pin(self.index)
        try:
            shared = reader.shared(self.index)
            needed = dict(demand(shared))
            # Pages that will not be cached are freed early; taken from short runs, they leave the long runs whole.
            apart = {space: max(0, needed.get(space, 0) - (len(keys) - shared[space])) for space in self.index.spaces}
            to_load = len(reader.checkpoint(self.index.host))
            if to_load:
                needed[CHECKPOINT_SPACE] = needed.get(CHECKPOINT_SPACE, 0) + to_load
            own = self._book.reserve(owner, needed, scattered=apart)
        except BridgeError:
            reader.unpin(self.index)
            raise
        if to_load:
            own[CHECKPOINT_SPACE], reader.checkpoint_own = np.split(own[CHECKPOINT_SPACE], [-to_load])
        self._readers[owner] = reader
        self.index.touch(path, self._clock())
        if self.controller is not None and len(path):
            self.controller.used(keys[: len(path)])
        return self._admitted(reader, own)

    def _admitted(self, reader: Reader, own: Pages) -> Admitted:
        device, host = self.index.device, self.index.host
        return Admitted(
            prefix=device.pages(reader.path[: reader.device]) | self.index.home_pages(reader.path),
            prefix_pages=len(reader.path),
            device_pages=reader.device,
            copies={} if host is None else without_empty(host.pages(reader.path[reader.device :])),
            checkpoint=reader.checkpoint(device),
            checkpoint_copy=reader.checkpoint(host),
            checkpoint_own=reader.checkpoint_own,
            own=own,
        )

    # ------------------------------------------------------------------------------------- pages that come

    def keep(self, owner: Owner, keys: Keys, start: int, pages: Mapping[IndexSpace, PageIdArray]) -> int:
        """Keep whole pages of an owner, those of `keys[start:]`, and return how many are new; nobody writes them any more.

        `start`: the number of pages of its prompt that the owner reads already. The owner reads all of these pages from now on.
        Some pages stay the owner's own: those that the cache has already, those from the first key on that a page of another path
        has, and all when pages before them have been dropped. Raises ConflictError when the owner's pages are not held or not its
        own, or `start` is wrong, NotFoundError for an owner that was never admitted; nothing is kept then.
        """
        reader = self._reader(owner)
        if start != len(reader.path):
            raise ConflictError(f"{owner} reads {len(reader.path)} pages so far: those from {start} on cannot be kept")
        self._book.cache(owner, {})  # refuses pages that are not held before the index takes anything
        path, device = self.index.match(keys), self.index.device
        if not np.array_equal(path[:start], reader.path) or device.depth(reader.path) < start or device.is_lost(path):
            return 0
        inserted = self.index.insert(keys, start, pages, now=self._clock())
        cache_inserted(self._book, self.index, owner, inserted)
        if reader.device < start:
            self._reads(owner, start, reader.host)
        self.index.pin(inserted.records)
        reader = self._readers[owner]
        reader.path, reader.device = np.concatenate((reader.path, inserted.records)), start + len(inserted.records)
        reader.kept = np.concatenate((reader.kept, inserted.new))
        self._used(reader)
        if self.controller is not None and len(inserted.new):
            self.controller.kept(keys[: reader.device])
        return len(inserted.new)

    def restored(self, owner: Owner, start: int, pages: Mapping[IndexSpace, PageIdArray]) -> int:
        """Keep device pages of an owner with its prefix from page `start` on, which was on the host only.

        The pages are whole by proof, and nobody writes them any more. The owner goes on reading them. Pages that somebody else has
        brought to the device meanwhile stay its own. Returns how many are new there. Raises ConflictError unless they are held.
        """
        reader = self._reader(owner)
        if start > reader.device:
            raise ConflictError(
                f"{owner} reads {reader.device} pages on the device: those from {start} on come too early"
            )
        self._book.cache(owner, {})  # refuses pages that are not held
        path = reader.path[: start + max(map(len, pages.values()), default=0)]
        path = path[: np.count_nonzero(~self.index.records.is_hidden(path))]
        if self.index.device.is_lost(path):
            return 0
        here = self.index.device.depth(path)
        new = {space: ids[here - start : len(path) - start] for space, ids in pages.items()}
        if here < len(path):
            self._book.cache(owner, new)
            self.index.add_device(path, here, new)
        if len(path) > reader.device:
            done = len(path) == len(reader.path) and not len(reader.checkpoint_own)
            self._reads(owner, len(path), 0 if done else reader.host)
        return len(path) - here

    def _reads(self, owner: Owner, device: int, host: int) -> None:
        """Let an owner read the first `device` pages on the device and the first `host` on the host from now on."""
        before = self._readers[owner]
        after = self._readers[owner] = replace(before, device=device, host=host)
        after.pin(self.index)
        self._end(before)

    def keep_checkpoint(self, owner: Owner, page_count: int, pages: PageIdArray) -> bool:
        """Keep an owner's `pages` as the windows and states at the end of the first `page_count` pages that it reads.

        False, and they stay the owner's, when there is a checkpoint already, or that page is not on the device (any more). Raises
        ConflictError when the owner does not read so many pages, or `pages` are not its own and held.
        """
        path = self._reader(owner).path
        if not 0 < page_count <= len(path):
            raise ConflictError(f"{owner} reads {len(path)} pages so far: page {page_count} can have no checkpoint")
        record, device = path[page_count - 1 : page_count], self.index.device
        if self.index.records.is_hidden(record)[0] or not device.lacks_checkpoint(int(record[0])):
            return False
        self._book.cache(owner, {CHECKPOINT_SPACE: pages})
        device.set_checkpoint(int(record[0]), pages)
        self._book.became_available({CHECKPOINT_SPACE: len(pages)})
        return True

    def retain(self, owner: Owner, claim: Claim) -> None:
        """Retain the pages that an owner reads, now and later, as the owner claims. Raises NotFoundError as `let_go`."""
        reader = self._reader(owner)
        reader.claim = claim
        self._used(reader)

    def _used(self, reader: Reader) -> None:
        """Retain the path of a reader that has a claim, from now on."""
        if reader.claim and not self.index.retain(reader.path, self._clock(), reader.claim):
            reader.claim = None
            self.retention_refused += 1

    # ------------------------------------------------------------------------------------- pages that go

    def let_go(self, owner: Owner) -> None:
        """End the reading of an owner, by proof. Raises NotFoundError for an owner that was never admitted, or has let go."""
        reader = self._reader(owner)
        if self.controller is not None:
            self.controller.ending()  # begins backups before the pages can be evicted
        self._used(reader)
        del self._readers[owner]
        self._end(reader)

    def _end(self, reader: Reader) -> None:
        if len(reader.path):
            before = self._book.available_pages()
            self._uncache(reader.unpin(self.index))
            self._tell_available(before)

    def _tell_available(self, before: Mapping[IndexSpace, int]) -> None:
        now = self._book.available_pages().items()
        self._book.became_available({space: count - before[space] for space, count in now if count > before[space]})

    def shorten(self, owner: Owner, page_count: int, *, from_checkpoint: bool) -> Admitted:
        """Let an owner read only the first `page_count` pages of its prefix, and give it pages of its own for the others.

        The owner keeps the pages that it got by `admit`. Pages that it reads no more may be evicted for this. Raises CapacityError,
        NotFoundError when there is no checkpoint (any more); nothing has changed then.
        """
        reader, before = self._reader(owner), self._book.available_pages()
        path, device = reader.path[:page_count], self.index.device
        is_found = not (self.index.records.is_hidden(reader.path).any() or device.is_lost(reader.path))
        fewer = Reader.of(self.index, path, min(reader.device, page_count), from_checkpoint=from_checkpoint)
        fewer.claim = reader.claim
        fewer.pin(self.index)
        if is_found:  # unpinning a dropped path would free it, and the path could not be pinned again
            reader.unpin(self.index)
        try:
            to_load = len(fewer.checkpoint(self.index.host))
            left = fewer.shared(self.index)
            needed = {space: count - left[space] for space, count in reader.shared(self.index).items()}
            if to_load > len(reader.checkpoint_own):
                needed[CHECKPOINT_SPACE] = to_load - len(reader.checkpoint_own)
            own = self._book.grow(owner, needed)
        except BridgeError:
            if is_found:
                reader.pin(self.index)
            self._end(fewer)
            raise
        pages_for_it = np.concatenate((reader.checkpoint_own, own.pop(CHECKPOINT_SPACE, reader.checkpoint_own[:0])))
        fewer.checkpoint_own = pages_for_it[:to_load]
        self._readers[owner] = fewer
        if is_found:
            self._tell_available(before)
        else:
            self._end(reader)
        return self._admitted(fewer, own)

    def drop(self, why: Evicted = Evicted.OPERATOR, which: RecordArray | None = None) -> Dropped:
        """Forget these pages and all that depends on them, or every prefix. Pages with readers are free when those let go."""
        self._empty_at_s = self._clock() if which is None else self._empty_at_s
        return self._dropped(why, lambda: self.index.drop(which))

    def lose_device(self) -> Dropped:
        """Forget the pages on the device, whose memory is gone. Host copies stay."""
        why = Evicted.MEMORY_LOST
        return self.drop(why) if self.copies is None else self._dropped(why, self.index.lose_device)

    def drop_kept(self, owner: Owner, page: int) -> tuple[Dropped, list[Link]]:
        """Forget the pages that an owner has kept from this page of its prompt on, and all that depends on them.

        Pages that others had kept before stay. Also returns the links of all forgotten pages.
        """
        reader = self._reader(owner)
        path = reader.path[page:]
        first = path[np.isin(path, reader.kept) & ~self.index.records.is_hidden(path)][:1]
        if not len(first):
            return Dropped(0, 0), []
        links = self.index.records.links(self.index.records.descendants(first))
        return self.drop(Evicted.INTEGRITY, first), links

    def _dropped(self, why: Evicted, drop: Callable[[], Pages]) -> Dropped:
        known, there = self.index.records.reachable, len(self.index)
        self._uncache(drop())
        if self.copies is not None:
            self.copies.forgotten(self.index.unreachable_copies())
        self.index.evicted[why] += (dropped := known - self.index.records.reachable)
        return Dropped(dropped, dropped - (there - len(self.index)))

    def _uncache(self, pages: Pages) -> None:
        pages = without_empty(pages)
        self._book.uncache(pages)
        if self.copies is not None:
            self.copies.forgotten(pages)

    def evictable(self) -> Mapping[IndexSpace, int]:
        """Return the number of cached pages of each space that nobody reads."""
        return self.index.evictable()

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Mapping[IndexSpace, PageIdArray]:
        """Forget and return pages, at least so many of each space."""
        checkpoints = self.index.device.checkpoint_count
        self.index.decay(self._clock())
        pages = without_empty(self.index.evict(lacking))
        if self.copies is not None:
            self.copies.forgotten(pages)
        self.evicted_checkpoints += checkpoints - self.index.device.checkpoint_count
        return pages

    # ------------------------------------------------------------------------------------- asking

    def __contains__(self, owner: object) -> bool:
        return owner in self._readers

    @property
    def readers(self) -> int:
        """Number of owners that have been admitted and have not let go."""
        return len(self._readers)

    def known(self, keys: Keys) -> int:
        """Return the number of first pages of a prompt that are cached now, for whomever."""
        return len(self.index.match(keys))

    def restorable(self, keys: Keys) -> int:
        """Return the largest number of first pages of a prompt that are cached, with a checkpoint at their end."""
        return int(max(np.flatnonzero(self.index.checkpointed(self.index.match(keys))) + 1, default=0))

    def checkpoints(self, owner: Owner) -> list[int]:
        """Return after how many of the pages that an owner reads there are checkpoints now, ascending."""
        return self._restorable(self._reader(owner).path)

    def _restorable(self, path: RecordArray) -> list[int]:
        return (np.flatnonzero((self.index if self._restores else self.index.device).checkpointed(path)) + 1).tolist()

    def reads(self, owner: Owner) -> int:
        """Return how many pages of its prompt and answer an owner reads. Raises NotFoundError as `let_go`."""
        return len(self._reader(owner).path)

    def kept_s(self) -> float:
        """Return for how many seconds an unused prefix lasts: everything that was used since then is here."""
        return self._clock() - max(self._empty_at_s, self.index.kept_since)

    def retained(self) -> Counter[str]:
        """Return how many pages of prompts each namespace retains now."""
        self.index.decay(self._clock())
        return self.index.retentions.by_namespace

    def residency(self) -> Residency:
        """Return the numbers of pages of prompts by where they are."""
        index = self.index
        device, host = len(index.device), 0 if index.host is None else len(index.host)
        evicted = EvictedPages() if index.host is None else index.host.evicted
        return Residency(
            device=len(index) - host, both=device + host - len(index), host=len(index) - device, evicted=evicted
        )

    def _reader(self, owner: Owner) -> Reader:
        try:
            return self._readers[owner]
        except KeyError:
            raise NotFoundError(f"{owner} reads no cached pages: it was never admitted here, or has let go") from None
