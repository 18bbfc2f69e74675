"""The prefixes that stay on one node: the index of what they are and the page book of what may happen to their pages, as one.

Owns: which owner reads which records, from its admission until it lets go, once. Must not know: rooms, engines, messages, memory,
when a page is whole or a lease has ended (whoever knows that calls `keep` and `let_go`).

The book says of a page that it is cached, the index which prefix it holds and how many read it, and here is said who they are. So
each can be counted again from the others: the index's pages are the book's cached ones, and its pins are the owners' paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.core.prefixes import Evicted
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.holdings import Pages
from kvbridge.pool.accounts.page_states import Owner
from kvbridge.tier.index import CHECKPOINT_SPACE, DigestArray, PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.records import RecordArray
from kvbridge.tier.retention import Claim

Demand = Callable[[int], Mapping[IndexSpace, int]]
"""From the pages of a prefix that is cached to the pages that an owner needs of each space beside it."""


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """What an owner got."""

    prefix: Pages
    """Cached pages that hold the first pages of its prompt, in their order, by space; to be read only, until it lets go."""
    checkpoint: PageIdArray
    """Windows and states at the end of the prefix, to be read only; empty unless they were asked for."""
    own: Pages
    """Pages that are its own alone."""

    @property
    def prefix_pages(self) -> int:
        """Of how many pages of the prompt the prefix consists."""
        return max(map(len, self.prefix.values()), default=0)


class Dropped(NamedTuple):
    """What has been forgotten. One page is a page of each space that grows with the tokens."""

    pages: int
    """Of prompts and answers, which no request finds any more."""
    read: int
    """Of these, those that are still read."""


@dataclass(slots=True)
class _Reader:
    path: RecordArray
    checkpointed: int | None = None
    """The record whose checkpoint it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class PathPages:
    """Cached pages of a prompt, from its first one on, that stay where they are until `PrefixCache.looked`."""

    path: RecordArray
    pages: Pages


