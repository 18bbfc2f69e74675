"""The nodes that one rank writes to: which of their ranks, by which transports.

A rank is reached by a *path*: a transport that both sides have. The first of them in our order that works is used, and a peer
counts as connected as soon as each rank has one. The others
are connected after that, beside everything else. A path that was lost is tried again every `RETRY_S`, and used as soon as
it is there: one that connects and is lost again costs one room its second in so long, not each room.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import page_operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.transport.base import Endpoint, Peer, Transport
from kvbridge.worker.rank import RankIdentity, contained
from kvbridge.worker.transports import RankTransports

log = structlog.get_logger(__name__)

RANKS_AT_ONCE = 8
"""Of one peer that are being connected; a node has as many as a rule, and one that has more leaves threads to others."""
STANDBY_AT_ONCE = 4
"""Further paths that are being connected, over all peers: nobody waits for them."""
RETRY_S = 10.0

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in short steps: it yields wherever it has to wait, and returns its result."""


@dataclass(eq=False)
class Target:
    """One path to one rank of a connected peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer
    endpoint: TransportEndpoint
    manifest: RankManifest
    lost: bool = False
    """A transfer has failed by it, and it is used only as long as there is no other."""
    told: dict[tuple[int, int], bool] = field(default_factory=dict)
    """The rooms (with their generation) of which the node knows that they have left it, and whether something was in transit."""


@dataclass(eq=False)
class ConnectedPeer:
    """One peer node, by its incarnation."""

    name: str
    ranks: tuple[bytes, ...]
    """Packed, to see later which of them have changed."""
    paths: dict[int, list[Target]] = field(default_factory=dict)
    """By the ordinal of the rank in `ranks`; those of a rank in order of preference, at least one."""
    wanted: dict[tuple[int, str], float] = field(default_factory=dict)
    """Further paths, by ordinal and transport, and from when on each is to be connected.

    0 for a path that was never there: it is tried once. One that was lost is tried until it is there.
    """

    @property
    def targets(self) -> tuple[Target, ...]:
        """The paths that are used, one to each rank, in the order of `ranks`."""
        return tuple(self.target(ordinal) for ordinal in sorted(self.paths))

    def target(self, ordinal: int) -> Target:
        """The path to one rank that is used."""
        paths = self.paths[ordinal]
        return next((target for target in paths if not target.lost), paths[0])

    @property
    def transports(self) -> tuple[str, ...]:
        """By what each of its ranks is reached."""
        return tuple(target.transport.name for target in self.targets)

    @property
    def standby(self) -> tuple[str, ...]:
        """Transports by which every rank could be reached instead."""
        others = [
            {target.transport.name for target in paths if target is not self.target(ordinal) and not target.lost}
            for ordinal, paths in self.paths.items()
        ]
        return tuple(sorted(set.intersection(*others))) if others else ()

    def all_paths(self) -> Iterator[Target]:
        """Every path to every rank."""
        for paths in self.paths.values():
            yield from paths


class Pending(Generic[T]):
    """Steps that are polled until they have a result or fail. Nothing is done before the first poll."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def poll(self) -> T | None:
        """Do the next step. Returns the result once there is one and raises what made it impossible; each only once."""
        try:
            next(self._steps)
        except StopIteration as end:
            result: T = end.value
            return result
        return None

    def cancel(self) -> None:
        """Give it up, and undo what has been done. Harmless when it has ended."""
        self._steps.close()


@dataclass(frozen=True)
class _Attempt:
    """A peer of which some ranks are not reached yet."""

    peer: ConnectedPeer
    pending: dict[int, Pending[list[Target]]]
    ordered: bool
    """Whether the node asked for it, and so waits for an answer; else it makes up for an agent that was replaced."""
    former: ConnectedPeer | None
    """The peer as it was, whose paths may be kept."""

    def poll(self) -> bool:
        """Push the next connections forward; whether all of them are made. Raises what made one impossible."""
        for ordinal, pending in list(self.pending.items())[:RANKS_AT_ONCE]:
            paths = pending.poll()
            if paths is not None:
                self.peer.paths[ordinal] = paths
                del self.pending[ordinal]
        return not self.pending


