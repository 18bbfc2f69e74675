"""The fair queue of requests that wait for pages: a pure policy.

The rule. Every client waits in a line of its own, first in, first out. The first of each line is a *head*; its *turn* began when it
became one. Among the heads that fit, the one whose client has the fewest rooms in use is admitted; among equals the one whose turn
began first, so that equals go round in a ring.

Small requests may therefore pass a large head that does not fit, but not for ever. A head during whose turn `max_overtakes` others
were admitted is *firm*: firm heads are looked at first, by the beginning of their turns, and a firm head that does not fit claims
the pages that it needs. Every later request gets only the pages that the claim leaves: `available - claim`, never less than
nothing, in each space. Pages that become available stay for the firm head, which is admitted once enough have been released.

The consequence: while a request is at the head of its line, at most `max_overtakes` others are admitted from the pages that it
needs, and then at most one for each other client that was firm before it. A request that does not wait gets only pages that no
waiting request needs (`lacking`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import IndexSpace

Pages = Mapping[IndexSpace, int]


@dataclass(eq=False)
class Waiting:
    """One request that waits."""

    client: str
    demand: Pages
    """The pages of each space that it needs at once, if no part of its prompt is cached when its turn comes."""
    since_s: float
    turn: int = field(default=-1, init=False)
    """The number of its turn, counted over the queue; -1 before it is a head."""
    granted_before: int = field(default=0, init=False)
    """How many requests the queue had admitted when the turn began."""


EntryT = TypeVar("EntryT", bound=Waiting)


class AdmissionQueue(Generic[EntryT]):
    """Requests that wait, by client. `next` decides; the caller admits and says so with `granted`."""

    def __init__(self, *, max_waiting: int, max_overtakes: int) -> None:
        self._max_waiting = max_waiting
        self._max_overtakes = max_overtakes
        self._lines: dict[str, deque[EntryT]] = {}
        """By client, in the order of their heads' turns."""
        self._demand: dict[IndexSpace, int] = {}
        self._count = 0
        self._turns = 0
        self._granted = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EntryT]:
        return iter([entry for line in self._lines.values() for entry in line])

    def join(self, entry: EntryT, available: Pages) -> None:
        """Put a request at the end of its client's line. Raises CapacityError when too many wait already."""
        if self._count >= self._max_waiting:
            raise CapacityError(
                f"{self._count} requests wait for pages already, as many as may (admission.max_waiting)",
                lacking=self.lacking(entry.demand, available),
            )
        line = self._lines.setdefault(entry.client, deque())
        line.append(entry)
        self._add(entry, 1)
        if len(line) == 1:
            self._begin_turn(entry)

    def leave(self, entry: EntryT) -> None:
        """Take a request out; harmless when it waits no more."""
        line = self._lines.get(entry.client)
        if line is None or entry not in line:
            return
        was_head = line[0] is entry
        line.remove(entry)
        self._add(entry, -1)
        if not line:
            del self._lines[entry.client]
        elif was_head:
            self._begin_turn(line[0])

    def granted(self, entry: EntryT) -> None:
        """Take out a request of `next` that has its pages, and count it in the turns of others."""
        self._granted += 1
        self.leave(entry)

    def next(self, available: Pages, in_use: Mapping[str, int], *, rooms_left: int = 1) -> EntryT | None:
        """Return the request to admit now, None when there is none.

        `in_use`: the rooms of each client; `rooms_left`: how many more rooms there may be.
        """
        if rooms_left <= 0:
            return None
        left, best, fewest = dict(available), None, 0
        for line in self._lines.values():  # in the order of their heads' turns, so that firm heads come first
            head = line[0]
            if _fits(head.demand, left):
                rooms = in_use.get(head.client, 0)
                if self.is_firm(head):
                    return head
                if best is None or rooms < fewest:
                    best, fewest = head, rooms
            elif self.is_firm(head):
                for space, count in head.demand.items():
                    left[space] = max(0, left.get(space, 0) - count)
        return best

    def is_firm(self, head: EntryT) -> bool:
        """Return whether so many requests were admitted during a head's turn that none comes before it any more."""
        return head.turn >= 0 and self._granted - head.granted_before >= self._max_overtakes

    def lacking(self, demand: Pages, available: Pages) -> dict[IndexSpace, int]:
        """Return the pages that are missing until all waiting requests, and then `demand`, fit; empty when none are."""
        missing = {
            space: count + self._demand.get(space, 0) - available.get(space, 0)
            for space, count in demand.items()
            if count
        }
        return {space: count for space, count in missing.items() if count > 0}

    def waiting_of(self, client: str) -> int:
        """Count the waiting requests of a client."""
        return len(self._lines.get(client, ()))

    def by_client(self) -> dict[str, tuple[int, float]]:
        """Return for each client how many requests wait, and since when its head does."""
        return {client: (len(line), line[0].since_s) for client, line in self._lines.items()}

    def oldest_since_s(self) -> float | None:
        """Return the time since which the oldest request waits; None when none does."""
        return min((line[0].since_s for line in self._lines.values()), default=None)

    def _begin_turn(self, head: EntryT) -> None:
        self._turns += 1
        head.turn, head.granted_before = self._turns, self._granted
        self._lines[head.client] = self._lines.pop(head.client)

    def _add(self, entry: EntryT, sign: int) -> None:
        self._count += sign
        for space, count in entry.demand.items():
            self._demand[space] = self._demand.get(space, 0) + sign * count


def _fits(demand: Pages, left: Pages) -> bool:
    for space, count in demand.items():  # noqa: SIM110 - a generator would take three times as long, for each head
        if count > left.get(space, 0):
            return False
    return True
