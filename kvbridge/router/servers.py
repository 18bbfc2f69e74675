"""The prefill and decode servers: which are well, what they are doing, which one is next, and who asks how they are.

Load is counted in prompt tokens of requests under way, estimated: one long prompt keeps a prefill server busier than many short
ones, and takes as much of a decode server's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvbridge.api.directory import InstanceView
from kvbridge.config.schema import RouterTimeouts
from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.core.ids import Role

log = structlog.get_logger(__name__)

LOST_AFTER = 3
"""Checks of a server's health that fail in a row before requests that wait for its first byte are taken away from it. One failure
keeps new requests away: a server may be busy for a while."""
RETRY_AFTER_S = 2.0
SHOWN = 8
"""Servers that one error names."""


@dataclass(eq=False)
class Server:
    """One server of one role."""

    role: Role
    url: str
    addresses: Any = None
    """Where decode reaches a prefill server's node, as it has told it; None: no answer has told it yet."""
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
    """Set when callers that wait for a first byte had better ask another server. There is a new one with the next good check."""

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
        """Note a failed check of its health. Return whether that is news."""
        self.failures += 1
        if self.failures >= LOST_AFTER:
            self.lost.set()
        return self.is_gone(problem)

    def is_gone(self, problem: str) -> bool:
        """Send no request there before its next good check. Return whether that is news."""
        # A server that is started there next has other addresses, and may be another release.
        news, self.problem, self.addresses, self.pairs = not self.problem, problem, None, True
        return news


class Servers:
    """All servers, by role."""

    def __init__(self) -> None:
        self._by_role: dict[Role, dict[str, Server]] = {role: {} for role in Role}
        self._turns = 0

    def use(self, role: Role, urls: Iterable[str]) -> None:
        """Have these servers and no others. Requests under way at a server that is left out go on."""
        known = self._by_role[role]
        self._by_role[role] = {url: known.get(url) or Server(role, url) for url in urls}

    def of(self, role: Role) -> tuple[Server, ...]:
        """Return all servers of a role."""
        return tuple(self._by_role[role].values())

    def all(self) -> list[Server]:
        """Return the servers of both roles."""
        return [server for role in Role for server in self.of(role)]

    def choose_pair(self, avoid: Collection[Server] = (), *, alone: bool = False) -> tuple[Server | None, Server]:
        """Return a prefill and a decode server, `alone`: only the latter. Servers to avoid have failed this request already.

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


Listing = Callable[[], Awaitable[tuple[InstanceView, ...]]]


class ServerWatch:
    """Asks each server for its health, and a directory for the servers where there is one.

    Each server is asked by itself, so one that hangs keeps nobody from hearing of the others. When the directory does not answer,
    the servers that it named last stay in use.
    """

    def __init__(
        self,
        servers: Servers,
        check: Callable[[str], Awaitable[str]],
        timeouts: RouterTimeouts,
        listings: Iterable[Listing] = (),
    ) -> None:
        """`check` is given a server's URL and returns why it is not well, empty when it is. `listings` asks each replica."""
        self._servers = servers
        self._check = check
        self._timeouts = timeouts
        self._listings = tuple(listings)
        self._watched: dict[Server, asyncio.Task[None]] = {}
        self.problem = "the directory has not been read yet" if self._listings else ""
        """Why the servers are those that the directory named last; empty when they are up to date."""

    def follow(self) -> None:
        """Begin with the servers that are new, and stop with those that have been left out."""
        present = set(self._servers.all())
        for server in self._watched.keys() - present:
            self._watched.pop(server).cancel()
        for server in present - self._watched.keys():
            self._watched[server] = asyncio.create_task(self._watch(server), name=f"health of {server}")

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._watched.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            await self.look(server)
            await asyncio.sleep(self._timeouts.health_interval_s)

    async def look(self, server: Server) -> None:
        """Ask a server once."""
        try:
            async with asyncio.timeout(self._timeouts.health_s):
                problem = await self._check(server.url)
        except TimeoutError:
            problem = f"/health was not answered within {self._timeouts.health_s:g} s (timeouts.health_s)"
        except Exception as error:  # noqa: BLE001 - a URL comes from a node: one that nobody can ask must not end the asking
            problem = f"it cannot be asked: {type(error).__name__}: {error}"
        if not problem and server.is_well():
            log.info("server_is_well", peer_role=server.role.value, url=server.url)
        elif problem and server.is_ill(problem):
            log.warning("server_is_out", peer_role=server.role.value, url=server.url, reason=problem)

    async def run(self) -> None:
        """Ask the directory for ever."""
        while True:
            await asyncio.sleep(self._timeouts.health_interval_s)
            await self.read_directory()

    async def read_directory(self) -> None:
        """Take the servers from the first replica that answers."""
        problems = []
        for listing in self._listings:
            try:
                instances = await listing()
            except Exception as error:  # noqa: BLE001 - no answer ends the router
                problems.append(str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}")
                continue
            for role in Role:
                self._servers.use(role, _engines_of(instances, role))
            self.follow()
            self.problem = ""
            return
        problem = "; ".join(problems)
        if problem != self.problem:
            log.warning("directory_away", effect="the servers that it named last stay in use", reason=problem)
        self.problem = problem


def _engines_of(instances: Iterable[InstanceView], role: Role) -> tuple[str, ...]:
    """Return the engines of a role's ready instances, as far as their nodes tell where those answer."""
    found = (node.engine_url for one in instances if one.role is role and one.ready for node in one.nodes)
    return tuple(dict.fromkeys(url.rstrip("/") for url in found if url))
