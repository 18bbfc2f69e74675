"""The accounts of a node: the owner and the state of every page.

A page is free, belongs to one owner, or belongs to the page cache; all pages of an owner have one state. `TRANSITIONS` is the rule:
leased pages, which a transfer may touch, cannot become free. They first become *held*, by proof that the transfer is over, or
*quarantined*, until there is proof that nobody uses them.

Cached pages hold a prefix that several requests read and nobody writes. The `PageCache` knows their readers. Cached pages without a
reader are *available* like free ones; the book evicts them when there are too few free pages.

This node chooses the ids of an owned space. The engine chooses the ids of an adopted space, and the book notes them; the engine's
use of its other pages is unknown, so "free" means "not given to kvbridge" there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, ConflictError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.pool.accounts.spaces import AdoptedSpace, RunAllocator

Counts = Mapping[IndexSpace, int]
SpaceT = TypeVar("SpaceT", RunAllocator, AdoptedSpace)
NO_ROOM = -1


class PageState(StrEnum):
    """The state of a page."""

    FREE = "free"
    HELD = "held"
    """The owner alone uses it: an engine, or a room before and after its transfer."""
    LEASED = "leased"
    """A transfer may read it (prefill) or a peer may write it (decode)."""
    QUARANTINED = "quarantined"
    """A transfer that ended badly may still read or write it."""
    CACHED = "cached"
    """It holds a prefix that several may read and nobody may write. It has no owner and no lease."""


_F, _H, _L, _Q, _C = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED, PageState.CACHED

TRANSITIONS: Mapping[PageState, frozenset[PageState]] = {
    _F: frozenset({_H, _L}),
    _H: frozenset({_F, _L, _Q, _C}),
    _L: frozenset({_H, _Q}),
    _Q: frozenset({_F}),
    _C: frozenset({_F}),
}
"""The states that each state can become. Only `release_quarantined` ends a quarantine.

