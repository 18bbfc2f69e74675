"""The nodes that one rank writes to: which of their ranks, by which transport.

Owns: pairings and connections with the ranks of every peer node. Must not know: rooms, orders, when a connection may
be given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.wire.packed_ranks import unpack_rank
from kvbridge.service.rank_transports import RankIdentity, RankTransports
from kvbridge.transport.base import Endpoint, Peer, Transport


@dataclass(eq=False)
class Target:
    """One rank of a connected peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer


@dataclass(eq=False)
class ConnectedPeer:
    """One peer node, by its incarnation."""

    name: str
    ranks: tuple[bytes, ...]
    """Packed, to see later which of them have changed."""
    targets: list[Target] = field(default_factory=list)
    """In the order of `ranks`."""

    @property
    def transports(self) -> tuple[str, ...]:
        """By what each of its ranks is reached."""
        return tuple(target.transport.name for target in self.targets)


class RankPeers:
    """Connections of one rank. `beat` is called before each attempt to connect, which may take a while."""

    def __init__(self, identity: RankIdentity, transports: RankTransports, *, beat: Callable[[], None]) -> None:
        self._identity = identity
        self._transports = transports
        self._beat = beat
        self._peers: dict[str, ConnectedPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: str) -> ConnectedPeer | None:
        """Return a peer that is connected."""
        return self._peers.get(name)

    def connect(self, name: str, ranks: tuple[bytes, ...], previous: ConnectedPeer | None = None) -> ConnectedPeer:
        """Get ready to write to every rank of a node, or to none.

        `previous` is how it was known so far (see `take`); ways to ranks that have not changed are shared with it.

        Raises TransportError when a rank has no transport in common with us, and what `unpack_rank` and `Pairing.create` raise.
        """
        peer = ConnectedPeer(name, ranks)
        try:
            for ordinal in range(len(ranks)):
                kept = self._unchanged(previous, ranks, ordinal) if previous is not None else None
                peer.targets.append(kept or self._target(ranks, ordinal))
        except BridgeError:
            self.disconnect(peer, keep=[previous] if previous is not None else [])
            raise
        self._peers[name] = peer
        return peer

    def take(self, name: str) -> ConnectedPeer | None:
        """Stop using a peer for anything new; the caller disconnects it once nothing is in flight to it."""
        return self._peers.pop(name, None)

    def disconnect(self, peer: ConnectedPeer, *, keep: Iterable[ConnectedPeer] = ()) -> None:
        """Let go of every rank of a peer, except of what connected ones or those in `keep` share with it.

        Nothing is in flight to it.
        """
        shared = {id(target) for other in (*self._peers.values(), *keep) for target in other.targets}
        for target in peer.targets:
            if id(target) not in shared:
                target.transport.disconnect(target.peer)
        peer.targets.clear()

    @staticmethod
    def lose(peer: ConnectedPeer, transport: Transport) -> None:
        """Forget the ranks that were reached through an agent that has been closed."""
        peer.targets = [target for target in peer.targets if target.transport is not transport]

    def using(self, transport: Transport) -> list[ConnectedPeer]:
        """Return the connected peers of which a rank is reached through `transport`."""
        return [peer for peer in self._peers.values() if any(target.transport is transport for target in peer.targets)]

    def _unchanged(self, previous: ConnectedPeer, ranks: tuple[bytes, ...], ordinal: int) -> Target | None:
        if len(previous.ranks) != len(ranks) or previous.ranks[ordinal] != ranks[ordinal]:
            return None
        target = previous.targets[ordinal]
        return target if self._transports.current(target.transport) else None

    def _target(self, ranks: tuple[bytes, ...], ordinal: int) -> Target:
        description = unpack_rank(ranks[ordinal])
        pairing = Pairing.create(
            self._identity.geometry,
            self._identity.manifest,
            description.manifest,
            destination_ordinal=ordinal,
            destination_count=len(ranks),
        )
        offered = {endpoint.transport: endpoint.data for endpoint in description.endpoints}
        failures = []
        for name in self._identity.transports:
            if name not in offered:
                failures.append(f"{name}: the peer does not offer it")
                continue
            transport = self._transports[name]
            self._beat()
            try:
                connected = transport.connect(Endpoint(transport=name, data=offered[name]))
            except BridgeError as error:
                failures.append(f"{name}: {error}")
                continue
            return Target(pairing, transport, connected)
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {description.manifest.rank} of the peer "
            f"({'; '.join(failures)}); give both sides a common one in `transports.order`"
        )
