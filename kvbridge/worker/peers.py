"""The nodes that one rank writes to: which of their ranks it reaches, and by which paths.

A path to a rank is a transport that both sides have. The first one in our order that works is used, and a peer counts as connected
as soon as each of its ranks has a path. Further paths are connected afterwards, beside everything else. A lost path is tried again
every `RETRY_S` and used as soon as it connects, so a flapping path delays one room every `RETRY_S` seconds, not every room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from kvbridge.core.errors import BridgeError, PeerError
from kvbridge.core.plan.planner import page_operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.worker_messages import PathsChanged, PeerConnected
from kvbridge.transport.base import Transport
from kvbridge.worker.paths import Paths, Steps, Target, next_step
from kvbridge.worker.rank import NodeLink, RankIdentity, contained
from kvbridge.worker.transports import RankTransports

log = structlog.get_logger(__name__)

RANKS_AT_ONCE = 8
"""Ranks of one peer that are being connected: as many as a node usually has. A larger peer leaves threads to others."""
STANDBY_AT_ONCE = 4
"""Further paths that are being connected, over all peers: nobody waits for them."""
RETRY_S = 10.0


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

    @property
    def targets(self) -> tuple[Target, ...]:
        """The paths that are used, one to each rank, in the order of `ranks`."""
        return tuple(self.target(ordinal) for ordinal in sorted(self.paths))

    def target(self, ordinal: int) -> Target:
        """Return the path to one rank that is used."""
        paths = self.paths[ordinal]
        return next((target for target in paths if not target.lost), paths[0])

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport by which each of its ranks is reached."""
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


@dataclass(frozen=True)
class _Attempt:
    """A peer of which some ranks are not reached yet."""

    peer: ConnectedPeer
    pending: dict[int, Steps[list[Target]]]
    ordered: bool
    """Whether the node asked for it, and so waits for an answer; else it replaces paths through an agent that was replaced."""
    former: ConnectedPeer | None
    """The peer as it was before, whose paths may be kept."""

    def poll(self) -> bool:
        """Push the next connections forward; whether all of them are made. Raises what made one impossible."""
        for ordinal, pending in list(self.pending.items())[:RANKS_AT_ONCE]:
            paths = next_step(pending)
            if paths is not None:
                self.peer.paths[ordinal] = paths
                del self.pending[ordinal]
        return not self.pending


class RankPeers:
    """Connections of one rank. A node is connected with all of its ranks, or not at all."""

    def __init__(
        self, identity: RankIdentity, transports: RankTransports, link: NodeLink, *, clock: Clock = monotonic
    ) -> None:
        self._identity = identity
        self._transports = transports
        self._link = link
        self._clock = clock
        self._paths = Paths(identity, transports)
        self._peers: dict[str, ConnectedPeer] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._standby: dict[tuple[ConnectedPeer, int, str], Steps[Target]] = {}
        self._retired: list[ConnectedPeer] = []
        """Not used for anything new, and let go of once nothing is in flight to them."""
        self._dropped: list[Target] = []
        """Lost paths, likewise."""

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
                pending[ordinal] = self._paths.reach(name, ranks, ordinal, current)
        self._attempts[name] = _Attempt(peer, pending, ordered, former)

    def cancel(self, name: str) -> bool:
        """Give up an attempt to connect; whether there was one that the node asked for."""
        attempt = self._attempts.pop(name, None)
        if attempt is None:
            return False
        for pending in attempt.pending.values():
            self._paths.give_up(name, pending)
        self._let_go(attempt.peer)
        return attempt.ordered

    def retire(self, name: str) -> None:
        """Stop using a peer for anything new."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._retired.append(peer)
            self._end_standby(lambda of, _: of is peer)

    def tend(self, in_use: Callable[[ConnectedPeer | Target], bool]) -> None:
        """Let go of retired peers and lost paths that are not in use, push attempts forward, and answer those that have ended.

        An attempt that meets a defect fails like any other.
        """
        for name, attempt in list(self._attempts.items()):
            try:
                with contained("connecting the peer", rank=str(self._identity.rank), peer=name):
                    if not attempt.poll():
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
        self._let_go_of_unused(in_use)
        self._tend_standby()

    def replaced(self, transport: Transport) -> None:
        """Reach by its successor every peer that was, or was about to be, reached through an agent that has been replaced."""
        self._end_standby(lambda _, name: name == transport.name)
        for name, attempt in list(self._attempts.items()):
            self._begin(name, attempt.peer.ranks, ordered=attempt.ordered)
        for peer in list(self._peers.values()):
            if any(target.transport is transport for target in peer.all_paths()):
                self._begin(peer.name, peer.ranks, ordered=False)

    def lose(self, transport: Transport) -> None:
        """Forget the paths of retired peers that went through an agent that has been closed."""
        self._dropped[:] = [target for target in self._dropped if target.transport is not transport]
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
        if isinstance(found, ConnectedPeer):
            answer = PeerConnected(rank=self._identity.rank, peer=name, transports=found.transports)
        else:
            code, reason = found.code, str(found)[:REASON_CHARS]
            answer = PeerConnected(rank=self._identity.rank, peer=name, error_code=code, error=reason)
        self._link.send(answer)

    def tell_paths(self, peer: ConnectedPeer, **lost: str) -> None:
        """Tell the node by which transports a peer is reached now, and which one is lost, if any."""
        transports, standby = peer.transports, peer.standby
        self._link.send(
            PathsChanged(rank=self._identity.rank, peer=peer.name, transports=transports, standby=standby, **lost)
        )

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
        """Connect further paths, and take in those that are connected."""
        now_s = self._clock()
        for peer in self._peers.values():
            for (ordinal, name), due_s in peer.wanted.items():
                if len(self._standby) >= STANDBY_AT_ONCE:
                    break
                if due_s <= now_s and (peer, ordinal, name) not in self._standby:
                    rank, first = peer.ranks[ordinal], peer.target(ordinal)
                    steps = self._paths.stand_by(peer.name, rank, name, first, self._dropped)
                    self._standby[peer, ordinal, name] = steps
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
        for key, pending in list(self._standby.items()):
            if concerns(key[0], key[2]):
                self._paths.give_up(key[0].name, pending)
                del self._standby[key]

    # ------------------------------------------------------------------ what is let go of

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
                self._paths.disconnect(target)

    def _let_go(self, peer: ConnectedPeer) -> None:
        """Disconnect every rank of a peer, except what others share with it. Nothing is in flight to it."""
        shared = self._held() | {id(target) for target in self._dropped}
        for target in peer.all_paths():
            if id(target) not in shared:
                self._paths.disconnect(target)
        peer.paths.clear()

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
                reason=f"pools lie differently here and there, so each page takes {here} operations where {alike} would do; give "
                "both sides the same `pools.device_layout`, and decode's `pools.host.layout` with it",
            )
