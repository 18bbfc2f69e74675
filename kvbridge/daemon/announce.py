"""A node's entry in the directory: registration, heartbeats, and the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

from kvbridge.api.client import DirectoryClient
from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.api.status import RegistrationState
from kvbridge.core.errors import (
    BridgeError,
    DeadlineError,
    NotFoundError,
    NotReadyError,
    PeerError,
    StaleError,
)

log = structlog.get_logger(__name__)

CHANGE_PAUSE_S = 0.2
"""Shortest time between two heartbeats."""
CHANGE_SHARE = 8
"""A change of 1/n of a pool's available pages, as reported or now, is reported before the next heartbeat is due."""


def is_significant(told: Load, now: Load) -> bool:
    """Return whether a load cannot wait for the next heartbeat. Changes of a fuller pool are reported sooner."""
    return any(
        abs(available - told.available_pages.get(space, 0)) * CHANGE_SHARE
        > min(available, told.available_pages.get(space, 0))
        for space, available in now.available_pages.items()
    )


class Announcer:
    """Keeps a node's entry in the directory fresh.

    The node talks to one replica of the directory, and turns to the next without a pause when that replica does not answer. When
    none answers, it asks again at the next interval.
    """

    def __init__(
        self,
        replicas: Sequence[DirectoryClient],
        *,
        registration: Callable[[], NodeRegistration],
        load: Callable[[], Load],
        interval_s: float,
        pause_s: float = CHANGE_PAUSE_S,
    ) -> None:
        """`registration` and `load` describe the node at the moment of the call. Heartbeats are at least `pause_s` apart."""
        self._replicas = replicas
        self._turn = 0
        self._failures = 0
        """Calls in a row without an answer."""
        self._registration = registration
        self._load = load
        self._interval_s = interval_s
        self._pause_s = min(pause_s, interval_s)
        self._told = Load()
        self._obstacles: list[str] = []
        self._registered = False
        """Whether the directory has ever had this node. A known node stays ready until the directory refuses it."""
        self._outdated = True
        """Whether the directory lacks the present registration."""
        self._left = False
        self._calling = asyncio.Lock()
        self._changed = asyncio.Event()
        self.problem = "not registered at bootstrap yet"
        """Why the entry is out of date; empty while it is fresh."""
        self.refusal = ""
        """Why the directory refused this node in its last answer; empty when it did not."""
        self._replaced = False
        """Whether that was because another process has the name now."""

    @property
    def state(self) -> RegistrationState:
        """The known state of this node's entry."""
        if self._left:
            return RegistrationState.NONE
        if self.refusal:
            return RegistrationState.REPLACED if self._replaced else RegistrationState.REFUSED
        return RegistrationState.UNREACHABLE if self.problem else RegistrationState.REGISTERED

    @property
    def obstacle(self) -> str:
        """Why bootstrap sends no request here; empty while it may send some, also while it does not answer."""
        if self.refusal:
            return f"bootstrap refuses this node: {self.refusal}"
        return "" if self._registered or self._left else f"bootstrap does not know this node: {self.problem}"

    async def run(self) -> None:
        """Register and send heartbeats until cancelled, or until `leave`."""
        while not self._left:
            await self.beat()
            await asyncio.sleep(self._pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s - self._pause_s):
                    await self._changed.wait()
            self._changed.clear()

    def look(self, obstacles: Sequence[str] = ()) -> None:
        """Send a heartbeat soon if the obstacles have changed, or the load has changed much. Call this often.

        While the directory does not answer, a changed load waits for the next interval.
        """
        if list(obstacles) != self._obstacles or (not self.problem and is_significant(self._told, self._load())):
            self._obstacles = list(obstacles)
            self._changed.set()

    async def beat(self) -> None:
        """Send one registration or heartbeat."""
        async with self._calling:
            if not self._left:
                await self._beat(self._replicas[self._turn])

    async def _beat(self, directory: DirectoryClient) -> None:
        entry, registers = self._registration(), self._outdated
        try:
            if registers:
                await directory.register(entry)
                self._registered, self._outdated = True, False
                log.info("registered", url=directory.base_url)
            else:
                await directory.heartbeat(entry.instance, entry.node, entry.heartbeat)
            self._told, self._failures = entry.load, 0
            self.problem = self.refusal = ""
        except NotFoundError as error:
            if registers:
                self._refused(f"{directory.base_url} is no bootstrap (bootstrap.url): {error}", error.code)
                self._ask_another()
                return
            self._outdated = True  # the directory is new, or forgot this node
            self._failed(str(error), error.code)
            self._changed.set()
        except (PeerError, DeadlineError, NotReadyError) as error:
            self._failed(str(error), error.code)
            self._ask_another()
        except StaleError as error:
            # A new registration would take the name back, and the two processes would take it from each other for ever.
            self._refused(f"another process has taken this node's name: {error}", error.code, replaced=True)
        except BridgeError as error:
            self._refused(str(error), error.code)

    def _ask_another(self) -> None:
        """Turn to the next replica, at once unless every replica has failed since the last answer."""
        self._turn = (self._turn + 1) % len(self._replicas)
        self._failures += 1
        if self._failures % len(self._replicas):
            self._changed.set()

    def _failed(self, problem: str, code: str) -> None:
        if problem != self.problem:
            log.warning("bootstrap_call_failed", code=code, reason=problem)
        self.problem = problem

    def _refused(self, problem: str, code: str, *, replaced: bool = False) -> None:
        if problem != self.problem:
            log.error("bootstrap_refused", code=code, reason=problem)
        self.problem, self.refusal, self._replaced = problem, problem, replaced

    async def leave(self) -> None:
        """Remove the entry for good: no heartbeat follows."""
        self._left = True
        async with self._calling:
            self.problem = self.refusal = ""  # nobody needs the entry any more
            if not self._registered:
                return
            entry = self._registration()
            try:
                await self._replicas[self._turn].deregister(entry.instance, entry.node, entry.incarnation)
            except BridgeError as error:
                log.warning("bootstrap_call_failed", code=error.code, reason=str(error))

    async def close(self) -> None:
        """Close the connections to the directory."""
        for replica in self._replicas:
            await replica.close()
