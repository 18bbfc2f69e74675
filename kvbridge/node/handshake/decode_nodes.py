"""The decode nodes that a prefill node writes to: from their Hello until they are gone.

A fingerprint is compared here, once, and the first difference is named in the rejection. A peer's manifests are checked in full
before any worker sees them, so that no address is ever computed from something unchecked; that is done off the event loop, and
of what a peer has said only the packed bytes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from functools import partial

import structlog

from kvbridge.api.status import DecodeNodeStatus
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.features import PEER_FEATURES, Features, agree
from kvbridge.core.wire.messages import REASON_CHARS, Hello, NodeDescription, PeerMessage, Rejected
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, PathsChanged, PeerConnected
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import ClaimedName, Self, check_introduction, check_name
from kvbridge.node.workers import WorkerSet
from kvbridge.telemetry.events import PeerAccepted, PeerLost, PeerRejected
from kvbridge.telemetry.path_events import PathLost, PathsFound
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _KnownDecode:
    name: ClaimedName
    ranks: tuple[bytes, ...]
    """What it has said of its memory, packed, as workers get it."""
    connecting: dict[Rank, int] = field(default_factory=dict)
    """ConnectPeer orders that a rank's worker has not answered yet; only the answer to the last one counts."""
    transports: dict[Rank, tuple[str, ...]] = field(default_factory=dict)
    transport: dict[Rank, str] = field(default_factory=dict)
    """The same in one text, which every order of that rank is told with."""
    standby: dict[Rank, tuple[str, ...]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    """Those that were agreed."""

    def reaches(self, rank: Rank, transports: tuple[str, ...]) -> None:
        """A rank of ours reaches the node over these: of several of its ranks, in their order."""
        self.transports[rank] = transports
        self.transport[rank] = "+".join(sorted(set(transports)))

    @property
    def waiting(self) -> list[Rank]:
        """Ranks that are not ready to write to the node."""
        return [rank for rank, orders in self.connecting.items() if orders]


class DecodeNodes:
    """The decode nodes that a prefill node writes to."""

    def __init__(
        self,
        myself: Self,
        workers: WorkerSet,
        *,
        inspections: Inspections,
        send: Callable[[str, PeerMessage], None],
        events: EventStream,
        names_of: Callable[[str], frozenset[str]] = lambda _key: frozenset(),
    ) -> None:
        """`names_of(key)`: the instances that the holder of a key may speak for; empty: any. No callback raises."""
        self._myself = myself
        self._workers = workers
        self._inspections = inspections
        self.send = send
        """Queue a message to a known or unknown peer. Never raises."""
        self._events = events
        self._names_of = names_of
        self._known: dict[str, _KnownDecode] = {}
        self._peer_gone: Callable[[str, str], None]

    def watch(self, peer_gone: Callable[[str, str], None]) -> None:
        """Have `peer_gone(incarnation, reason)` hear of nodes that cannot be written to any more; before anybody says hello."""
        self._peer_gone = peer_gone

    def name(self, peer: str) -> str:
        """Return what a decode node is called, as INSTANCE/NODE; its incarnation when it is not known."""
        known = self._known.get(peer)
        return peer if known is None else str(known.name)

    def hello(self, peer: str, message: Hello, *, key: str = "") -> None:
        """A decode node introduces itself, for the first time or after it changed. `key` is what it proved to own.

        What it says of its memory is checked off the loop; until that has ended, `holds` keeps what else it says.
        """
        node = message.node
        try:
            self._check_name(peer, node, key)
            agreed = self._agree(node, message.features)
            known = self._known.get(peer)
            if known is None or (known.name.node_name, known.ranks) != ((node.instance, node.node), node.ranks):
                work = partial(check_introduction, node, self._myself)
                self._inspections.begin(peer, message, work, partial(self._inspected, peer, message, key))
            else:
                known.features = agreed
                if not known.waiting:
                    self._welcome(peer)
        except BridgeError as error:
            self._reject(peer, error.code, str(error))

    def _agree(self, node: NodeDescription, theirs: Features) -> tuple[str, ...]:
        us, them = f"prefill instance {self._myself.welcome.instance}", f"decode instance {node.instance}"
        return agree(PEER_FEATURES, theirs, us=us, them=them)

    def holds(self, peer: str, message: PeerMessage) -> bool:
        """Whether a message has to wait, and does, until the introduction of its peer has been checked."""
        if peer not in self._inspections:
            return False
        try:
            self._inspections.hold(peer, message)
        except BridgeError as error:
            self._reject(peer, error.code, str(error))
        return True

    def _inspected(self, peer: str, hello: Hello, key: str, error: BaseException | None) -> None:
        node = hello.node
        if error is None:
            try:
                self._check_name(peer, node, key)  # others may have come meanwhile
            except BridgeError as refusal:
                error = refusal
        if error is None:
            self._connect(peer, hello, key)
        elif isinstance(error, BridgeError):
            self._reject(peer, error.code, str(error))
        else:
            log.error("inspection_failed", peer=peer, exc_info=error)
            self._reject(peer, BridgeError.code, f"its introduction could not be checked: {type(error).__name__}")

    def _connect(self, peer: str, hello: Hello, key: str) -> None:
        node = hello.node
        for old, other in list(self._known.items()):
            if old != peer and other.name.node_name == (node.instance, node.node):
                self.gone(old, f"it was restarted (now {peer})")
        known = self._known.get(peer)
        connecting = dict.fromkeys(self._workers.layers, 0) if known is None else known.connecting
        known = self._known[peer] = _KnownDecode(ClaimedName(node.instance, node.node, key), node.ranks, connecting)
        known.features = self._agree(node, hello.features)
        for rank in known.connecting:
            known.connecting[rank] += 1
            self._connect_rank(rank, peer, known)

    def _connect_rank(self, rank: Rank, peer: str, known: _KnownDecode) -> None:
        self._workers.send(rank, ConnectPeer(peer=peer, ranks=known.ranks))

    def _check_name(self, peer: str, node: NodeDescription, key: str) -> None:
        present = [other.name for one, other in self._known.items() if one != peer]
        check_name(ClaimedName(node.instance, node.node, key), bound_to=self._names_of(key), present=present)
        if node.role is not Role.DECODE or node.incarnation != peer:
            raise InvalidInputError(
                f"hello must come from a decode node in its own name, got role {node.role} as {node.incarnation}"
            )

    def _reject(self, peer: str, code: str, reason: str) -> None:
        """Say that we cannot work together (any more); what was under way between us ends first."""
        self._events.emit(PeerRejected(peer=peer, code=code, reason=reason))
        self._forget(peer, f"it was rejected: {reason}")
        self.send(peer, Rejected(code=code, message=reason[:REASON_CHARS]))

    def worker_connected(self, message: PeerConnected) -> None:
        """A rank worker can write to a peer, or cannot."""
        known = self._known.get(message.peer)
        if known is None or message.rank not in known.connecting:
            return
        known.connecting[message.rank] = max(0, known.connecting[message.rank] - 1)
        if known.connecting[message.rank]:
            return  # the answer to an order that a later one has replaced
        known.reaches(message.rank, message.transports)
        if message.error_code:
            self._reject(message.peer, message.error_code, message.error)
        elif not known.waiting:
            self._welcome(message.peer)

    def paths_changed(self, message: PathsChanged) -> None:
        """A rank worker reaches a peer by other transports than it said last."""
        known = self._known.get(message.peer)
        if known is None or message.rank not in known.connecting:
            return
        peer, rank, transports = message.peer, message.rank, message.transports
        known.reaches(rank, transports)
        known.standby[rank] = message.standby
        if message.lost:
            lost = PathLost(peer=peer, rank=rank, transport=message.lost, transports=transports, reason=message.error)
            self._events.emit(lost)
        else:
            self._events.emit(PathsFound(peer=peer, rank=rank, transports=transports, standby=message.standby))

    def _welcome(self, peer: str) -> None:
        self.send(peer, self._myself.welcome)
        known = self._known[peer]
        self._events.emit(PeerAccepted(peer=peer, name=str(known.name), features=known.features))

    def worker_ready(self, rank: Rank) -> None:
        """A rank worker is (back) at work: it has to be connected to everybody."""
        for peer, known in self._known.items():
            known.connecting[rank] = 1
            self._connect_rank(rank, peer, known)

    def gone(self, peer: str, reason: str) -> None:
        """A peer has ended, is silent, or begins anew. Harmless for one that is not known."""
        if peer in self._known:
            self._events.emit(PeerLost(peer=peer, reason=reason))
        self._forget(peer, reason)

    def _forget(self, peer: str, reason: str) -> None:
        self._inspections.drop(peer)
        if self._known.pop(peer, None) is None:
            return
        for rank in self._workers.layers:
            self._workers.send(rank, DisconnectPeer(peer=peer))
        self._peer_gone(peer, reason)

    def transport(self, peer: str, rank: Rank) -> str:
        """Name what a rank of ours reaches a peer over; several, where its ranks differ, are joined by '+'."""
        known = self._known.get(peer)
        return known.transport.get(rank, "") if known is not None else ""

    def peers(self) -> tuple[DecodeNodeStatus, ...]:
        """For `/status`."""
        return tuple(
            DecodeNodeStatus(
                instance=known.name.instance,
                node=known.name.node,
                incarnation=peer,
                transports={str(rank): tuple(names) for rank, names in known.transports.items()},
                standby={str(rank): names for rank, names in known.standby.items()},
                connecting=tuple(sorted(map(str, known.waiting))),
                features=tuple(known.features),
            )
            for peer, known in self._known.items()
        )

    def known(self) -> KeysView[str]:
        """Incarnations of all known peers."""
        return self._known.keys()