In an adopted space a page counts as cached while some room reads it and no room writes it, whatever its state was before.
"""


class Owner(NamedTuple):
    """One attempt at one request: a room with its generation. With `NO_ROOM`, the copy between tiers of that number."""

    room: int
    generation: int

    def __str__(self) -> str:
        return f"copy {self.generation}" if self.room == NO_ROOM else f"room {self.room} generation {self.generation}"


class PageCache(Protocol):
    """Knows the content and the readers of cached pages. The book calls it within a reservation; it calls nothing back."""

    def evictable(self) -> Counts:
        """Return the number of cached pages of each space that `evict` can give up at once, all of them together."""

    def evict(self, lacking: Counts) -> Mapping[IndexSpace, PageIdArray]:
        """Forget at least `lacking` evictable pages of each space, and return the forgotten pages."""


class PageWatcher(Protocol):
    """The book calls it within a change; it calls nothing back."""

    def freed(self, pages: Counts) -> None:
        """These numbers of pages of each space have become available: free, or cached without a reader."""

    def gone(self, owner: Owner) -> None:
        """The owner has no pages any more. The book has called `freed` with their numbers before."""


@dataclass(slots=True)
class _Holding:
    """The pages of one owner."""

    state: PageState
    pages: Pages = field(default_factory=dict)
    shared: Pages = field(default_factory=dict)
    """Pages of adopted spaces that the owner only reads."""
    reasons: set[str] = field(default_factory=set)
    """Reasons of its quarantine; empty otherwise."""

    def why(self) -> str:
        return f" ({', '.join(sorted(self.reasons))})" if self.reasons else ""


class PageBook:
    """The accounts of one node. Not thread-safe: only the node's loop uses it."""

    def __init__(self, owned: Counts, *, adopted: Counts | None = None) -> None:
        """`owned`: pages of each space from which this node allocates; `adopted`: of each from which an engine does."""
        adopted = adopted or {}
        if owned.keys() & adopted.keys() or not (owned or adopted):
            raise InvalidInputError(
                f"a page book needs index spaces, each owned or adopted, got {sorted(owned)} and {sorted(adopted)}"
            )
        self._spaces: dict[IndexSpace, RunAllocator | AdoptedSpace] = {
            space: RunAllocator(count, name=f"space '{space}'") for space, count in owned.items()
        }
        self._spaces |= {space: AdoptedSpace(space, count) for space, count in adopted.items()}
        self.owned_spaces = tuple(owned)
        """The spaces that this node allocates from."""
        self._holdings: dict[Owner, _Holding] = {}
        self._in_state = {space: dict.fromkeys((_H, _L, _Q), 0) for space in self._spaces}
        """Pages that owners have, by space and state, so that a refusal need not count them."""
        self._ending: set[Owner] = set()
        self.watchers: list[PageWatcher] = []
        self.page_cache: PageCache | None = None
        """Chooses the cached pages to evict; None: no page is cached."""

    # ------------------------------------------------------------------------------------- getting pages

    def reserve(self, owner: Owner, demand: Counts, *, state: PageState = _H, scattered: Counts | None = None) -> Pages:
        """Give a new owner pages of owned spaces, all or nothing, in every space in as few runs as possible.

        The last `scattered` pages of a space come from short runs and leave the long runs to others. Where there are too few free
        pages, cached ones without a reader are evicted; none when that would not help. Raises CapacityError when the pages are
        not available now, InvalidInputError when the pool is too small for them, ConflictError when the owner has pages.
        """
        if owner in self._holdings:
            raise ConflictError(f"{owner} has pages already ({self.state(owner)})")
        if state not in TRANSITIONS[_F]:
            raise InvalidInputError(f"{owner}: pages cannot begin as {state}")
        pages = self._take(owner, demand, {}, scattered or {})
        self._holdings[owner] = _Holding(state)
        return self._enter(owner, pages)

    def grow(self, owner: Owner, demand: Counts) -> Pages:
        """Give an owner further pages in the state of its present ones, all or nothing; return only the new pages.

        They continue the owner's last run where possible. Raises as `reserve`, and NotFoundError for an unknown owner.
        """
        return self._enter(owner, self._take(owner, demand, self._growable(owner).pages, {}))

    def adopt(
        self,
        owner: Owner,
        pages: Mapping[IndexSpace, npt.ArrayLike],
        *,
        shared: Mapping[IndexSpace, npt.ArrayLike] | None = None,
        written_by_peers: bool = False,
    ) -> Pages:
        """Note pages of adopted spaces that the engine gives to an owner, all or nothing; return `pages` as the book keeps them.

        A new owner holds them; an owner that has pages gets them in the state of its present ones. The owner only reads `shared`,
        pages of the engine's own prefix cache: other owners may write or read them as well, and no new owner may write them until
        the last reader is gone. `written_by_peers`: a page is not final before its lease has ended by proof.

        Raises PageOutOfBoundsError, InvalidInputError for an id named twice, and ConflictError for one of `pages` that another
        owner has, or one of `shared` that a peer may still write.
        """
        if owner in self._holdings:
            self._growable(owner)
        written = {space: self._space(space, AdoptedSpace).check(ids) for space, ids in pages.items()}
        read = {space: self._space(space, AdoptedSpace).check(ids) for space, ids in (shared or {}).items()}
        for space in written.keys() & read.keys():
            self._space(space, AdoptedSpace).check(np.concatenate((written[space], read[space])))
        for space, ids in written.items():
            taken = self._space(space, AdoptedSpace).in_use(ids)
            if len(taken):
                others = [
                    each
                    for each, had in self._holdings.items()
                    if taken[0] in had.pages.get(space, ()) or taken[0] in had.shared.get(space, ())
                ]
                raise ConflictError(
                    f"{owner}: page {taken[0]} of adopted space '{space}' still belongs to {' and '.join(map(str, others))}; the "
                    "engine must not give the page away before that is over, and has to name pages of its own prefix cache as the "
                    "prefix of their readers"
                )
        for space, wanted in read.items() if written_by_peers else ():
            ids = self._space(space, AdoptedSpace).written(wanted)
            writers = [
                each
                for each, had in self._holdings.items()
                if had.state is not _H and np.isin(ids, had.pages.get(space, ids[:0])).any()
            ]
            if writers:
                raise ConflictError(
                    f"{owner}: its prefix has pages of adopted space '{space}' that are {self.state(writers[0])}: a peer may still "
                    f"write them for {writers[0]}; the engine must not take them for a prefix before that is committed"
                )
        holding = self._holdings.setdefault(owner, _Holding(_H))
        for space, ids in read.items():
            before = holding.shared.get(space, ids[:0])
            new = ids[np.isin(ids, before, invert=True)]
            self._space(space, AdoptedSpace).read(new)
            holding.shared[space] = np.concatenate((before, new))
        for space, ids in written.items():
            self._space(space, AdoptedSpace).mark(ids)
        return self._enter(owner, written)

    # ------------------------------------------------------------------------------------- the page cache

    def cache(self, owner: Owner, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take pages from an owner and give them to the page cache, all or nothing: whole pages that nobody writes any more.

        The owner's pages must be held, which proves that no transfer writes them. The owner may read these pages on while the
        `PageCache` counts a reader. Raises ConflictError for other states and for pages that are not the owner's.
        """
        holding = self._of(owner)
        if holding.state is not _H:
            raise ConflictError(f"{owner}: {holding.state} pages cannot be cached, a transfer may still touch them")
        left = {}
        for space, ids in pages.items():
            self._space(space, RunAllocator)
            had = holding.pages.get(space, ids[:0])
            left[space] = had[np.isin(had, ids, invert=True)]
            if len(left[space]) + len(ids) != len(had):
                raise ConflictError(
                    f"{owner}: of {len(ids)} pages of '{space}' that are to be cached {len(had) - len(left[space])} are its own"
                )
        for space, ids in pages.items():
            holding.pages[space] = _read_only(left[space])
            self._in_state[space][_H] -= len(ids)
            self._space(space, RunAllocator).keep(ids)

    def uncache(self, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Make pages free that the page cache has forgotten. Raises IntegrityError for pages that are not cached."""
        for space, ids in pages.items():
            self._space(space, RunAllocator).drop(ids)

    def became_available(self, pages: Counts) -> None:
        """Tell watchers how many pages, which had readers until now, can be evicted or are free."""
        for watcher in self.watchers if any(pages.values()) else ():
            watcher.freed(pages)

    # ------------------------------------------------------------------------------------- changing states

    def move(self, owner: Owner, from_state: PageState, to_state: PageState) -> None:
        """Change the state of all of an owner's pages between held and leased.

        The caller moves leased pages to held when there is proof that no transfer touches them any more. Raises ConflictError when
        the pages are not in `from_state`, or for another transition.
        """
        holding = self._of(owner)
        if holding.state is not from_state or {from_state, to_state} != {_H, _L}:
            raise ConflictError(
                f"{owner}: {holding.state} pages cannot be moved from {from_state} to {to_state}, only between held and leased; "
                "see free(), quarantine() and release_quarantined()"
            )
        self._shift(holding, to_state)

    def free(self, owner: Owner) -> int:
        """Free all pages of an owner, and forget the owner; return their number. Raises ConflictError unless the pages are held."""
        holding = self._of(owner)
        if holding.state is not _H:
            raise ConflictError(
                f"{owner}: {holding.state} pages cannot be freed, a transfer may still touch them{holding.why()}; end the lease or "
                "the quarantine first"
            )
        return self._forget(owner)

    def quarantine(self, owner: Owner, reason: str) -> None:
        """Keep an owner's pages from any use until `release_quarantined`; `reason` tells operators what may still touch them."""
        if not reason:
            raise InvalidInputError(f"{owner}: a quarantine needs a reason")
        holding = self._of(owner)
        if holding.state is not _Q:
            self._shift(holding, _Q)
            self._ending.discard(owner)
        holding.reasons.add(reason)

    def release_quarantined(self, owner: Owner) -> None:
        """Free an owner's quarantined pages, which nothing touches any more. Harmless for an owner that is not quarantined."""
        if self.state(owner) is _Q:
            self._forget(owner)

    def expect_free(self, owner: Owner) -> None:
        """Count the pages of an ending owner in `pages_being_released` until they are free or quarantined."""
        if self._of(owner).state is not _Q:
            self._ending.add(owner)

    # ------------------------------------------------------------------------------------- asking

    def __contains__(self, owner: object) -> bool:
        return owner in self._holdings

    def pages(self, owner: Owner) -> Pages:
        """Return all pages of an owner, in the order in which it got them. Raises NotFoundError when it has none."""
        return dict(self._of(owner).pages)

    def state(self, owner: Owner) -> PageState:
        """Return the state of all pages of an owner; FREE when it has none."""
        return self._holdings[owner].state if owner in self._holdings else _F

    def quarantine_reasons(self) -> dict[str, tuple[Owner, ...]]:
        """Return the reasons of quarantines, each with its owners."""
        found: dict[str, tuple[Owner, ...]] = {}
        for owner, holding in self._holdings.items():
            found |= {reason: (*found.get(reason, ()), owner) for reason in sorted(holding.reasons)}
        return found

    def counts(self) -> dict[IndexSpace, dict[PageState, int]]:
        """Return the number of pages of each space in each state; they add up to the pool."""
        states = self._in_state
        return {at: {_F: one.free, **states[at], _C: one.cached} for at, one in self._spaces.items()}

    def available_pages(self) -> dict[IndexSpace, int]:
        """Return the number of pages of each space that a reservation can have: free ones, and cached ones without a reader."""
        evictable: Counts = {} if self.page_cache is None else self.page_cache.evictable()
        return {space: account.free + evictable.get(space, 0) for space, account in self._spaces.items()}

    def require_possible(self, demand: Counts, *, of: object = "the request") -> None:
        """Raise InvalidInputError when `of` asks for more pages than the pool has."""
        for space, count in demand.items():
            if space not in self._spaces:
                raise InvalidInputError(f"{of} needs pages of '{space}', which this node does not have")
            if count > (page_count := self._spaces[space].page_count):
                raise InvalidInputError(
                    f"{of} needs {count} pages of '{space}', and the whole pool has {page_count}; enlarge the pool or shorten "
                    "the request"
                )

    def pages_being_released(self) -> dict[IndexSpace, int]:
        """Return the number of pages of each space that ending owners will soon free, without quarantined ones."""
        found = dict.fromkeys(self._spaces, 0)
        for owner in self._ending:
            for space, ids in self._of(owner).pages.items():
                found[space] += len(ids)
        return found

    def __repr__(self) -> str:
        lines = (
            f"{space} {' '.join(f'{n} {state}' for state, n in of.items())}" for space, of in self.counts().items()
        )
        return f"<page book: {len(self._holdings)} owners; {', '.join(lines)}>"

    # ------------------------------------------------------------------------------------- inside

    def _of(self, owner: Owner) -> _Holding:
        try:
            return self._holdings[owner]
        except KeyError:
            raise NotFoundError(f"{owner} has no pages on this node") from None

    def _growable(self, owner: Owner) -> _Holding:
        holding = self._of(owner)
        if holding.state is _Q:
            raise ConflictError(f"{owner} gets no further pages: its pages are quarantined{holding.why()}")
        return holding

    def _space(self, space: IndexSpace, kind: type[SpaceT]) -> SpaceT:
        account = self._spaces.get(space)
        if not isinstance(account, kind):
            names = [str(name) for name, one in self._spaces.items() if isinstance(one, kind)]
            raise InvalidInputError(f"'{space}' is not {kind.what} of this node; those are {names}")
        return account

    def _enter(self, owner: Owner, new: Pages) -> Pages:
        holding = self._holdings[owner]
        for space, ids in new.items():
            before = holding.pages.get(space)
            holding.pages[space] = _read_only(ids if before is None else np.concatenate((before, _read_only(ids))))
            self._in_state[space][holding.state] += len(ids)
        return new

    def _shift(self, holding: _Holding, to_state: PageState) -> None:
        for space, ids in holding.pages.items():
            self._in_state[space][holding.state] -= len(ids)
            self._in_state[space][to_state] += len(ids)
        holding.state = to_state

    def _take(self, owner: Owner, demand: Counts, having: Pages, scattered: Counts) -> Pages:
        """Take pages from every space, or from none when one space has too few."""
        accounts = {space: self._space(space, RunAllocator) for space in demand}
        for space, count in demand.items():
            if count < 0:
                raise InvalidInputError(f"{owner}: cannot ask for {count} pages of '{space}'")
        all_of_it = {space: len(having.get(space, ())) + count for space, count in demand.items()}
        self.require_possible(all_of_it, of=owner)
        self._make_free(owner, demand)
        last = {space: int(ids[-1]) for space, ids in having.items() if len(ids)}
        return {
            space: accounts[space].take(count, after=last.get(space), scattered=scattered.get(space, 0))
            for space, count in demand.items()
        }

    def _make_free(self, owner: Owner, demand: Counts) -> None:
        """Evict the pages that `demand` needs beyond the free ones, or raise CapacityError and evict none."""
        short = self._short(demand)
        if not short:
            return
        evictable: Counts = {} if self.page_cache is None else self.page_cache.evictable()
        lacking = {space: count - evictable.get(space, 0) for space, count in short.items()}
        lacking = {space: count for space, count in lacking.items() if count > 0}
        if lacking or self.page_cache is None:
            texts, released = [], self.pages_being_released()
            for space, count in lacking.items():
                account = self._spaces[space]
                cached = (
                    f"{evictable.get(space, 0)} of {account.cached} cached can be evicted, " if account.cached else ""
                )
                texts.append(
                    f"space '{space}' lacks {count} pages ({demand[space]} wanted, {account.free} of {account.page_count} free, "
                    f"{cached}{released[space]} being released, {self._in_state[space][_Q]} quarantined)"
                )
            raise CapacityError(f"{owner}: {'; '.join(texts)}", lacking=lacking)
        self.uncache(self.page_cache.evict(short))
        if left := self._short(demand):
            raise IntegrityError(
                f"the page cache, asked to evict {short} of {evictable}, leaves {left} lacking: {self!r}"
            )

    def _short(self, demand: Counts) -> dict[IndexSpace, int]:
        free = {space: self._spaces[space].free for space in demand}
        return {space: count - free[space] for space, count in demand.items() if count > free[space]}

    def _forget(self, owner: Owner) -> int:
        holding = self._holdings.pop(owner)
        self._ending.discard(owner)
        free = {space: self._spaces[space].free for space in (*holding.pages, *holding.shared)}
        for space, ids in holding.pages.items():
            self._in_state[space][holding.state] -= len(ids)
            self._spaces[space].give(ids)
        for space, ids in holding.shared.items():
            self._space(space, AdoptedSpace).read_no_more(ids)
        freed = {space: self._spaces[space].free - before for space, before in free.items()}
        for watcher in self.watchers:
            watcher.freed(freed)
            watcher.gone(owner)
        return sum(freed.values())


def _read_only(ids: PageIdArray) -> PageIdArray:
    """Callers get the arrays that the book keeps, so nobody may write to them."""
    ids.flags.writeable = False
    return ids
