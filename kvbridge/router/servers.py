"""The prefill and decode servers: which are well, what they are doing, which one is next.

Load is counted in prompt tokens of requests under way, estimated: one long prompt keeps a prefill server busier than many short
ones, and takes as much of a decode server's cache. All of it is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvbridge.core.errors import NotReadyError
from kvbridge.core.ids import Role

LOST_AFTER = 3
"""Checks of a server's health that fail in a row before requests that wait for its first byte are taken away from it. One that
fails keeps new ones away: a server may be busy for a while."""
RETRY_AFTER_S = 2.0
SHOWN = 8
"""Servers that one error names."""


@dataclass(eq=False)
class Server:
    """One server of one role."""

    role: Role
    url: str
    addresses: Any = None
    """Of a prefill server: where decode reaches its node, as it has told it; None: no answer has told it yet."""
    pairs: bool = True
    """Whether it takes the room that a request names, as far as is known."""
    outstanding: int = 0
    """Requests under way."""
    load: int = 0
    """Prompt tokens of these, estimated."""
    turn: int = 0
    """When it was chosen last: of equals the one that has waited longest is next."""
    problem: str = "its health is not known yet"
    """Why no request is sent there; empty: it is well."""
    failures: int = 0
    """Checks of its health that have failed since the last good one."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when whoever waits for a first byte had better ask another one. There is a new one with the next good check."""

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @contextmanager
    def serving(self, size: int) -> Iterator[None]:
        """Count a request of so many prompt tokens while it is under way there."""
        self.outstanding += 1
        self.load += size
        try:
            yield
        finally:
            self.outstanding -= 1
            self.load -= size

    def is_well(self) -> bool:
        """Note a good check of its health. Return whether that is news."""
        news, self.problem, self.failures = bool(self.problem), "", 0
        if self.lost.is_set():
            self.lost = asyncio.Event()
        return news

    def is_ill(self, problem: str) -> bool:
        """Note a check that has failed. Return whether that is news."""
        self.failures += 1
        if self.failures >= LOST_AFTER:
            self.lost.set()
        return self._out(problem)

    def is_gone(self, problem: str) -> bool:
        """Note that nobody listens there: it gets no request before its next good check. Return whether that is news."""
        return self._out(problem)

    def _out(self, problem: str) -> bool:
        # Whoever is started there next has other addresses, and may be another release.
        news, self.problem, self.addresses, self.pairs = not self.problem, problem, None, True
        return news


class Servers:
    """All servers, by role."""

    def __init__(self) -> None:
        self._by_role: dict[Role, dict[str, Server]] = {role: {} for role in Role}
        self._turns = 0

    def use(self, role: Role, urls: Iterable[str]) -> None:
        """Have these servers and no others. What is under way at one that is left out goes on."""
        known = self._by_role[role]
        self._by_role[role] = {url: known.get(url) or Server(role, url) for url in urls}

    def of(self, role: Role) -> tuple[Server, ...]:
        """Return all servers of a role."""
        return tuple(self._by_role[role].values())

    def choose_pair(self, avoid: Collection[Server] = (), *, alone: bool = False) -> tuple[Server | None, Server]:
        """Return a prefill and a decode server, `alone`: only the latter. Those to avoid have failed this request already.

        One process that has both roles does not send to itself: it decodes alone when there is no other. Raises NotReadyError.
        """
        prefill = None if alone else self._choose(Role.PREFILL, avoid)
        others = [one for one in self.of(Role.DECODE) if prefill is not None and one.url == prefill.url]
        try:
            return prefill, self._choose(Role.DECODE, [*avoid, *others])
        except NotReadyError:
            return None, self._choose(Role.DECODE, avoid)

    def _choose(self, role: Role, avoid: Collection[Server]) -> Server:
        """Return the server with the least under way."""
        candidates = [one for one in self.of(role) if not one.problem and one not in avoid]
        if not candidates:
            raise NotReadyError(self._obstacle(role), retry_after_s=RETRY_AFTER_S)
        chosen = min(candidates, key=lambda one: (one.load, one.outstanding, one.turn))
        self._turns += 1
        chosen.turn = self._turns
        return chosen

    def obstacles(self) -> tuple[str, ...]:
        """Return why requests cannot be served now; empty when each role has a server that is well."""
        return tuple(self._obstacle(role) for role in Role if all(one.problem for one in self.of(role)))

    def _obstacle(self, role: Role) -> str:
        servers = self.of(role)
        if not servers:
            return f"the directory has no {role} instance that is ready and tells its engine_url"
        return f"no {role} server is well: " + "; ".join(f"{one.url}: {one.problem}" for one in servers[:SHOWN])
