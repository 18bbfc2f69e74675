"""The nodes that one rank writes to: which of their ranks it reaches, and by which paths.

A path is a connection to one rank of a peer by a transport that both sides have. The first transport in our order that works is
used, and a peer counts as connected as soon as each of its ranks has a path. Further paths are connected afterwards. A lost path is
tried again every `RETRY_S` and used as soon as it connects, so a flapping path delays one room every `RETRY_S` seconds, not every
room.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from kvbridge.core.errors import BridgeError, PeerError, TransportError
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import page_operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.core.wire.worker_messages import PathsChanged, PeerConnected
from kvbridge.transport.base import Endpoint, Peer, Transport
from kvbridge.worker.rank import NodeLink, RankIdentity, answered, contained, logged
from kvbridge.worker.transports import RankTransports

log = structlog.get_logger(__name__)

RANKS_AT_ONCE = 8
"""Ranks of one peer that are being connected: as many as a node usually has. A larger peer leaves threads to others."""
STANDBY_AT_ONCE = 4
"""Further paths that are being connected, over all peers: nobody waits for them."""
RETRY_S = 10.0

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
    """One path to one rank of a peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer
    endpoint: TransportEndpoint
    manifest: RankManifest
    lost: bool = False
    """Whether a transfer by it has failed: it is used only as long as there is no other."""
    told: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Rooms that left this path as the node knows, by room and generation: whether something was in transit."""


@dataclass(eq=False)
class ConnectedPeer:
    """One peer node, by its incarnation."""

    name: str
    ranks: tuple[bytes, ...]
    """Packed descriptions, so that a later order shows which of them have changed."""
    paths: dict[int, list[Target]] = field(default_factory=dict)
    """By the ordinal of the rank in `ranks`, its paths in order of preference, at least one."""
    wanted: dict[tuple[int, str], float] = field(default_factory=dict)
    """By ordinal and transport, further paths, and the time from which on each is to be connected.

    The time is 0 for a path that was never there: it is tried once. A lost path is tried until it connects.
    """

    def target(self, ordinal: int) -> Target:
        """Return the path to one rank that is used."""
        paths = self.paths[ordinal]
        return next((target for target in paths if not target.lost), paths[0])

    @property
    def targets(self) -> tuple[Target, ...]:
        """The paths that are used, one to each rank, in the order of `ranks`."""
        return tuple(self.target(ordinal) for ordinal in sorted(self.paths))

    @property
    def all_paths(self) -> list[Target]:
        """Every path to every rank."""
        return [target for paths in self.paths.values() for target in paths]

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport by which each rank is reached."""
        return tuple(target.transport.name for target in self.targets)

    @property
    def standby(self) -> tuple[str, ...]:
        """Transports by which every rank could be reached instead."""
        others = [
            {target.transport.name for target in paths if target is not self.target(ordinal) and not target.lost}
            for ordinal, paths in self.paths.items()
        ]
        return tuple(sorted(set.intersection(*others))) if others else ()


@dataclass(frozen=True)
class _Attempt:
    """A peer of which some ranks are not reached yet."""

    peer: ConnectedPeer
    pending: dict[int, Steps[list[Target]]]
    ordered: bool
    """Whether the node waits for an answer; else the attempt replaces paths through an agent that was replaced."""
    former: ConnectedPeer | None
    """The peer as it was before, whose paths may be kept."""


