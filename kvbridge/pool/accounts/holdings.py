"""The pages of each owner, and the number of pages of each space in each state because of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvbridge.core.errors import ConflictError, IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.page_states import Owner, PageState

Pages = dict[IndexSpace, PageIdArray]
"""Page ids of one owner by index space: int32, in the order in which the owner got them."""


@dataclass(slots=True)
class Holding:
    """The pages of one owner."""

    state: PageState
    pages: Pages = field(default_factory=dict)
    shared: Pages = field(default_factory=dict)
    """Pages of adopted spaces that it only reads."""
    reasons: set[str] = field(default_factory=set)
    """Why it is quarantined; empty otherwise."""


class Holdings:
    """All owners that have something. Iterating gives the owners."""

    def __init__(self, spaces: tuple[IndexSpace, ...]) -> None:
        self._of: dict[Owner, Holding] = {}
        self._spaces = spaces
        self._in_state = self._nothing()

    def __contains__(self, owner: object) -> bool:
        return owner in self._of

    def __iter__(self) -> Iterator[Owner]:
        return iter(tuple(self._of))

    def __len__(self) -> int:
        return len(self._of)

    def of(self, owner: Owner) -> Holding:
        """Return the pages of an owner. Raises NotFoundError when it has nothing."""
        try:
            return self._of[owner]
        except KeyError:
            raise NotFoundError(f"{owner} has no pages on this node") from None

    def growable(self, owner: Owner) -> Holding:
        """Return the pages of an owner that may get more. Raises ConflictError while it is quarantined, NotFoundError."""
        holding = self.of(owner)
        if holding.state is PageState.QUARANTINED:
            raise ConflictError(
                f"{owner}: its pages are quarantined ({', '.join(sorted(holding.reasons))}), it gets no further ones"
            )
        return holding

    def state(self, owner: Owner) -> PageState:
        """The state of all pages of an owner; FREE when it has none."""
        return self._of[owner].state if owner in self._of else PageState.FREE

    def open(self, owner: Owner, state: PageState) -> None:
        """Take in an owner, without any page yet; harmless for one that is there."""
        self._of.setdefault(owner, Holding(state))

    def enter(self, owner: Owner, new: Pages) -> Pages:
        """Write pages that have just left their space down as the owner's, and return them."""
        holding = self._of[owner]
        for space, ids in new.items():
            before = holding.pages.get(space)
            holding.pages[space] = _read_only(ids if before is None else np.concatenate((before, _read_only(ids))))
            self._in_state[space][holding.state] += len(ids)
        return new

    def share(self, owner: Owner, space: IndexSpace, ids: PageIdArray) -> PageIdArray:
        """Write pages down that the owner only reads, and return those that it did not read before."""
        holding = self._of[owner]
        before = holding.shared.get(space, ids[:0])
        new = ids[np.isin(ids, before, invert=True)]
        holding.shared[space] = np.concatenate((before, new))
        return new

    def leave(self, owner: Owner, left: Pages) -> None:
        """Cut an owner's pages down to those that are `left`."""
        holding = self._of[owner]
        for space, ids in left.items():
            self._in_state[space][holding.state] -= len(holding.pages.get(space, ids[:0])) - len(ids)
            holding.pages[space] = _read_only(ids)

    def shift(self, owner: Owner, to_state: PageState) -> None:
        """Change the state of all of an owner's pages."""
        holding = self._of[owner]
        for space, ids in holding.pages.items():
            self._in_state[space][holding.state] -= len(ids)
            self._in_state[space][to_state] += len(ids)
        holding.state = to_state

    def pop(self, owner: Owner) -> Holding:
        """Forget an owner and return what it had."""
        holding = self._of.pop(owner)
        for space, ids in holding.pages.items():
            self._in_state[space][holding.state] -= len(ids)
        return holding

    def counts(self, space: IndexSpace) -> dict[PageState, int]:
        """Pages of a space that owners have, by state."""
        return dict(self._in_state[space])

    def reasons(self) -> dict[str, tuple[Owner, ...]]:
        """Every reason of a quarantine, with the owners that wait for it."""
        found: dict[str, list[Owner]] = {}
        for owner, holding in self._of.items():
            for reason in sorted(holding.reasons):
                found.setdefault(reason, []).append(owner)
        return {reason: tuple(owners) for reason, owners in found.items()}

    def with_page(self, space: IndexSpace, page: int) -> list[Owner]:
        """Owners that have a page or read it."""
        return [
            owner
            for owner, holding in self._of.items()
            if page in holding.pages.get(space, ()) or page in holding.shared.get(space, ())
        ]

    def in_transfer(self, space: IndexSpace, ids: PageIdArray) -> Owner | None:
        """An owner of one of `ids` whose pages a transfer may touch, if there is one."""
        if not len(ids):
            return None
        touched = (owner for owner, holding in self._of.items() if holding.state is not PageState.HELD)
        return next((owner for owner in touched if np.isin(ids, self._of[owner].pages.get(space, ids[:0])).any()), None)

    def arrays(self, space: IndexSpace) -> tuple[list[PageIdArray], list[PageIdArray]]:
        """The pages of a space that owners have, and those that they only read, one array an owner."""
        of = self._of.values()
        owned = [holding.pages[space] for holding in of if space in holding.pages]
        return owned, [holding.shared[space] for holding in of if space in holding.shared]

    def check_integrity(self) -> None:
        """Count everything again. Raises IntegrityError for wrong sums, or a quarantine without a reason."""
        recount = self._nothing()
        for owner, holding in self._of.items():
            if (holding.state is PageState.QUARANTINED) != bool(holding.reasons):
                raise IntegrityError(f"{owner}: is {holding.state} with reasons {sorted(holding.reasons)}")
            for space, ids in holding.pages.items():
                recount[space][holding.state] += len(ids)
        if recount != self._in_state:
            raise IntegrityError(f"pages by state are {recount} when counted again, and {self._in_state} in the book")

    def _nothing(self) -> dict[IndexSpace, dict[PageState, int]]:
        states = (PageState.HELD, PageState.LEASED, PageState.QUARANTINED)
        return {space: dict.fromkeys(states, 0) for space in self._spaces}


def _read_only(ids: PageIdArray) -> PageIdArray:
    """Ids are handed out as the arrays that the book keeps, so nobody may write to them."""
    ids.flags.writeable = False
    return ids
