"""The transport agents of one rank: built with all of its memory registered, torn down, built again.

Owns: the agents, in order of preference. Must not know: peers, rooms, orders.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvbridge.core.clock import Clock
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.transport.base import Memory, Transport

PROGRESS_INTERVAL_S = 0.2


class TransportFactory(Protocol):
    """Builds one transport by its name; called again when one has to be replaced."""

    def __call__(self, name: str, /) -> Transport:
        """Raises TransportError with cause and fix when it cannot run here."""


@dataclass(frozen=True)
class RankIdentity:
    """What a worker serves."""

    geometry: ModelGeometry
    manifest: RankManifest
    memory: tuple[Memory, ...]
    transports: tuple[str, ...]
    """Transport names in order of preference."""

    @property
    def rank(self) -> Rank:
        """The worker's place in its instance."""
        return self.manifest.rank


class RankTransports:
    """All agents of one rank. `report(done_bytes, total_bytes)` hears how far registering one agent's memory has come."""

    def __init__(
        self,
        identity: RankIdentity,
        create: TransportFactory,
        *,
        report: Callable[[int, int], None],
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._create = create
        self._report = report
        self._clock = clock
        self._built: dict[str, Transport] = {}

    def __getitem__(self, name: str) -> Transport:
        return self._built[name]

    def build(self, name: str) -> None:
        """Make an agent and register all memory with it. Raises TransportError or RegistrationError."""
        self._built[name] = transport = self._create(name)
        pieces = self._identity.memory
        total_bytes = sum(piece.length_bytes for piece in pieces)
        done_bytes = 0
        reported_s = self._clock()
        for piece in pieces:
            transport.register([piece])
            done_bytes += piece.length_bytes
            if self._clock() - reported_s >= PROGRESS_INTERVAL_S or done_bytes == total_bytes:
                reported_s = self._clock()
                self._report(done_bytes, total_bytes)

    def tear_down(self, name: str) -> None:
        """Close an agent, which ends all that it may still have been doing; `build` makes its successor."""
        self._built.pop(name).close()

    def endpoints(self) -> tuple[TransportEndpoint, ...]:
        """How peers reach each agent."""
        found = [transport.endpoint() for transport in self._built.values()]
        return tuple(TransportEndpoint(transport=endpoint.transport, data=endpoint.data) for endpoint in found)

    def close(self) -> None:
        """Tear every agent down, whatever happens to one of them; nothing of this rank moves a byte afterwards."""
        with ExitStack() as stack:
            for transport in self._built.values():
                stack.callback(transport.close)
        self._built.clear()
