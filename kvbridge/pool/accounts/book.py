"""Who has which pages of a node, and whether they may be used again.

Owns: the state of every page of every index space of one node; nobody else changes it.
Must not know: memory, transfers, sessions, time. Whether a lease has ended is proved elsewhere and told here.

A page belongs to nobody (free) or to one owner, and all pages of an owner are in one state. `TRANSITIONS` is the
whole rule: pages that a transfer may touch (leased) cannot become free. They first become *held*, by whoever has the
proof that the transfer is over, or *quarantined*, until every reason for the quarantine has been lifted.

The ids of an owned space are chosen here. The ids of an adopted space are chosen by the engine and only noted down
here; what the engine does with the rest of its pages is not known, so "free" then means "not given to the bridge".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, ConflictError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.page_states import TRANSITIONS, Owner, PageState, PageWatcher
from kvbridge.pool.accounts.spaces import AdoptedSpace, OwnedSpace

SpaceT = TypeVar("SpaceT", OwnedSpace, AdoptedSpace)

Pages = dict[IndexSpace, PageIdArray]
"""Page ids of one owner by index space: int32, in the order in which the owner got them."""


_F, _H, _L, _Q = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED


@dataclass(slots=True)
class _Holding:
    """What one owner has."""

    state: PageState
    pages: Pages = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    """Why it is quarantined; empty otherwise."""


class PageBook:
    """The accounts of one node. Not thread-safe: it belongs to the node process's one deciding thread."""

    def __init__(
        self,
        owned: Mapping[IndexSpace, int],
        *,
        adopted: Mapping[IndexSpace, int] | None = None,
    ) -> None:
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
        self._holdings: dict[Owner, _Holding] = {}
        self._in_state = {space: {_H: 0, _L: 0, _Q: 0} for space in self._spaces}
        self._ending: set[Owner] = set()
        self._watchers: list[PageWatcher] = []

    def watch(self, watcher: PageWatcher) -> None:
        """Tell `watcher` from now on."""
        self._watchers.append(watcher)

    # ------------------------------------------------------------------------------------- getting pages

    def reserve(self, owner: Owner, demand: Mapping[IndexSpace, int], *, state: PageState = PageState.HELD) -> Pages:
        """Give a new owner pages of owned spaces, all or nothing; in every space in as few runs as possible.

        Raises CapacityError when they are not free now, InvalidInputError when the pool is too small for them ever to
        be, ConflictError when the owner has pages already.
        """
        self._require_new(owner, state)
        pages = self._take(owner, demand)
        self._holdings[owner] = _Holding(state)
        return self._enter(owner, pages)

    def grow(self, owner: Owner, demand: Mapping[IndexSpace, int]) -> Pages:
        """Give an owner further pages, in the state of those that it has, and return the new ones only. All or nothing.

        They continue the owner's last run where the pages behind it are free. Errors as for `reserve`; NotFoundError
        for an owner that has nothing.
        """
        holding = self._growable(owner)
        return self._enter(owner, self._take(owner, demand, holding.pages))

    def adopt(
        self, owner: Owner, pages: Mapping[IndexSpace, npt.ArrayLike], *, state: PageState = PageState.HELD
    ) -> Pages:
        """Note down pages of adopted spaces that the engine gives to an owner, all or nothing.

        A new owner gets them in `state`; one that has pages already gets them in the state of those. Raises
        PageOutOfBoundsError, InvalidInputError for an id named twice, and ConflictError for a page that another owner
        has.
        """
        if owner in self._holdings:
            self._growable(owner)
        else:
            self._require_new(owner, state)
        spaces = {space: self._space(space, AdoptedSpace) for space in pages}
        checked = {space: spaces[space].check(ids) for space, ids in pages.items()}
        for space, ids in checked.items():
            taken = spaces[space].in_use(ids)
            if len(taken):
                raise ConflictError(
                    f"{owner}: page {taken[0]} of adopted space '{space}' still belongs to "
                    f"{self._owner_of(space, int(taken[0]))}; "
                    f"the engine must not give it away before that room is over"
                )
        for space, ids in checked.items():
            spaces[space].mark(ids)
        self._holdings.setdefault(owner, _Holding(state))
        return self._enter(owner, checked)

    # ------------------------------------------------------------------------------------- changing their state

    def move(self, owner: Owner, from_state: PageState, to_state: PageState) -> None:
        """Change the state of all of an owner's pages between held and leased.

        Leased to held says that there is proof that no transfer touches them any more. Raises ConflictError, and
        changes nothing, when the pages are not in `from_state` or the transition is not in `TRANSITIONS`.
        """
        holding = self._holding(owner)
        if holding.state is not from_state:
            raise ConflictError(
                f"{owner}: pages are {holding.state}, not {from_state}, and cannot be moved to {to_state}"
            )
        if {from_state, to_state} != {_H, _L}:
            raise ConflictError(
                f"{owner}: pages cannot be moved from {from_state} to {to_state}; pages become free by free(), "
                f"quarantined by quarantine() and leave quarantine by release_quarantined()"
            )
        self._shift(holding, to_state)

    def free(self, owner: Owner) -> int:
        """Take all pages of an owner back for use by others and forget it; returns how many. They must be held.

        Raises ConflictError while they are leased or quarantined, NotFoundError when the owner has none.
        """
        holding = self._holding(owner)
        if holding.state is not _H:
            raise ConflictError(
                f"{owner}: {holding.state} pages cannot be freed, a transfer may still touch them"
                + (f" ({', '.join(sorted(holding.reasons))})" if holding.reasons else "")
                + "; end the lease or the quarantine first"
            )
        return self._forget(owner)

    def quarantine(self, owner: Owner, reason: str) -> None:
        """Keep an owner's pages from any use until `reason` has been lifted by `release_quarantined`.

        `reason` is a key such as "worker pp0.tp1 3f2a": the thing that may still touch the pages. Further reasons add
        up.
        """
        if not reason:
            raise InvalidInputError(f"{owner}: a quarantine needs a reason")
        holding = self._holding(owner)
        if holding.state is not _Q:
            self._shift(holding, _Q)
            self._ending.discard(owner)
            for watcher in self._watchers:
                watcher.quarantined(owner)
        holding.reasons.add(reason)

    def release_quarantined(self, reason: str) -> tuple[Owner, ...]:
        """Lift a reason: whatever it named touches no page any more. Owners without further reasons lose their pages.

        Returns those owners. Harmless when nobody is quarantined for that reason.
        """
        released = []
        for owner, holding in list(self._holdings.items()):
            if reason in holding.reasons:
                holding.reasons.remove(reason)
                if not holding.reasons:
                    self._forget(owner)
                    released.append(owner)
        return tuple(released)

    def expect_free(self, owner: Owner) -> None:
        """Say that an owner is ending: its pages count in `pages_being_released` until they are free or quarantined."""
        if self._holding(owner).state is not _Q and owner not in self._ending:
            self._ending.add(owner)
            for watcher in self._watchers:
                watcher.ending(owner)

    # ------------------------------------------------------------------------------------- asking

    def __contains__(self, owner: object) -> bool:
        return owner in self._holdings

    def pages(self, owner: Owner) -> Pages:
        """All pages of an owner, in the order in which it got them. Raises NotFoundError when it has none."""
        return dict(self._holding(owner).pages)

    def state(self, owner: Owner) -> PageState:
        """The state of all pages of an owner; FREE when it has none."""
        return self._holdings[owner].state if owner in self._holdings else _F

    def quarantine_reasons(self) -> dict[str, tuple[Owner, ...]]:
        """Every reason that has not been lifted, with the owners that wait for it."""
        found: dict[str, list[Owner]] = {}
        for owner, holding in self._holdings.items():
            for reason in sorted(holding.reasons):
                found.setdefault(reason, []).append(owner)
        return {reason: tuple(owners) for reason, owners in found.items()}

    def counts(self) -> dict[IndexSpace, dict[PageState, int]]:
        """Pages of each space in each state. They add up to all of them."""
        return {space: {_F: account.free} | self._in_state[space] for space, account in self._spaces.items()}

    def free_pages(self) -> dict[IndexSpace, int]:
        """Free pages of each space."""
        return {space: account.free for space, account in self._spaces.items()}

    def owned_spaces(self) -> tuple[IndexSpace, ...]:
        """Spaces whose pages are given out here."""
        return tuple(space for space, account in self._spaces.items() if isinstance(account, OwnedSpace))

    def require_possible(self, demand: Mapping[IndexSpace, int], *, of: object = "the request") -> None:
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
            for space, ids in self._holdings[owner].pages.items():
                found[space] += len(ids)
        return found

    def check_integrity(self) -> None:
        """Recount everything from the owners' pages. Raises IntegrityError: lost pages, two owners, wrong counts."""
        recount = {space: {_H: 0, _L: 0, _Q: 0} for space in self._spaces}
        for owner, holding in self._holdings.items():
            if (holding.state is _Q) != bool(holding.reasons):
                raise IntegrityError(f"{owner}: is {holding.state} with reasons {sorted(holding.reasons)}")
            for space, ids in holding.pages.items():
                recount[space][holding.state] += len(ids)
        if recount != self._in_state:
            raise IntegrityError(f"pages by state are {recount} when counted again, and {self._in_state} in the book")
        for space, account in self._spaces.items():
            account.check_owners(
                [holding.pages[space] for holding in self._holdings.values() if space in holding.pages]
            )

    def __repr__(self) -> str:
        lines = ", ".join(
            f"{space} {counts[_F]} free {counts[_H]} held {counts[_L]} leased {counts[_Q]} quarantined"
            for space, counts in self.counts().items()
        )
        return f"<page book: {len(self._holdings)} owners; {lines}>"

    # ------------------------------------------------------------------------------------- inside

    def _holding(self, owner: Owner) -> _Holding:
        try:
            return self._holdings[owner]
        except KeyError:
            raise NotFoundError(f"{owner} has no pages on this node") from None

    def _growable(self, owner: Owner) -> _Holding:
        holding = self._holding(owner)
        if holding.state is _Q:
            raise ConflictError(
                f"{owner}: its pages are quarantined ({', '.join(sorted(holding.reasons))}), it gets no further ones"
            )
        return holding

    def _require_new(self, owner: Owner, state: PageState) -> None:
        if owner in self._holdings:
            raise ConflictError(f"{owner} has pages already ({self._holdings[owner].state})")
        if state not in TRANSITIONS[_F]:
            raise InvalidInputError(f"{owner}: pages cannot begin as {state}")

    def _space(self, space: IndexSpace, kind: type[SpaceT]) -> SpaceT:
        account = self._spaces.get(space)
        if not isinstance(account, kind):
            names = [str(name) for name, one in self._spaces.items() if isinstance(one, kind)]
            raise InvalidInputError(f"'{space}' is not {kind.what} of this node; those are {names}")
        return account

    def _take(self, owner: Owner, demand: Mapping[IndexSpace, int], having: Pages | None = None) -> Pages:
        """Take from every space or, when one lacks pages, from none."""
        accounts = {space: self._space(space, OwnedSpace) for space in demand}
        for space, count in demand.items():
            if count < 0:
                raise InvalidInputError(f"{owner}: cannot ask for {count} pages of '{space}'")
        had = {space: len((having or {}).get(space, ())) for space in demand}
        self.require_possible({space: had[space] + count for space, count in demand.items()}, of=owner)
        lacking = {space: count for space, count in demand.items() if count > accounts[space].free}
        if lacking:
            raise CapacityError(
                f"{owner}: " + "; ".join(self._lack(space, count) for space, count in lacking.items()),
                lacking={space: count - accounts[space].free for space, count in lacking.items()},
            )
        last = {space: int(ids[-1]) for space, ids in (having or {}).items() if len(ids)}
        return {space: accounts[space].take(count, after=last.get(space)) for space, count in demand.items()}

    def _lack(self, space: IndexSpace, count: int) -> str:
        free = self._spaces[space].free
        return (
            f"space '{space}' lacks {count - free} pages ({count} wanted, {free} of {self._spaces[space].page_count} free, "
            f"{self.pages_being_released()[space]} being released, {self._in_state[space][_Q]} quarantined)"
        )

    def _enter(self, owner: Owner, new: Pages) -> Pages:
        """Write pages that have just left their space down as the owner's."""
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

    def _forget(self, owner: Owner) -> int:
        holding = self._holdings.pop(owner)
        self._ending.discard(owner)
        for space, ids in holding.pages.items():
            self._in_state[space][holding.state] -= len(ids)
            self._spaces[space].give(ids)
        counts = {space: len(ids) for space, ids in holding.pages.items()}
        for watcher in self._watchers:
            watcher.freed(counts)
            watcher.gone(owner)
        return sum(counts.values())

    def _owner_of(self, space: IndexSpace, page: int) -> str:
        return next(
            (str(owner) for owner, holding in self._holdings.items() if page in holding.pages.get(space, ())), "nobody"
        )


def _read_only(ids: PageIdArray) -> PageIdArray:
    """Ids are handed out as the arrays that the book keeps, so nobody may write to them."""
    ids.flags.writeable = False
    return ids
