"""The paths of one rank: how a transport's connection to one rank of a peer is made and let go of."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.transport.base import Endpoint, Peer, Transport
from kvbridge.worker.rank import RankIdentity, contained
from kvbridge.worker.transports import RankTransports

log = structlog.get_logger(__name__)

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in short steps: it yields wherever it has to wait, and returns its result. Nothing is done before the first step."""


def next_step(steps: Steps[T]) -> T | None:
    """Do the next step. Returns the result once there is one, and raises what made it impossible; each only once."""
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    return None


@dataclass(eq=False)
class Target:
    """One path to one rank of a connected peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer
    endpoint: TransportEndpoint
    manifest: RankManifest
    lost: bool = False
    """Whether a transfer by it has failed: it is used only as long as there is no other."""
    told: dict[tuple[int, int], bool] = field(default_factory=dict)
    """By room and generation, the rooms that left this path as the node knows, and whether something was in transit."""


class Paths:
    """Makes the paths of one rank, and lets go of them."""

    def __init__(self, identity: RankIdentity, transports: RankTransports) -> None:
        self._identity = identity
        self._transports = transports
        self._rank = str(identity.rank)

    def reach(self, name: str, ranks: Sequence[bytes], ordinal: int, known: Sequence[Target]) -> Steps[list[Target]]:
        """Keep the known paths to a rank that have not changed, or connect it by the first common transport that works.

        Raises TransportError when there is none, and what `Pairing.create` raises.
        """
        description = unpack_rank(ranks[ordinal])
        offered = {endpoint.transport: endpoint for endpoint in description.endpoints}
        kept = [
            target
            for target in known
            if target.endpoint == offered.get(target.transport.name) and target.manifest == description.manifest
        ]
        if kept:
            return kept
        pairing = Pairing.create(
            self._identity.geometry,
            self._identity.manifest,
            description.manifest,
            destination_ordinal=ordinal,
            destination_count=len(ranks),
        )
        failures = []
        for transport in self._identity.transports:
            if transport not in offered:
                failures.append(f"{transport}: the peer does not offer it")
                continue
            try:
                connected = yield from self._connect(name, offered[transport])
            except BridgeError as error:
                failures.append(f"{transport}: {error}")
                continue
            agent = self._transports[transport]
            return [Target(pairing, agent, connected, offered[transport], description.manifest)]
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {description.manifest.rank} of the peer "
            f"({'; '.join(failures)}); give both sides a common one in `transports.order`"
        )

    def stand_by(self, name: str, rank: bytes, transport: str, first: Target, former: list[Target]) -> Steps[Target]:
        """Connect a rank, reached by `first` already, by another transport as well, once no path in `former` uses that endpoint."""
        endpoint = next((each for each in unpack_rank(rank).endpoints if each.transport == transport), None)
        if endpoint is None:
            raise TransportError("the peer does not offer it")
        agent = self._transports[transport]
        while any(target.endpoint == endpoint and target.transport is agent for target in former):
            yield
        connected = yield from self._connect(name, endpoint)
        return Target(first.pairing, agent, connected, endpoint, first.manifest)

    def _connect(self, name: str, endpoint: TransportEndpoint) -> Steps[Peer]:
        """A transport that meets a defect is one that does not connect: there may be others."""
        transport = self._transports[endpoint.transport]
        with contained("connecting", rank=self._rank, peer=name, transport=transport.name):
            connection = transport.connect(Endpoint(transport=endpoint.transport, data=endpoint.data))
            try:
                while (found := connection.poll()) is None:
                    yield
            except GeneratorExit:
                connection.cancel()
                raise
            return found

    def disconnect(self, target: Target) -> None:
        """Have a transport forget a path. If the transport fails, the connection ends with it: nothing is in flight there."""
        names = {"rank": self._rank, "transport": target.transport.name}
        try:
            with contained("disconnecting a peer", **names):
                target.transport.disconnect(target.peer)
        except BridgeError as error:
            log.error("peer_not_forgotten", **names, code=error.code, reason=str(error))

    def give_up(self, name: str, steps: Steps[Any]) -> None:
        """Cancel an attempt to connect. One that cannot be cancelled ends by its own deadline."""
        names = {"rank": self._rank, "peer": name}
        try:
            with contained("giving up an attempt to connect", **names):
                steps.close()
        except BridgeError as error:
            log.error("attempt_not_given_up", **names, code=error.code, reason=str(error))
