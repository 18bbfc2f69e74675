"""How others find a daemon: the endpoint file beside its sockets, and its entry in the directory.

Owns: both, and the loop of heartbeats. Must not know: rooms.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog

from kvbridge.core.errors import BridgeError, NotFoundError, StaleError
from kvbridge.core.ids import FrozenModel, Role
from kvbridge.http.client import DirectoryClient
from kvbridge.service.ports import Load, NodeHeartbeat, NodeRegistration, PeerAddress, Readiness

log = structlog.get_logger(__name__)

ENDPOINT_FILE = "daemon.json"


class DaemonEndpoint(FrozenModel):
    """What a daemon writes into its runtime directory once its doors are open."""

    role: Role | str
    instance: str = ""
    node: str = ""
    incarnation: str
    pid: int
    http_url: str
    control: PeerAddress | None = None


def write_endpoint(runtime_dir: Path, endpoint: DaemonEndpoint) -> None:
    """Write the endpoint file, whole or not at all."""
    path = runtime_dir / ENDPOINT_FILE
    draft = path.with_suffix(f".{endpoint.incarnation}")
    draft.write_text(endpoint.model_dump_json(indent=2) + "\n")
    draft.rename(path)


def remove_endpoint(runtime_dir: Path, incarnation: str) -> None:
    """Remove the endpoint file if it is this life's."""
    path = runtime_dir / ENDPOINT_FILE
    with contextlib.suppress(OSError, ValueError):
        if DaemonEndpoint.model_validate_json(path.read_text()).incarnation == incarnation:
            path.unlink()


def read_endpoint(runtime_dir: Path) -> DaemonEndpoint | None:
    """Return what a daemon wrote, or None when there is nothing (yet)."""
    try:
        return DaemonEndpoint.model_validate_json((runtime_dir / ENDPOINT_FILE).read_text())
    except (OSError, ValueError):
        return None


class Announcer:
    """Keeps a daemon's entry in the directory fresh. A directory that is away is asked again at the next interval."""

    def __init__(
        self,
        client: DirectoryClient,
        *,
        registration: Callable[[], NodeRegistration],
        readiness: Callable[[], Readiness],
        load: Callable[[], Load],
        interval_s: float,
    ) -> None:
        """The three callables describe the daemon at the moment of the call."""
        self._client = client
        self._registration = registration
        self._readiness = readiness
        self._load = load
        self._interval_s = interval_s
        self._registered = False
        self._left = False
        self._calling = asyncio.Lock()
        self._changed = asyncio.Event()
        self.problem = "not registered at bootstrap yet"
        """Why the entry is not fresh; empty when it is."""

    async def run(self) -> None:
        """Register and send heartbeats until cancelled, or until `leave`."""
        while not self._left:
            await self.beat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._interval_s)
            self._changed.clear()

    def changed(self) -> None:
        """The daemon became ready, or stopped being it: do not wait for the next interval."""
        self._changed.set()

    async def beat(self) -> None:
        """Send one registration or heartbeat."""
        async with self._calling:
            if not self._left:
                await self._beat()

    async def _beat(self) -> None:
        entry = self._registration()
        try:
            if not self._registered:
                await self._client.register(entry)
                self._registered = True
                log.info("registered", instance=entry.instance, node=entry.node)
            else:
                beat = NodeHeartbeat(incarnation=entry.incarnation, ready=self._readiness().ready, load=self._load())
                await self._client.heartbeat(entry.instance, entry.node, beat)
            self.problem = ""
        except NotFoundError:
            self._registered = False  # the directory is new, or forgot us
            self._changed.set()
        except StaleError as error:
            # Registering again would take the name back, and the two would go on taking it from each other.
            self._report(f"another process has taken this node's name: {error}", error.code)
        except BridgeError as error:
            self._report(str(error), error.code)

    def _report(self, problem: str, code: str) -> None:
        if problem != self.problem:
            log.warning("bootstrap_call_failed", code=code, reason=problem)
        self.problem = problem

    async def leave(self) -> None:
        """Take the entry off, for good: no heartbeat follows."""
        self._left = True
        async with self._calling:
            if not self._registered:
                return
            entry = self._registration()
            try:
                await self._client.deregister(entry.instance, entry.node, entry.incarnation)
            except BridgeError as error:
                log.warning("bootstrap_call_failed", code=error.code, reason=str(error))

    async def close(self) -> None:
        """Close the way to the directory."""
        await self._client.close()