class RankPeers:
    """Connections of one rank. A node is connected with all of its ranks, or not at all."""

    def __init__(
        self, identity: RankIdentity, transports: RankTransports, link: NodeLink, *, clock: Clock = monotonic
    ) -> None:
        self._identity = identity
        self._transports = transports
        self._link = link
        self._clock = clock
        self._peers: dict[str, ConnectedPeer] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._standby: dict[tuple[ConnectedPeer, int, str], Steps[Target]] = {}
        self._retired: list[ConnectedPeer] = []
        """Peers that get no new orders; each is let go of once nothing is in flight to it."""
        self._dropped: list[Target] = []
        """Paths that get no new transfers, likewise."""

    @property
    def busy(self) -> bool:
        """Whether `tend` has something to do."""
        return bool(self._attempts or self._retired or self._standby or self._dropped)

    def get(self, name: str) -> ConnectedPeer | None:
        """Return a peer that is connected."""
        return self._peers.get(name)

    def connecting(self, name: str) -> bool:
        """Whether an attempt to connect a peer has not ended."""
        return name in self._attempts

    def connect(self, name: str, ranks: tuple[bytes, ...]) -> None:
        """Get ready to write to every rank of a node, as the node has ordered, in place of what was known of it.

        Every order is answered. Transfers under way to the peer as it was end by themselves.
        """
        if self.cancel(name):
            self._answer(name, PeerError("a later order has replaced this one"))
        known = self._peers.get(name)
        if known is not None and known.ranks == ranks:
            self._answer(name, known)
        else:
            self._begin(name, ranks, ordered=True)

    def _begin(self, name: str, ranks: tuple[bytes, ...], *, ordered: bool) -> None:
        """Begin an attempt. Paths that have not changed since the node was last connected are kept."""
        self.cancel(name)
        self.retire(name)
        former = next((peer for peer in reversed(self._retired) if peer.name == name), None)
        if former is not None and len(former.ranks) != len(ranks):
            former = None
        peer = ConnectedPeer(name, ranks)
        if former is not None:
            peer.wanted |= former.wanted
        pending = {}
        for ordinal in range(len(ranks)):
            known = former.paths.get(ordinal, []) if former is not None else []
            current = [target for target in known if self._transports.current(target.transport)]
            current = [target for target in current if not target.lost] or current
            if former is not None and current and former.ranks[ordinal] == ranks[ordinal]:
                peer.paths[ordinal] = current
            else:
                pending[ordinal] = self._reach(name, ranks, ordinal, current)
        self._attempts[name] = _Attempt(peer, pending, ordered, former)

    def cancel(self, name: str) -> bool:
        """Give up an attempt to connect; whether there was one that the node asked for."""
        attempt = self._attempts.pop(name, None)
        if attempt is None:
            return False
        for pending in attempt.pending.values():
            self._give_up(name, pending)
        self._drop(attempt.peer.all_paths)
        return attempt.ordered

    def retire(self, name: str) -> None:
        """Stop using a peer for anything new."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._retired.append(peer)
            self._end_standby(lambda of, _: of is peer)

    def tend(self, in_use: Callable[[ConnectedPeer | Target], bool]) -> None:
        """Let go of retired peers and dropped paths that are not in use, push attempts forward, and answer those that have ended.

        An attempt that meets a defect fails like any other.
        """
        self._let_go(in_use)
        for name, attempt in list(self._attempts.items()):
            try:
                with contained("connecting the peer", rank=str(self._identity.rank), peer=name):
                    for ordinal, pending in list(attempt.pending.items())[:RANKS_AT_ONCE]:
                        if (paths := next_step(pending)) is not None:
                            attempt.peer.paths[ordinal] = paths
                            del attempt.pending[ordinal]
                    if attempt.pending:
                        continue
                    if attempt.ordered:
                        self._compare_layouts(attempt.peer)
            except BridgeError as error:
                self.cancel(name)
                self._answer(name, error)
            else:
                del self._attempts[name]
                self._peers[name] = attempt.peer
                self._want_standby(attempt.peer)
                self._answer(name, attempt.peer)
        self._tend_standby()

    def replaced(self, transport: Transport) -> None:
        """Reach by its successor every peer that was, or was about to be, reached through an agent that has been replaced."""
        self._end_standby(lambda _, name: name == transport.name)
        for name, attempt in list(self._attempts.items()):
            self._begin(name, attempt.peer.ranks, ordered=attempt.ordered)
        for peer in list(self._peers.values()):
            if any(target.transport is transport for target in peer.all_paths):
                self._begin(peer.name, peer.ranks, ordered=False)

    def lose(self, transport: Transport) -> None:
        """Forget the paths of retired peers through an agent that is about to be closed."""
        self._dropped = [target for target in self._dropped if target.transport is not transport]
        for peer in self._retired:
            left = {
                ordinal: [target for target in paths if target.transport is not transport]
                for ordinal, paths in peer.paths.items()
            }
            peer.paths = {ordinal: paths for ordinal, paths in left.items() if paths}

    def close(self) -> None:
        """Give up every attempt; the transports are closed next."""
        self._end_standby(lambda *_: True)
        for name in list(self._attempts):
            self.cancel(name)

    # ------------------------------------------------------------------ for the node

    def _answer(self, name: str, found: ConnectedPeer | BridgeError) -> None:
        facts = answered(found) if isinstance(found, BridgeError) else {"transports": found.transports}
        self._link.send(PeerConnected(rank=self._identity.rank, peer=name, **facts))

    def tell_paths(self, peer: ConnectedPeer, **lost: str) -> None:
        """Tell the node by which transports a peer is reached now, and which one is lost, if any."""
        facts = {"transports": peer.transports, "standby": peer.standby, **lost}
        self._link.send(PathsChanged(rank=self._identity.rank, peer=peer.name, **facts))

    def _compare_layouts(self, peer: ConnectedPeer) -> None:
        """Log once what different layouts of the two sides' pools cost."""
        counts = [page_operations(target.pairing.groups) for target in peer.targets]
        here, alike = max(counts, key=lambda count: count[0] - count[1], default=(0, 0))
        if here > alike:
            log.warning(
                "layouts_differ",
                rank=str(self._identity.rank),
                peer=peer.name,
                page_operations=here,
                page_operations_alike=alike,
                reason=f"the two sides lay out their pools differently, so each page takes {here} operations where {alike} would "
                "do; give both sides the same `pools.device_layout`, and decode's `pools.host.layout` with it",
            )

    # ------------------------------------------------------------------ how a path is made

    def _reach(self, name: str, ranks: Sequence[bytes], ordinal: int, known: Sequence[Target]) -> Steps[list[Target]]:
        """Keep the known paths to a rank that have not changed, or connect it by the first common transport that works.

        Raises TransportError when there is none, and what `Pairing.create` raises.
        """
        description = unpack_rank(ranks[ordinal])
        form, offered = description.manifest, {endpoint.transport: endpoint for endpoint in description.endpoints}
        kept = [
            target
            for target in known
            if target.endpoint == offered.get(target.transport.name) and target.manifest == form
        ]
        if kept:
            return kept
        pairing = Pairing.create(
            self._identity.geometry,
            self._identity.manifest,
            form,
            destination_ordinal=ordinal,
            destination_count=len(ranks),
        )
        failures = []
        for transport in self._identity.transports:
            if transport not in offered:
                failures.append(f"{transport}: the peer does not offer it")
                continue
            try:
                connected = yield from self._connected(name, offered[transport])
            except BridgeError as error:
                failures.append(f"{transport}: {error}")
                continue
            return [Target(pairing, self._transports[transport], connected, offered[transport], form)]
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {form.rank} of the peer ({'; '.join(failures)}); give both "
            "sides a common one in `transports.order`"
        )

    def _stand_by(self, name: str, rank: bytes, transport: str, first: Target) -> Steps[Target]:
        """Connect a rank by a second transport, once no dropped path uses its endpoint. `first` reaches the rank already."""
        endpoint = next((each for each in unpack_rank(rank).endpoints if each.transport == transport), None)
        if endpoint is None:
            raise TransportError("the peer does not offer it")
        agent = self._transports[transport]
        while any(target.endpoint == endpoint and target.transport is agent for target in self._dropped):
            yield
        connected = yield from self._connected(name, endpoint)
        return Target(first.pairing, agent, connected, endpoint, first.manifest)

    def _connected(self, name: str, endpoint: TransportEndpoint) -> Steps[Peer]:
        """Connect by one transport. A transport that meets a defect does not connect: there may be others."""
        transport = self._transports[endpoint.transport]
        with contained("connecting", rank=str(self._identity.rank), peer=name, transport=transport.name):
            connection = transport.connect(Endpoint(transport=endpoint.transport, data=endpoint.data))
            try:
                while (found := connection.poll()) is None:
                    yield
            except GeneratorExit:
                connection.cancel()
                raise
            return found

    def _give_up(self, name: str, steps: Steps[Any]) -> None:
        """Cancel an attempt to connect. An attempt that cannot be cancelled ends by its own deadline."""
        work = "giving up an attempt to connect"
        with logged("attempt_not_given_up", work, rank=str(self._identity.rank), peer=name):
            steps.close()

    # ------------------------------------------------------------------ paths that are lost, and others

    def lost(self, peer: ConnectedPeer, ordinal: int, target: Target) -> None:
        """Note that a transfer has failed by a path: another one is used, as soon as there is one."""
        target.lost = True
        for one in {peer, self._peers.get(peer.name, peer)}:
            self._drop_lost(one, ordinal)

    def other_path(self, peer: ConnectedPeer, ordinal: int) -> Target | None:
        """Return a path to a rank that is not lost."""
        found = (path for path in peer.paths.get(ordinal, ()) if not path.lost)
        return next((path for path in found if self._transports.current(path.transport)), None)

    def awaits_path(self, peer: ConnectedPeer, ordinal: int) -> bool:
        """Whether a further path to a rank is being connected."""
        if any(of is peer and number == ordinal for of, number, _ in self._standby):
            return True
        now_s = self._clock()
        due = any(of == ordinal and due_s <= now_s for (of, _), due_s in peer.wanted.items())
        return due and self._peers.get(peer.name) is peer

    def _drop_lost(self, peer: ConnectedPeer, ordinal: int) -> None:
        """Use lost paths no more, where there is another one; they are tried again later."""
        paths = peer.paths.get(ordinal, [])
        if all(target.lost for target in paths):
            return
        for target in [target for target in paths if target.lost]:
            paths.remove(target)
            self._drop([target])
            peer.wanted[ordinal, target.transport.name] = self._clock() + RETRY_S

    def _want_standby(self, peer: ConnectedPeer) -> None:
        for ordinal, paths in peer.paths.items():
            there = {target.transport.name for target in paths}
            for name in self._identity.transports:
                if name in there:
                    peer.wanted.pop((ordinal, name), None)
                else:
                    peer.wanted.setdefault((ordinal, name), 0.0)

    def _tend_standby(self) -> None:
        """Connect further paths, and take in those that are connected."""
        now_s = self._clock()
        for peer in self._peers.values():
            for (ordinal, name), due_s in peer.wanted.items():
                key = peer, ordinal, name
                if len(self._standby) < STANDBY_AT_ONCE and due_s <= now_s and key not in self._standby:
                    self._standby[key] = self._stand_by(peer.name, peer.ranks[ordinal], name, peer.target(ordinal))
        for (peer, ordinal, name), pending in list(self._standby.items()):
            names = {"rank": str(self._identity.rank), "peer": peer.name, "transport": name}
            try:
                with contained("connecting a further path", **names):
                    target = next_step(pending)
            except BridgeError as error:
                del self._standby[peer, ordinal, name]
                log.info("path_not_connected", **names, reason=str(error))
                if self.other_path(peer, ordinal) is None:
                    peer.target(ordinal).lost = False  # there is no other, so the next order may try it
                if peer.wanted.pop((ordinal, name)):
                    peer.wanted[ordinal, name] = self._clock() + RETRY_S
                continue
            if target is not None:
                del self._standby[peer, ordinal, name]
                del peer.wanted[ordinal, name]
                peer.paths[ordinal].append(target)
                peer.paths[ordinal].sort(key=lambda path: self._identity.transports.index(path.transport.name))
                self._drop_lost(peer, ordinal)
                self.tell_paths(peer)

    def _end_standby(self, concerns: Callable[[ConnectedPeer, str], bool]) -> None:
        """Give up connecting some further paths; peers that are still used want them as before."""
        for peer, ordinal, name in [key for key in self._standby if concerns(key[0], key[2])]:
            self._give_up(peer.name, self._standby.pop((peer, ordinal, name)))

    # ------------------------------------------------------------------ what is let go of

    def _drop(self, paths: Iterable[Target]) -> None:
        self._dropped += [target for target in paths if target not in self._dropped]

    def _let_go(self, in_use: Callable[[ConnectedPeer | Target], bool]) -> None:
        """Disconnect what is not in use and not shared with a peer that stays."""
        attempts = self._attempts.values()
        formers = [attempt.former for attempt in attempts]
        for peer in [peer for peer in self._retired if peer not in formers and not in_use(peer)]:
            self._retired.remove(peer)
            self._drop(peer.all_paths)
        peers = (*self._peers.values(), *self._retired, *(attempt.peer for attempt in attempts))
        held = {id(target) for peer in peers for target in peer.all_paths} if self._dropped else ()
        for target in [target for target in self._dropped if not in_use(target)]:
            self._dropped.remove(target)
            if id(target) not in held:
                names = {"rank": str(self._identity.rank), "transport": target.transport.name}
                with logged("peer_not_forgotten", "disconnecting a peer", **names):
                    target.transport.disconnect(target.peer)
