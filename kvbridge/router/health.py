"""How the servers are, and which ones there are where a directory says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from kvbridge.api.directory import InstanceView
from kvbridge.config.router import RouterTimeouts
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Role
from kvbridge.router.servers import Server, Servers

log = structlog.get_logger(__name__)


class HealthWatch:
    """Asks each server for its health, each by itself: one that hangs keeps nobody from hearing of the others."""

    def __init__(self, servers: Servers, check: Callable[[str], Awaitable[str]], timeouts: RouterTimeouts) -> None:
        """`check` is given a server's URL and returns why it is not well, empty when it is."""
        self._servers = servers
        self._check = check
        self._timeouts = timeouts
        self._watched: dict[Server, asyncio.Task[None]] = {}

    def follow(self) -> None:
        """Begin with the servers that are new, and stop with those that have been left out."""
        present = {server for role in Role for server in self._servers.of(role)}
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


class DirectoryWatch:
    """Takes the servers from a directory. One that does not answer leaves those that it named last."""

    def __init__(
        self,
        servers: Servers,
        listings: Iterable[Callable[[], Awaitable[tuple[InstanceView, ...]]]],
        watch: HealthWatch,
    ) -> None:
        """`listings` asks each replica of the directory."""
        self._servers = servers
        self._listings = tuple(listings)
        self._watch = watch
        self.problem = "the directory has not been read yet"
        """Why the servers are those that it named last; empty when they are up to date."""

    async def look(self) -> None:
        """Ask once: the first replica that answers."""
        problems = []
        for listing in self._listings:
            try:
                instances = await listing()
            except BridgeError as error:
                problems.append(str(error))
                continue
            except Exception as error:  # noqa: BLE001 - as above: no answer ends the router
                problems.append(f"{type(error).__name__}: {error}")
                continue
            for role in Role:
                self._servers.use(role, engines_of(instances, role))
            self._watch.follow()
            self.problem = ""
            return
        problem = "; ".join(problems)
        if problem != self.problem:
            log.warning("directory_away", effect="the servers that it named last stay in use", reason=problem)
        self.problem = problem

    async def run(self, interval_s: float) -> None:
        """Ask for ever."""
        while True:
            await self.look()
            await asyncio.sleep(interval_s)


def engines_of(instances: Iterable[InstanceView], role: Role) -> tuple[str, ...]:
    """Return the engines of a role's ready instances, as far as their nodes tell where those answer."""
    found = (node.engine_url for one in instances if one.role is role and one.ready for node in one.nodes)
    return tuple(dict.fromkeys(url.rstrip("/") for url in found if url))
