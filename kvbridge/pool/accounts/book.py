"""The accounts of a node: the owners of its pages, and the pages that may be used again.

A page belongs to nobody (free), to one owner, or to the page cache, and all pages of an owner are in one state.
`TRANSITIONS` is the whole rule: pages that a transfer may touch (leased) cannot become free. They first become *held*, by
whoever has the proof that the transfer is over, or *quarantined*, until there is proof that nobody uses them.

Pages in the cache hold a prefix that several requests read and nobody writes. Which of them somebody reads is known to the
`PageCache`; those that nobody reads are *available* like free ones, and are evicted here when free ones do not suffice.

The ids of an owned space are chosen here. The ids of an adopted space are chosen by the engine and only noted down
here; what the engine does with the rest of its pages is not known, so "free" then means "not given to the bridge".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, ConflictError, IntegrityError, InvalidInputError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.holdings import Holdings, Pages
from kvbridge.pool.accounts.page_states import TRANSITIONS, Owner, PageCache, PageState, PageWatcher
from kvbridge.pool.accounts.spaces import AdoptedSpace, OwnedSpace

Counts = Mapping[IndexSpace, int]
SpaceT = TypeVar("SpaceT", OwnedSpace, AdoptedSpace)

_F, _H, _L, _Q, _C = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED, PageState.CACHED


class PageBook:
    """The accounts of one node. Not thread-safe: it belongs to the node process's one deciding thread."""

    def __init__(self, owned: Counts, *, adopted: Counts | None = None) -> None:
        """Open the accounts: pages of each space that we allocate from, and of each that an engine does."""
        both = owned.keys() & (adopted or {}).keys()
        if both:
            raise InvalidInputError(f"spaces {sorted(both)} cannot be both owned and adopted")
        self._spaces: dict[IndexSpace, OwnedSpace | AdoptedSpace] = {
            space: OwnedSpace(space, count) for space, count in owned.items()
        }
        self._spaces |= {space: AdoptedSpace(space, count) for space, count in (adopted or {}).items()}
        if not self._spaces:
            raise InvalidInputError("a page book needs at least one index space")
        self._holdings = Holdings(tuple(self._spaces))
        self._ending: set[Owner] = set()
        self._watchers: list[PageWatcher] = []
        self._cache: PageCache | None = None

    def use_cache(self, cache: PageCache) -> None:
        """Let `cache` say from now on which cached pages can be evicted."""
        self._cache = cache

    def watch(self, watcher: PageWatcher) -> None:
        """Tell `watcher` from now on."""
        self._watchers.append(watcher)

    # ------------------------------------------------------------------------------------- getting pages

    def reserve(self, owner: Owner, demand: Counts, *, state: PageState = _H, scattered: Counts | None = None) -> Pages:
        """Give a new owner pages of owned spaces, all or nothing; in every space in as few runs as possible.

        `scattered`: so many of them, the last ones of their space, need not lie together and leave the long runs to others.
        Evicts cached pages that nobody reads where free ones do not suffice, and none when that would not either.
        Raises CapacityError when they are not available now, InvalidInputError when the pool is too small for them ever to
        be, ConflictError when the owner has pages already.
        """
        self._require_new(owner, state)
        pages = self._take(owner, demand, scattered=scattered)
        self._holdings.open(owner, state)
        return self._holdings.enter(owner, pages)

    def grow(self, owner: Owner, demand: Counts) -> Pages:
        """Give an owner further pages, in the state of those that it has, and return the new ones only. All or nothing.

        They continue the owner's last run where the pages behind it are free. Errors as for `reserve`; NotFoundError
        for an owner that has nothing.
        """
        holding = self._holdings.growable(owner)
        return self._holdings.enter(owner, self._take(owner, demand, holding.pages))

    def adopt(
        self,
        owner: Owner,
        pages: Mapping[IndexSpace, npt.ArrayLike],
        *,
        shared: Mapping[IndexSpace, npt.ArrayLike] | None = None,
        written_by_peers: bool = False,
    ) -> Pages:
        """Note down pages of adopted spaces that the engine gives to an owner, all or nothing; returns `pages` as they are kept.

        A new owner holds them; one that has pages already gets them in the state of those. `shared` are pages that the owner
        only reads, since they are in the engine's own prefix cache: other owners may have them too, whether they wrote them or
        read them as well, and nobody may write them until the last of their readers is gone. `written_by_peers`: leases here are
        for writing, so nothing of a page is final before its lease has ended by proof.

        Raises PageOutOfBoundsError, InvalidInputError for an id named twice, and ConflictError for one of `pages` that another
        owner has, or one of `shared` that a peer may still write.
        """
        if owner in self._holdings:
            self._holdings.growable(owner)
        else:
            self._require_new(owner, _H)
        written = {space: self._space(space, AdoptedSpace).check(ids) for space, ids in pages.items()}
        read = {space: self._space(space, AdoptedSpace).check(ids) for space, ids in (shared or {}).items()}
        for space in written.keys() & read.keys():
            self._space(space, AdoptedSpace).check(np.concatenate((written[space], read[space])))
        self._require_unused(owner, written)
        for space, ids in read.items() if written_by_peers else ():
            writer = self._holdings.in_transfer(space, self._space(space, AdoptedSpace).written(ids))
            if writer is not None:
                raise ConflictError(
                    f"{owner}: pages of adopted space '{space}' that are to be its prefix are {self.state(writer)}, a peer may "
                    f"still write them for {writer}; the engine must not take them for a prefix before that is committed"
                )
        self._holdings.open(owner, _H)
        for space, ids in read.items():
            self._space(space, AdoptedSpace).read(self._holdings.share(owner, space, ids))
        for space, ids in written.items():
            self._space(space, AdoptedSpace).mark(ids)
        return self._holdings.enter(owner, written)

    def _require_unused(self, owner: Owner, pages: Pages) -> None:
        for space, ids in pages.items():
            taken = self._space(space, AdoptedSpace).in_use(ids)
            if len(taken):
                others = " and ".join(map(str, self._holdings.with_page(space, int(taken[0]))))
                raise ConflictError(
                    f"{owner}: page {taken[0]} of adopted space '{space}' still belongs to {others}; the engine must not give it "
                    "away before that is over, and what its own prefix cache holds for several it has to name as their prefix"
                )

    # ------------------------------------------------------------------------------------- the page cache

    def cache(self, owner: Owner, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take pages from an owner and give them to the page cache: whole pages, which nobody writes any more. All or nothing.

        The owner's pages must be held, which is the proof that no transfer writes them. It may go on reading these, for as long
        as the `PageCache` says that somebody does. Raises ConflictError for other states and for pages that are not the owner's.
        """
        holding = self._holdings.of(owner)
        if holding.state is not _H:
            raise ConflictError(f"{owner}: {holding.state} pages cannot be cached, a transfer may still touch them")
        left = {}
        for space, ids in pages.items():
            self._space(space, OwnedSpace)
            had = holding.pages.get(space, ids[:0])
            left[space] = had[np.isin(had, ids, invert=True)]
            if len(left[space]) + len(ids) != len(had):
                raise ConflictError(
                    f"{owner}: of {len(ids)} pages of '{space}' that are to be cached {len(had) - len(left[space])} are its own"
                )
        self._holdings.leave(owner, left)
        for space, ids in pages.items():
            self._space(space, OwnedSpace).keep(ids)

    def uncache(self, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Make cached pages free: the page cache knows nothing of them any more. Raises IntegrityError for others."""
        for space, ids in pages.items():
            self._space(space, OwnedSpace).drop(ids)

    def became_available(self, pages: Counts) -> None:
        """Tell watchers of so many pages that were read until now: they can be evicted, or have been let go of."""
        if any(pages.values()):
            for watcher in self._watchers:
                watcher.freed(pages)

    # ------------------------------------------------------------------------------------- changing their state

    def move(self, owner: Owner, from_state: PageState, to_state: PageState) -> None:
        """Change the state of all of an owner's pages between held and leased.

        Leased to held says that there is proof that no transfer touches them any more. Raises ConflictError, and
        changes nothing, when the pages are not in `from_state` or the transition is not in `TRANSITIONS`.
        """
        holding = self._holdings.of(owner)
        if holding.state is not from_state:
            raise ConflictError(
                f"{owner}: pages are {holding.state}, not {from_state}, and cannot be moved to {to_state}"
            )
        if {from_state, to_state} != {_H, _L}:
            raise ConflictError(
                f"{owner}: pages cannot be moved from {from_state} to {to_state}; pages become free by free(), "
                f"quarantined by quarantine() and leave quarantine by release_quarantined()"
            )
        self._holdings.shift(owner, to_state)

    def free(self, owner: Owner) -> int:
        """Take all pages of an owner back for use by others and forget it; returns how many. They must be held.

        Raises ConflictError while they are leased or quarantined, NotFoundError when the owner has none.
        """
        holding = self._holdings.of(owner)
        if holding.state is not _H:
            raise ConflictError(
                f"{owner}: {holding.state} pages cannot be freed, a transfer may still touch them"
                + (f" ({', '.join(sorted(holding.reasons))})" if holding.reasons else "")
                + "; end the lease or the quarantine first"
            )
        return self._forget(owner)

    def quarantine(self, owner: Owner, reason: str) -> None:
        """Keep an owner's pages from any use until `release_quarantined`.

        `reason` tells people what may still touch the pages. Further reasons are told beside it.
        """
        if not reason:
            raise InvalidInputError(f"{owner}: a quarantine needs a reason")
        holding = self._holdings.of(owner)
        if holding.state is not _Q:
            self._holdings.shift(owner, _Q)
            self._ending.discard(owner)
        holding.reasons.add(reason)

    def release_quarantined(self, owner: Owner) -> None:
        """Free the pages of an owner: nothing touches them any more. Harmless for one that is not quarantined."""
        if self.state(owner) is _Q:
            self._forget(owner)

    def expect_free(self, owner: Owner) -> None:
        """Say that an owner is ending: its pages count in `pages_being_released` until they are free or quarantined."""
        if self._holdings.of(owner).state is not _Q and owner not in self._ending:
            self._ending.add(owner)

    # ------------------------------------------------------------------------------------- asking

    def __contains__(self, owner: object) -> bool:
        return owner in self._holdings

    def pages(self, owner: Owner) -> Pages:
        """All pages of an owner, in the order in which it got them. Raises NotFoundError when it has none."""
        return dict(self._holdings.of(owner).pages)

    def state(self, owner: Owner) -> PageState:
        """The state of all pages of an owner; FREE when it has none."""
        return self._holdings.state(owner)

    def quarantine_reasons(self) -> dict[str, tuple[Owner, ...]]:
        """Every reason that has not been lifted, with the owners that wait for it."""
        return self._holdings.reasons()

    def counts(self) -> dict[IndexSpace, dict[PageState, int]]:
        """Pages of each space in each state. They add up to all of them."""
        return {
            space: {_F: account.free} | self._holdings.counts(space) | {_C: account.cached}
            for space, account in self._spaces.items()
        }

    def available_pages(self) -> dict[IndexSpace, int]:
        """Pages of each space that a reservation can have: free ones, and cached ones that nobody reads."""
        evictable = self._evictable()
        return {space: account.free + evictable.get(space, 0) for space, account in self._spaces.items()}

    def cached_pages(self) -> Pages:
        """Every cached page of the spaces whose pages are given out here."""
        return {space: self._space(space, OwnedSpace).cached_ids() for space in self.owned_spaces()}

    def owned_spaces(self) -> tuple[IndexSpace, ...]:
        """Spaces whose pages are given out here."""
        return tuple(space for space, account in self._spaces.items() if isinstance(account, OwnedSpace))

    def require_possible(self, demand: Counts, *, of: object = "the request") -> None:
        """Raise InvalidInputError when `of` asks for more pages than there would be if all were free."""
        for space, count in demand.items():
            if space not in self._spaces:
                raise InvalidInputError(f"{of}: needs pages of '{space}', which this node does not have")
            page_count = self._spaces[space].page_count
            if count > page_count:
                raise InvalidInputError(
                    f"{of}: needs {count} pages of '{space}', the whole pool has {page_count}; "
                    f"enlarge the pool or shorten the request"
                )

    def pages_being_released(self) -> dict[IndexSpace, int]:
        """Pages of each space that will soon be free without anybody's asking: those of ending owners.

        Quarantined pages are not among them: nobody knows when they will be free.
        """
        found = dict.fromkeys(self._spaces, 0)
        for owner in self._ending:
            for space, ids in self._holdings.of(owner).pages.items():
                found[space] += len(ids)
        return found

    def check_integrity(self) -> None:
        """Recount everything from the owners' pages. Raises IntegrityError: lost pages, two owners, wrong counts.

        free + held + leased + quarantined + cached is every page of a space once. That the cached ones are those that the page
        cache knows only it can say.
        """
        self._holdings.check_integrity()
        for space, account in self._spaces.items():
            account.check_owners(*self._holdings.arrays(space))
            if sum(self.counts()[space].values()) != account.page_count:
                raise IntegrityError(f"space '{space}': {self.counts()[space]} are not its {account.page_count} pages")

    def __repr__(self) -> str:
        lines = ", ".join(
            f"{space} " + " ".join(f"{count} {state}" for state, count in counts.items())
            for space, counts in self.counts().items()
        )
        return f"<page book: {len(self._holdings)} owners; {lines}>"

    # ------------------------------------------------------------------------------------- inside

    def _require_new(self, owner: Owner, state: PageState) -> None:
        if owner in self._holdings:
            raise ConflictError(f"{owner} has pages already ({self._holdings.state(owner)})")
        if state not in TRANSITIONS[_F]:
            raise InvalidInputError(f"{owner}: pages cannot begin as {state}")

    def _space(self, space: IndexSpace, kind: type[SpaceT]) -> SpaceT:
        account = self._spaces.get(space)
        if not isinstance(account, kind):
            names = [str(name) for name, one in self._spaces.items() if isinstance(one, kind)]
            raise InvalidInputError(f"'{space}' is not {kind.what} of this node; those are {names}")
        return account

    def _take(
        self, owner: Owner, demand: Counts, having: Pages | None = None, scattered: Counts | None = None
    ) -> Pages:
        """Take from every space or, when one lacks pages, from none."""
        accounts = {space: self._space(space, OwnedSpace) for space in demand}
        for space, count in demand.items():
            if count < 0:
                raise InvalidInputError(f"{owner}: cannot ask for {count} pages of '{space}'")
        had = {space: len((having or {}).get(space, ())) for space in demand}
        self.require_possible({space: had[space] + count for space, count in demand.items()}, of=owner)
        self._make_free(owner, demand)
        last = {space: int(ids[-1]) for space, ids in (having or {}).items() if len(ids)}
        some = {space: (scattered or {}).get(space, 0) for space in demand}
        return {one: accounts[one].take(n, after=last.get(one), scattered=some[one]) for one, n in demand.items()}

    def _evictable(self) -> Counts:
        return self._cache.evictable() if self._cache is not None else {}

    def _make_free(self, owner: Owner, demand: Counts) -> None:
        """Evict what `demand` needs beyond the free pages, or raise CapacityError and evict nothing."""
        free = {space: account.free for space, account in self._spaces.items()}
        short = {space: count - free[space] for space, count in demand.items() if count > free[space]}
        if not short:
            return
        evictable = self._evictable()
        lacking = {space: count - evictable.get(space, 0) for space, count in short.items()}
        lacking = {space: count for space, count in lacking.items() if count > 0}
        if lacking or self._cache is None:
            texts = [
                self._lack(space, demand[space], count, evictable.get(space, 0)) for space, count in lacking.items()
            ]
            raise CapacityError(f"{owner}: {'; '.join(texts)}", lacking=lacking)
        self.uncache(self._cache.evict(short))
        kept = {space: count for space, count in demand.items() if count > self._spaces[space].free}
        if kept:
            raise IntegrityError(
                f"the page cache was to evict {short}, of {evictable} that it can, and lacks {kept} still: {self!r}"
            )

    def _lack(self, space: IndexSpace, count: int, lacking: int, evictable: int) -> str:
        account = self._spaces[space]
        cached = f"{evictable} of {account.cached} cached can be evicted, " if account.cached else ""
        return (
            f"space '{space}' lacks {lacking} pages ({count} wanted, {account.free} of {account.page_count} free, {cached}"
            f"{self.pages_being_released()[space]} being released, {self._holdings.counts(space)[_Q]} quarantined)"
        )

    def _forget(self, owner: Owner) -> int:
        holding = self._holdings.pop(owner)
        self._ending.discard(owner)
        free = {space: self._spaces[space].free for space in (*holding.pages, *holding.shared)}
        for space, ids in holding.pages.items():
            self._spaces[space].give(ids)
        for space, ids in holding.shared.items():
            self._space(space, AdoptedSpace).read_no_more(ids)
        freed = {space: self._spaces[space].free - before for space, before in free.items()}
        for watcher in self._watchers:
            watcher.freed(freed)
            watcher.gone(owner)
        return sum(freed.values())
