"""The nodes that one rank writes to: which of their ranks, by which transport.

Owns: pairings and connections with the ranks of every peer node, attempts to connect, and peers that are not used for anything
new. Must not know: rooms, orders; it is told which peers still have something in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.neighbours import page_operations
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.wire.packed_ranks import unpack_rank
from kvbridge.transport.base import Endpoint, Peer, Pending, Steps, Transport
from kvbridge.worker.transports import RankIdentity, RankTransports

log = structlog.get_logger(__name__)

RANKS_AT_ONCE = 8
"""Of one peer that are being connected; a node has as many as a rule, and one that has more leaves threads to others."""


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
    reached: dict[int, Target] = field(default_factory=dict)
    """By the ordinal of the rank in `ranks`."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Its ranks that are reached, in the order of `ranks`."""
        return tuple(self.reached[ordinal] for ordinal in sorted(self.reached))

    @property
    def transports(self) -> tuple[str, ...]:
        """By what each of its ranks is reached."""
        return tuple(target.transport.name for target in self.targets)


@dataclass(frozen=True)
class _Attempt:
    """A peer of which some ranks are not reached yet."""

    peer: ConnectedPeer
    pending: dict[int, Pending[Target]]
    ordered: bool
    """Whether the node asked for it, and so waits for an answer; else it makes up for an agent that was replaced."""

    def poll(self) -> bool:
        """Push the next connections forward; whether all of them are made. Raises what made one impossible."""
        for ordinal, pending in list(self.pending.items())[:RANKS_AT_ONCE]:
            target = pending.poll()
            if target is not None:
                self.peer.reached[ordinal] = target
                del self.pending[ordinal]
        return not self.pending


class RankPeers:
    """Connections of one rank. A node is connected with all of its ranks, or not at all."""

    def __init__(self, identity: RankIdentity, transports: RankTransports) -> None:
        self._identity = identity
        self._transports = transports
        self._peers: dict[str, ConnectedPeer] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._retired: list[ConnectedPeer] = []
        """Not used for anything new, and let go of once nothing is in flight to them."""

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def busy(self) -> bool:
        """Whether `tend` has something to do."""
        return bool(self._attempts or self._retired)

    def get(self, name: str) -> ConnectedPeer | None:
        """Return a peer that is connected."""
        return self._peers.get(name)

    def connecting(self, name: str) -> bool:
        """Whether an attempt to connect a peer has not ended."""
        return name in self._attempts

    def begin(self, name: str, ranks: tuple[bytes, ...], *, ordered: bool = True) -> None:
        """Get ready to write to every rank of a node, in place of what was known of it. `tend` says how it ends.

        Ways to ranks that have not changed since the node was last connected are kept.
        """
        self.cancel(name)
        self.retire(name)
        previous = next((peer for peer in reversed(self._retired) if peer.name == name), None)
        peer = ConnectedPeer(name, ranks)
        if previous is not None and len(previous.ranks) == len(ranks):
            for ordinal, target in previous.reached.items():
                if previous.ranks[ordinal] == ranks[ordinal] and self._transports.current(target.transport):
                    peer.reached[ordinal] = target
        pending = {
            ordinal: Pending(self._reach(ranks, ordinal))
            for ordinal in range(len(ranks))
            if ordinal not in peer.reached
        }
        self._attempts[name] = _Attempt(peer, pending, ordered)

    def cancel(self, name: str) -> bool:
        """Give up an attempt to connect; whether there was one that the node asked for."""
        attempt = self._attempts.pop(name, None)
        if attempt is None:
            return False
        for pending in attempt.pending.values():
            pending.cancel()
        self._let_go(attempt.peer)
        return attempt.ordered

    def retire(self, name: str) -> None:
        """Stop using a peer for anything new."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._retired.append(peer)

    def tend(self, in_use: Callable[[ConnectedPeer], bool]) -> list[tuple[str, ConnectedPeer | BridgeError]]:
        """Let go of retired peers that are not in use, and push attempts forward.

        Returns those that have ended: with the peer, or with what a rank failed with (TransportError when it has no transport in
        common with us that connects, and what `Pairing.create` raises).
        """
        for peer in [peer for peer in self._retired if not in_use(peer)]:
            self._retired.remove(peer)
            self._let_go(peer)
        ended: list[tuple[str, ConnectedPeer | BridgeError]] = []
        for name, attempt in list(self._attempts.items()):
            try:
                if not attempt.poll():
                    continue
            except BridgeError as error:
                self.cancel(name)
                ended.append((name, error))
            else:
                del self._attempts[name]
                self._peers[name] = attempt.peer
                if attempt.ordered:
                    self._compare_layouts(attempt.peer)
                ended.append((name, attempt.peer))
        return ended

    def replaced(self, transport: Transport) -> None:
        """Reach by its successor whoever was, or was about to be, reached through an agent that has been replaced."""
        self.restart()
        for peer in list(self._peers.values()):
            if any(target.transport is transport for target in peer.targets):
                self.begin(peer.name, peer.ranks, ordered=False)

    def restart(self) -> None:
        """Begin every attempt anew: it may have to do with an agent that has been replaced."""
        for name, attempt in list(self._attempts.items()):
            self.begin(name, attempt.peer.ranks, ordered=attempt.ordered)

    def lose(self, transport: Transport) -> None:
        """Forget the ranks of retired peers that were reached through an agent that has been closed."""
        for peer in self._retired:
            peer.reached = {
                ordinal: target for ordinal, target in peer.reached.items() if target.transport is not transport
            }

    def close(self) -> None:
        """Give up every attempt; the transports are closed next."""
        for name in list(self._attempts):
            self.cancel(name)

    def _compare_layouts(self, peer: ConnectedPeer) -> None:
        """Say once what it costs that the pools of the two sides are laid out differently."""
        counts = [page_operations(target.pairing.groups) for target in peer.targets]
        here, alike = max(counts, key=lambda count: count[0] - count[1], default=(0, 0))
        if here > alike:
            log.warning(
                "layouts_differ",
                rank=str(self._identity.rank),
                peer=peer.name,
                page_operations=here,
                page_operations_alike=alike,
                reason=f"pools lie differently here and there, so each page takes {here} operations where {alike} would do; give "
                "both sides the same `pools.device_layout`, and decode's `pools.host.layout` with it",
            )

    def _let_go(self, peer: ConnectedPeer) -> None:
        """Disconnect every rank of a peer, except what others share with it. Nothing is in flight to it."""
        others = (*self._peers.values(), *self._retired, *(attempt.peer for attempt in self._attempts.values()))
        shared = {id(target) for other in others for target in other.targets}
        for target in peer.targets:
            if id(target) not in shared:
                target.transport.disconnect(target.peer)
        peer.reached.clear()

    def _reach(self, ranks: tuple[bytes, ...], ordinal: int) -> Steps[Target]:
        """Connect one rank by the first transport that both have and that works."""
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
            try:
                connected = yield from transport.connect(Endpoint(transport=name, data=offered[name]))
            except BridgeError as error:
                failures.append(f"{name}: {error}")
                continue
            return Target(pairing, transport, connected)
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {description.manifest.rank} of the peer "
            f"({'; '.join(failures)}); give both sides a common one in `transports.order`"
        )