class PrefixCache:
    """The cached prefixes of one node. Implements the book's PageCache. Not thread-safe: it belongs to the one deciding thread."""

    def __init__(self, book: PageBook, index: PrefixIndex, *, clock: Clock = monotonic) -> None:
        self._book = book
        self._index = index
        self._clock = clock
        self._readers: dict[Owner, _Reader] = {}
        self._claims: dict[Owner, Claim] = {}
        """What owners ask for all pages that they read; it counts from their last use of them on."""
        self._looking: set[PathPages] = set()
        self._empty_at_s = clock()
        """When everything was last forgotten at once."""
        self._forgotten: Counter[Evicted] = Counter()
        self.claims_refused = 0
        """Owners whose namespace retained as many pages as it may: what they ask does not count any more."""
        self.evicted_checkpoints = 0
        book.use_cache(self)

    # ------------------------------------------------------------------------------------- owners

    def admit(
        self, owner: Owner, keys: Keys, demand: Demand, *, at_most: int | None = None, from_checkpoint: bool = False
    ) -> Admitted:
        """Give a new owner the longest cached prefix of its prompt, of `at_most` pages, and pages of its own for the rest.

        One step, all or nothing; it lasts until `let_go`. `from_checkpoint`: only a prefix at whose end windows and states have
        been kept is of use. Raises what `PageBook.reserve` does.
        """
        path = self._index.match(keys, at_most=at_most)
        if from_checkpoint:
            path = path[: max((np.flatnonzero(self._index.checkpointed(path)) + 1).tolist(), default=0)]
        try:
            return self._admit(owner, keys, path, demand, from_checkpoint=from_checkpoint)
        except CapacityError as error:
            if not (from_checkpoint and len(path)):
                raise  # each page of a prefix is one page less to reserve, so that it would not fit without one either
            try:  # but a checkpoint takes pages in which the owner's own windows may have to be
                return self._admit(owner, keys, path[:0], demand, from_checkpoint=False)
            except CapacityError:
                raise error from None

    def _admit(self, owner: Owner, keys: Keys, path: RecordArray, demand: Demand, *, from_checkpoint: bool) -> Admitted:
        if owner in self._readers:
            raise ConflictError(
                f"{owner} was admitted already, with a prefix of {len(self._readers[owner].path)} pages"
            )
        reader = _Reader(path, int(path[-1]) if from_checkpoint and len(path) else None)
        self._index.pin(path)
        checkpoint = path[:0] if reader.checkpointed is None else self._index.pin_checkpoint(reader.checkpointed)
        try:
            needed = demand(len(path))
            # What cannot be cached goes back soon, and among pages that stay it would leave a hole.
            apart = {space: max(0, needed.get(space, 0) - (len(keys) - len(path))) for space in self.spaces}
            own = self._book.reserve(owner, needed, scattered=apart)
        except BridgeError:
            self._unpin(reader)
            raise
        self._readers[owner] = reader
        self._index.touch(path, self._clock())
        return Admitted(self._index.pages(path), checkpoint, own)

    def keep(
        self,
        owner: Owner,
        keys: Keys,
        start: int,
        pages: Mapping[IndexSpace, PageIdArray],
        *,
        digests: DigestArray | None = None,
    ) -> int:
        """Keep whole pages of an owner, those of `keys[start:]`, and return how many are new; nobody writes them any more.

        `start`: how many pages of its prompt the owner reads already, by `admit` or an earlier `keep`. It reads all of these from
        now on. Pages that the cache has already stay the owner's, and it goes on with them; so do all when what was before them
        has been dropped meanwhile. All or nothing. Raises ConflictError when the owner's pages are not held or not its own, or
        `start` is another, InvalidInputError for keys that are no chain, NotFoundError for an owner that was never admitted.
        """
        reader = self._reader(owner)
        if start != len(reader.path):
            raise ConflictError(
                f"{owner}: pages from {start} on cannot be kept, it reads {len(reader.path)} pages so far"
            )
        self._book.cache(owner, {})  # refuses what is not held before the index takes anything
        if not np.array_equal(self._index.match(keys, at_most=start), reader.path):
            return 0
        inserted = self._index.insert(keys, start, pages, now=self._clock(), digests=digests)
        new = inserted.records[inserted.kept]
        try:
            self._book.cache(owner, {space: ids[inserted.kept] for space, ids in pages.items()})
        except BridgeError:
            self._index.drop(new[:1])
            raise
        self._index.pin(inserted.records)
        reader.path = np.concatenate((reader.path, inserted.records))
        self._retain(owner)
        return len(new)

    def keep_checkpoint(self, owner: Owner, page_count: int, pages: PageIdArray) -> bool:
        """Keep an owner's `pages` as the windows and states at the end of the first `page_count` pages that it reads.

        False, and they stay the owner's, when there are some already or that prefix has been dropped. Raises ConflictError when
        the owner does not read so many pages, or these are not its own and held.
        """
        path = self._reader(owner).path
        if not 0 < page_count <= len(path):
            raise ConflictError(
                f"{owner}: no checkpoint at the end of page {page_count}, it reads {len(path)} pages so far"
            )
        record = path[page_count - 1 : page_count]
        if self._index.checkpointed(record)[0] or self._index.is_dropped(record)[0]:
            return False
        self._book.cache(owner, {CHECKPOINT_SPACE: pages})
        self._index.set_checkpoint(int(record[0]), pages)
        self._book.became_available({CHECKPOINT_SPACE: len(pages)})
        return True

    def let_go(self, owner: Owner) -> None:
        """An owner reads no cached page any more, by proof. Raises NotFoundError for one that was never admitted, or has let go."""
        reader = self._reader(owner)
        self._retain(owner)
        self._claims.pop(owner, None)
        del self._readers[owner]
        self._end(reader)

    def retain(self, owner: Owner, claim: Claim) -> None:
        """Let the pages that an owner reads, now and later, go after others for as long as it asks, from its last use of them on.

        Without effect once the namespace retains as much as it may; `claims_refused` tells. Raises NotFoundError as `let_go`.
        """
        self._reader(owner)
        self._claims[owner] = claim
        self._retain(owner)

    def _retain(self, owner: Owner) -> None:
        claim = self._claims.get(owner)
        if claim and not self._index.retain(self._readers[owner].path, self._clock(), claim):
            del self._claims[owner]
            self.claims_refused += 1

    def _end(self, reader: _Reader) -> None:
        if not len(reader.path):
            return
        before = self._book.available_pages()
        self._book.uncache(_some(self._unpin(reader)))
        now = self._book.available_pages()
        self._book.became_available(
            {space: count - before[space] for space, count in now.items() if count > before[space]}
        )

    def give_up(self, owner: Owner, page_count: int) -> Pages:
        """Let an owner read only the first `page_count` pages of its prefix, whose others have been dropped.

        Returns pages of its own for those. Raises CapacityError when there are none; it reads fewer all the same.
        """
        reader = self._reader(owner)
        fewer = _Reader(reader.path[:page_count])
        self._index.pin(fewer.path)
        self._readers[owner] = fewer
        self._end(reader)  # first: nobody else may read those either
        return self._book.grow(owner, dict.fromkeys(self.spaces, len(reader.path) - page_count))

    def checkpoints(self, owner: Owner) -> list[int]:
        """At the ends of how many pages of those that an owner reads there is a checkpoint now, ascending."""
        return (np.flatnonzero(self._index.checkpointed(self._reader(owner).path)) + 1).tolist()

    def shorten(self, owner: Owner, page_count: int, *, from_checkpoint: bool) -> Admitted:
        """Let an owner read only the first `page_count` pages of its prefix, and give it pages of its own for the others.

        As for `admit`, whose pages besides these it keeps. Raises CapacityError, and nothing has changed then; NotFoundError when
        there is no checkpoint (any more).
        """
        reader = self._reader(owner)
        given_up = len(reader.path) - page_count
        fewer = _Reader(
            reader.path[:page_count], int(reader.path[page_count - 1]) if from_checkpoint and page_count else None
        )
        self._index.pin(fewer.path)
        try:
            checkpoint = (
                fewer.path[:0] if fewer.checkpointed is None else self._index.pin_checkpoint(fewer.checkpointed)
            )
        except BridgeError:
            self._index.unpin(fewer.path)
            raise
        try:
            own = self._book.grow(owner, dict.fromkeys(self.spaces, given_up))
        except BridgeError:
            self._unpin(fewer)
            raise
        self._readers[owner] = fewer
        self._end(reader)
        return Admitted(self._index.pages(fewer.path), checkpoint, own)

    # ------------------------------------------------------------------------------------- what the pages hold

    def look(self, owner: Owner) -> PathPages:
        """Let somebody look at the pages that an owner reads now, until `looked`, whatever becomes of the owner."""
        path = self._reader(owner).path
        self._index.pin(path)
        looking = PathPages(path, self._index.pages(path))
        self._looking.add(looking)
        return looking

    def looked(self, looking: PathPages) -> None:
        """End what `look` began; harmless when it has been ended."""
        if looking in self._looking:
            self._looking.remove(looking)
            self._end(_Reader(looking.path))

    def is_digested(self, looking: PathPages) -> npt.NDArray[np.bool_]:
        """Of which of these pages it is known what they held when they came."""
        return self._index.digests(looking.path)[1]

    def set_digests(self, looking: PathPages, start: int, digests: DigestArray) -> None:
        """Note what these pages from `start` on hold, as far as it is not known; one row each."""
        self._index.set_digests(looking.path[start:], digests)

    def changed(self, looking: PathPages, digests: DigestArray) -> npt.NDArray[np.bool_]:
        """Where these pages do not hold any more what they held when they came, by page and word of their digests."""
        expected, is_known = self._index.digests(looking.path)
        changed: npt.NDArray[np.bool_] = (expected != digests) & is_known[:, np.newaxis]
        return changed

    def readers_of(self, looking: PathPages, page: int) -> list[Owner]:
        """Owners that read one of these pages."""
        return [owner for owner, reader in self._readers.items() if looking.path[page] in reader.path]

    # ------------------------------------------------------------------------------------- what is forgotten

    def drop(self, why: Evicted = Evicted.OPERATOR) -> Dropped:
        """Forget every prefix; pages that are read are free when their readers let go."""
        self._empty_at_s = self._clock()
        return self._drop(None, why)

    def drop_page(self, keys: Keys, page: int) -> Dropped:
        """Forget one page of a prompt and all that depends on it, as `drop` does with everything; harmless when it is not known."""
        return self._drop(self._index.match(keys, at_most=page + 1)[page:], Evicted.INTEGRITY)

    def _drop(self, records: RecordArray | None, why: Evicted) -> Dropped:
        known, there = self._index.reachable, len(self._index)
        self._book.uncache(_some(self._index.drop(records)))
        dropped = known - self._index.reachable
        self._forgotten[why] += dropped
        return Dropped(dropped, dropped - (there - len(self._index)))

    def __contains__(self, owner: object) -> bool:
        return owner in self._readers

    def known(self, keys: Keys) -> int:
        """How many pages of a prompt are cached now, whoever may use them."""
        return len(self._index.match(keys))

    def reads(self, owner: Owner) -> int:
        """How many pages of its prompt and answer an owner reads. Raises NotFoundError as `let_go`."""
        return len(self._reader(owner).path)

    @property
    def spaces(self) -> tuple[IndexSpace, ...]:
        """Those in which each page of a prompt has one page here."""
        return self._index.spaces

    # ------------------------------------------------------------------------------------- the book's PageCache

    def evictable(self) -> Mapping[IndexSpace, int]:
        """See PageCache."""
        return self._index.evictable()

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Mapping[IndexSpace, PageIdArray]:
        """See PageCache."""
        checkpoints = self.checkpoint_count
        self._index.decay(self._clock())
        pages = _some(self._index.evict(lacking))
        self.evicted_checkpoints += checkpoints - self.checkpoint_count
        return pages

    # ------------------------------------------------------------------------------------- for operators

    @property
    def readers(self) -> int:
        """How many owners have been admitted and have not let go."""
        return len(self._readers)

    @property
    def evicted_pages(self) -> int:
        """Pages of prompts that made room for others, so far; one is a page of each space."""
        return self._index.evicted.total()

    def gone(self) -> Mapping[Evicted, int]:
        """How many pages of prompts are not cached any more, so far, by why."""
        return self._index.evicted + self._forgotten

    def retained(self) -> Counter[str]:
        """How many pages of prompts each namespace has retained now."""
        self._index.decay(self._clock())
        return self._index.retentions.by_namespace

    @property
    def checkpoint_count(self) -> int:
        """How many checkpoints there are."""
        return self._index.checkpoint_count

    def kept_s(self) -> float:
        """What was used within so many seconds, and kept, is still here: how long a prefix lasts that nobody uses again."""
        return self._clock() - max(self._empty_at_s, self._index.kept_since)

    def pages(self) -> tuple[int, int]:
        """How many pages of prompts somebody reads, and how many nobody does."""
        unread = self._index.evictable()[self.spaces[0]]
        return len(self._index) - unread, unread

    def check_integrity(self) -> None:
        """Count book and index again, and compare one with the other and both with the readers. Raises IntegrityError."""
        self._book.check_integrity()
        self._index.check_integrity()
        cached = self._book.cached_pages()
        known = self._index.all_pages()
        for space in cached.keys() | known.keys():
            differing = np.setxor1d(cached.get(space, ()), known.get(space, ()))
            if len(differing):
                raise IntegrityError(
                    f"pages of '{space}' are cached or in the index, not both: {differing.tolist()[:8]}"
                )
        pins, checkpoint_pins = self._index.pins()
        expected, restoring = np.zeros_like(pins), dict.fromkeys(checkpoint_pins, 0)
        for looking in self._looking:
            expected[looking.path] += 1
        for reader in self._readers.values():
            expected[reader.path] += 1  # a path has no record twice
            if reader.checkpointed is not None:
                restoring[reader.checkpointed] = restoring.get(reader.checkpointed, 0) + 1
        if not self._claims.keys() <= self._readers.keys():
            raise IntegrityError(f"owners claim pages that they do not read, in {self._index!r}")
        if not np.array_equal(pins, expected) or restoring != checkpoint_pins:
            raise IntegrityError(f"pins do not add up to what {len(self._readers)} owners read, in {self._index!r}")

    def __repr__(self) -> str:
        return f"<prefix cache: {len(self._readers)} readers, {self._index!r}>"

    # ------------------------------------------------------------------------------------- inside

    def _reader(self, owner: Owner) -> _Reader:
        try:
            return self._readers[owner]
        except KeyError:
            raise NotFoundError(f"{owner} reads no cached pages: it was never admitted here, or has let go") from None

    def _unpin(self, reader: _Reader) -> Mapping[IndexSpace, PageIdArray]:
        if reader.checkpointed is not None:
            self._index.unpin_checkpoint(reader.checkpointed)
        return self._index.unpin(reader.path)


def _some(pages: Mapping[IndexSpace, PageIdArray]) -> Pages:
    """Leave out spaces of which there is no page: the node may not have them."""
    return {space: ids for space, ids in pages.items() if len(ids)}
