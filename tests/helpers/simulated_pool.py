"""The pages of an engine that brings its own, as engines with a prefix cache keep them; for `room_simulation`.

Requests with a common beginning read the same pages. A page that no request reads keeps what it holds until it is given out again,
and is found by its key until then. So a page that is written by somebody late, or given out too early, is seen at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvbridge.core.errors import BridgeError, CapacityError
from kvbridge.pool.accounts.pages import Owner
from tests.helpers.simulated_memory import Label, Memory
from tests.helpers.simulated_nodes import PAGES, RANKS


class EnginePool:
    """Page ids of one engine. An owner has the pages of one request."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.of: dict[Owner, list[int]] = {}
        self.found: dict[Owner, int] = {}
        """How many pages of its prompt each of them found."""
        self.reused = 0
        self._readers: Counter[int] = Counter()
        self._known: dict[Label, int] = {}

    @property
    def unused(self) -> list[int]:
        """Pages that no request reads; those that hold nothing known come first."""
        known = set(self._known.values())
        return sorted((page for page in range(PAGES) if not self._readers[page]), key=lambda page: page in known)

    def take(self, owner: Owner, labels: Sequence[Label], *, at_most: int, fresh: int | None = None) -> None:
        """Take the pages of a request: those of its beginning that are there, `at_most` so many, and others for the rest.

        `fresh`: so many of these for now (`take_more`).
        """
        if owner in self.of:
            return
        found = []
        for label in labels[:at_most]:
            if label not in self._known:
                break
            found.append(self._known[label])
        rest = len(labels) - len(found)
        lacking = rest if fresh is None else min(fresh, rest)
        others = [page for page in self.unused if page not in found][:lacking]
        if len(others) < lacking:
            raise CapacityError("the engine has no pages left")
        self._forget(others)
        self.of[owner], self.found[owner] = found + others, len(found)
        self._readers.update(self.of[owner])
        self.reused += len(found)

    @contextmanager
    def returned_if_refused(self, owner: Owner) -> Iterator[None]:
        """Pages that a request takes for a call go back when the node refuses that, unless it had them before."""
        fresh = owner not in self.of
        try:
            yield
        except BridgeError:
            if fresh:
                self.give_back(owner)
            raise

    def take_more(self, owner: Owner, count: int) -> None:
        """Take so many more pages for a request."""
        fresh = self.unused[:count]
        if len(fresh) < count:
            raise CapacityError("the engine has no pages left")
        self._forget(fresh)
        self.of[owner] += fresh
        self._readers.update(fresh)

    def _forget(self, pages: Sequence[int]) -> None:
        self._known = {label: page for label, page in self._known.items() if page not in pages}

    def know(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Others find those whole pages of a request from now on that hold, on every rank, what they are to hold."""
        for key, page in zip(keys, self.of.get(owner, ()), strict=False):
            if all(self.memory.get((rank, page)) == key for rank in RANKS):
                self._known.setdefault(key, page)

    def give_back(self, owner: Owner) -> None:
        """A request is over, or its room is; harmless when it has nothing."""
        self._readers.subtract(self.of.pop(owner, ()))
        self.found.pop(owner, None)

    def check(self) -> None:
        """What would be found is what it says."""
        for key, page in self._known.items():
            for rank in RANKS:
                held = self.memory.get((rank, page))
                assert held == key, (
                    f"page {page} of the engine is known as {key!r}, and rank {rank} of it holds {held!r}"
                )
