"""The transport agents of one rank: built with all of its memory registered, replaced, retired, closed.

Owns: the agents, in order of preference, and those that have been replaced and are not closed yet. Must not know: peers,
rooms, orders.

An agent is replaced for one of two reasons: a transfer of it would not become quiet, or the node wants every endpoint
of an earlier epoch shut. Its successor is there first, so nobody else waits; the retired one is closed when its other
work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import Transport

PROGRESS_INTERVAL_S = 0.2


TransportFactory = Callable[[str, int], Transport]
"""Builds one transport by its name, for an epoch; raises TransportError with cause and fix when it cannot run here."""


@dataclass(frozen=True)
class RankIdentity:
    """What a worker serves."""

    geometry: ModelGeometry
    manifest: RankManifest
    memory: tuple[Extent, ...]
    transports: tuple[str, ...]
    """Transport names in order of preference."""
    epoch: int = 0
    """Of the first endpoints that are given out."""
    made: tuple[SharedRegion, ...] = ()
    """Device memory that this worker has made, as engines open it."""
    twins: tuple[Region, ...] = ()
    """The node's twins of device pages, at addresses of this process."""
    stage_tp_ranks: tuple[int, ...] = ()
    """The tensor-parallel indices of the ranks of this stage on this node, who share the twins."""
    copy_backend: str = "kernel"
    """`tier.host.backend`."""

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
        self._epochs: dict[str, int] = {}
        """Of each agent's endpoint."""
        self.retired: list[Transport] = []
        """Replaced agents, the oldest first."""
        self.epoch = identity.epoch

    def __getitem__(self, name: str) -> Transport:
        return self._built[name]

    def build(self, name: str) -> None:
        """Make an agent and register all memory with it. Raises TransportError or RegistrationError."""
        self._built[name] = transport = self._create(name, self.epoch)
        self._epochs[name] = self.epoch
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

    def current(self, transport: Transport) -> bool:
        """Whether an agent has not been replaced."""
        return self._built.get(transport.name) is transport

    def replace(self, name: str) -> Transport:
        """Put a new agent in the place of one, which is retired and returned. Raises as `build` does."""
        old = self._built[name]
        self.retired.append(old)
        self.build(name)
        return old

    def renew(self, epoch: int, names: Collection[str] = ()) -> None:
        """Replace every agent, or those of `names`; the new ones give out endpoints of `epoch`. Raises as `build` does."""
        self.epoch = epoch
        for name in list(self._built):
            if not names or name in names:
                self.replace(name)

    def close_retired(self, transport: Transport) -> None:
        """Close an agent that has been replaced, which ends all that it may still have been doing."""
        self.retired.remove(transport)
        transport.close()

    def revoked(self, before_epoch: int, names: Collection[str] = ()) -> bool:
        """Whether nobody can write by means of an endpoint of an earlier epoch, of any transport or of those of `names`.

        Replaced agents count until they are closed.
        """
        concerned = names or self._built.keys()
        return not any(transport.name in concerned for transport in self.retired) and all(
            transport.revoked(before_epoch) for name, transport in self._built.items() if name in concerned
        )

    def endpoints(self) -> tuple[TransportEndpoint, ...]:
        """How peers reach each agent."""
        found = [(transport.endpoint(), self._epochs[name]) for name, transport in self._built.items()]
        return tuple(TransportEndpoint(transport=to.transport, data=to.data, epoch=epoch) for to, epoch in found)

    def close(self) -> None:
        """Tear every agent down, whatever happens to one of them; nothing of this rank moves a byte afterwards."""
        with ExitStack() as stack:
            for transport in dict.fromkeys((*self._built.values(), *self.retired)):
                stack.callback(transport.close)
        self._built.clear()
        self.retired.clear()