class RankPeers:
    """Connections of one rank. A node is connected with all of its ranks, or not at all."""

    def __init__(self, identity: RankIdentity, transports: RankTransports, *, clock: Clock = monotonic) -> None:
        self._identity = identity
        self._transports = transports
        self._clock = clock
        self._peers: dict[str, ConnectedPeer] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._standby: dict[tuple[ConnectedPeer, int, str], Pending[Target]] = {}
        self._retired: list[ConnectedPeer] = []
        """Not used for anything new, and let go of once nothing is in flight to them."""
        self._dropped: list[Target] = []
        """Lost paths, likewise."""
        self.changed: set[ConnectedPeer] = set()
        """Those for which another path has been found; whoever tells the node of it clears this."""

    def __len__(self) -> int:
        return len(self._peers)

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

    def begin(self, name: str, ranks: tuple[bytes, ...], *, ordered: bool = True) -> None:
        """Get ready to write to every rank of a node, in place of what was known of it. `tend` says how it ends.

        Paths that have not changed since the node was last connected are kept.
        """
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
                pending[ordinal] = Pending(self._reach(peer, ordinal, current))
        self._attempts[name] = _Attempt(peer, pending, ordered, former)

    def cancel(self, name: str) -> bool:
        """Give up an attempt to connect; whether there was one that the node asked for."""
        attempt = self._attempts.pop(name, None)
        if attempt is None:
            return False
        for pending in attempt.pending.values():
            self._give_up(pending, attempt.peer)
        self._let_go(attempt.peer)
        return attempt.ordered

    def retire(self, name: str) -> None:
        """Stop using a peer for anything new."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._retired.append(peer)
            self._end_standby(lambda of, _: of is peer)

    def tend(self, in_use: Callable[[ConnectedPeer | Target], bool]) -> list[tuple[str, ConnectedPeer | BridgeError]]:
        """Let go of retired peers and lost paths that are not in use, and push attempts forward.

        Returns those that have ended: with the peer, or with what a rank failed with (TransportError when it has no transport in
        common with us that connects, and what `Pairing.create` raises). An attempt that meets a defect fails like any other.
        """
        ended: list[tuple[str, ConnectedPeer | BridgeError]] = []
        for name, attempt in list(self._attempts.items()):
            try:
                with contained("connecting the peer", rank=str(self._identity.rank), peer=name):
                    if not attempt.poll():
                        continue
                    if attempt.ordered:
                        self._compare_layouts(attempt.peer)
            except BridgeError as error:
                self.cancel(name)
                ended.append((name, error))
            else:
                del self._attempts[name]
                self._peers[name] = attempt.peer
                self._want_standby(attempt.peer)
                ended.append((name, attempt.peer))
        self._let_go_of_unused(in_use)
        self._tend_standby()
        return ended

    def replaced(self, transport: Transport) -> None:
        """Reach by its successor whoever was, or was about to be, reached through an agent that has been replaced."""
        self._end_standby(lambda _, name: name == transport.name)
        for name, attempt in list(self._attempts.items()):
            self.begin(name, attempt.peer.ranks, ordered=attempt.ordered)
        for peer in list(self._peers.values()):
            if any(target.transport is transport for target in peer.all_paths()):
                self.begin(peer.name, peer.ranks, ordered=False)

    def lose(self, transport: Transport) -> None:
        """Forget the paths of retired peers that went through an agent that has been closed."""
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

    # ------------------------------------------------------------------ paths that are lost, and others

    def lost(self, peer: ConnectedPeer, ordinal: int, target: Target) -> None:
        """A transfer has failed by a path: another one is used, as soon as there is one."""
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
            if target not in self._dropped:
                self._dropped.append(target)
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
        """Connect further paths, and take in those that are."""
        now_s = self._clock()
        for peer in self._peers.values():
            for (ordinal, name), due_s in peer.wanted.items():
                if len(self._standby) >= STANDBY_AT_ONCE:
                    break
                if due_s <= now_s and (peer, ordinal, name) not in self._standby:
                    self._standby[peer, ordinal, name] = Pending(self._stand_by(peer, ordinal, name))
        for (peer, ordinal, name), pending in list(self._standby.items()):
            try:
                with contained(
                    "connecting a further path", rank=str(self._identity.rank), peer=peer.name, transport=name
                ):
                    target = pending.poll()
            except BridgeError as error:
                self._no_standby(peer, ordinal, name, error)
                continue
            if target is not None:
                del self._standby[peer, ordinal, name]
                del peer.wanted[ordinal, name]
                peer.paths[ordinal].append(target)
                peer.paths[ordinal].sort(key=lambda path: self._identity.transports.index(path.transport.name))
                self._drop_lost(peer, ordinal)
                self.changed.add(peer)

    def _no_standby(self, peer: ConnectedPeer, ordinal: int, name: str, error: BridgeError) -> None:
        del self._standby[peer, ordinal, name]
        log.info("path_not_connected", rank=str(self._identity.rank), peer=peer.name, transport=name, reason=str(error))
        if self.other_path(peer, ordinal) is None:
            peer.target(ordinal).lost = False  # there is no other, so the next order may try it
        if peer.wanted.pop((ordinal, name)):
            peer.wanted[ordinal, name] = self._clock() + RETRY_S

    def _end_standby(self, concerns: Callable[[ConnectedPeer, str], bool]) -> None:
        """Give up connecting some further paths; peers that are still used want them as before."""
        for key, pending in list(self._standby.items()):
            if concerns(key[0], key[2]):
                self._give_up(pending, key[0])
                del self._standby[key]

    # ------------------------------------------------------------------ connections

    def _held(self) -> set[int]:
        peers = (*self._peers.values(), *self._retired, *(attempt.peer for attempt in self._attempts.values()))
        return {id(target) for peer in peers for target in peer.all_paths()}

    def _let_go_of_unused(self, in_use: Callable[[ConnectedPeer | Target], bool]) -> None:
        formers = [attempt.former for attempt in self._attempts.values()]
        for peer in [peer for peer in self._retired if peer not in formers and not in_use(peer)]:
            self._retired.remove(peer)
            self._let_go(peer)
        for target in [target for target in self._dropped if not in_use(target)]:
            self._dropped.remove(target)
            if id(target) not in self._held():
                self._disconnect(target)

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
        shared = self._held() | {id(target) for target in self._dropped}
        for target in peer.all_paths():
            if id(target) not in shared:
                self._disconnect(target)
        peer.paths.clear()

    def _disconnect(self, target: Target) -> None:
        """Have a transport forget a path. One that it does not forget ends with it: nothing is in flight there."""
        names = {"rank": str(self._identity.rank), "transport": target.transport.name}
        try:
            with contained("disconnecting a peer", **names):
                target.transport.disconnect(target.peer)
        except BridgeError as error:
            log.error("peer_not_forgotten", **names, code=error.code, reason=str(error))

    def _give_up(self, pending: Pending[list[Target]] | Pending[Target], peer: ConnectedPeer) -> None:
        """Cancel an attempt. One that cannot be cancelled ends by its own deadline."""
        names = {"rank": str(self._identity.rank), "peer": peer.name}
        try:
            with contained("giving up an attempt to connect", **names):
                pending.cancel()
        except BridgeError as error:
            log.error("attempt_not_given_up", **names, code=error.code, reason=str(error))

    def _reach(self, peer: ConnectedPeer, ordinal: int, known: list[Target]) -> Steps[list[Target]]:
        """Keep the known paths that are as they were, or connect one rank by the first transport that both have and that works."""
        description = unpack_rank(peer.ranks[ordinal])
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
            destination_count=len(peer.ranks),
        )
        failures = []
        for name in self._identity.transports:
            if name not in offered:
                failures.append(f"{name}: the peer does not offer it")
                continue
            try:
                connected = yield from self._connect(peer, offered[name])
            except BridgeError as error:
                failures.append(f"{name}: {error}")
                continue
            return [Target(pairing, self._transports[name], connected, offered[name], description.manifest)]
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {description.manifest.rank} of the peer "
            f"({'; '.join(failures)}); give both sides a common one in `transports.order`"
        )

    def _stand_by(self, peer: ConnectedPeer, ordinal: int, name: str) -> Steps[Target]:
        """Connect a rank that is reached already by another transport as well."""
        first = peer.target(ordinal)
        endpoints = unpack_rank(peer.ranks[ordinal]).endpoints
        endpoint = next((endpoint for endpoint in endpoints if endpoint.transport == name), None)
        if endpoint is None:
            raise TransportError("the peer does not offer it")
        transport = self._transports[name]
        while any(target.endpoint == endpoint and target.transport is transport for target in self._dropped):
            yield  # the old connection is still in use
        connected = yield from self._connect(peer, endpoint)
        return Target(first.pairing, transport, connected, endpoint, first.manifest)

    def _connect(self, peer: ConnectedPeer, endpoint: TransportEndpoint) -> Steps[Peer]:
        """A transport that meets a defect is one that does not connect: there may be others."""
        transport = self._transports[endpoint.transport]
        with contained("connecting", rank=str(self._identity.rank), peer=peer.name, transport=transport.name):
            connection = transport.connect(Endpoint(transport=endpoint.transport, data=endpoint.data))
            try:
                while (found := connection.poll()) is None:
                    yield
            except GeneratorExit:
                connection.cancel()
                raise
            return found
