"""The decode nodes that a prefill node writes to: from their Hello to the end of the acquaintance.

Owns: which decode nodes are known, in which incarnation, and whether every rank worker can write to them. Must not know: sockets
(control delivers and sends), rooms (a listener hears when a node is gone).

A fingerprint is compared here, once, and the first difference is named in the rejection. A peer's manifests are checked in full
before any worker sees them, so that no address is ever computed from something unchecked; that is done off the event loop, and
of what a peer has said only the packed bytes are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from kvbridge.api.status import DecodeNodeStatus
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.features import PEER_FEATURES, Features, agree
from kvbridge.core.wire.messages import REASON_CHARS, Hello, NodeDescription, PeerMessage, Rejected, Welcome
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, NodeToWorker, PeerConnected
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import Introduced, Self, check_introduction
from kvbridge.node.handshake.names import ClaimedName, check_name

log = structlog.get_logger(__name__)


class HandshakeWorkers(Protocol):
    """The rank workers of a prefill node."""

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order. Never raises."""


@dataclass(eq=False)
class _KnownDecode:
    node: Introduced
    key: str
    """The public key that it proved to own; empty without keys."""
    connecting: dict[Rank, int] = field(default_factory=dict)
    """ConnectPeer orders that a rank's worker has not answered yet; only the answer to the last one counts."""
    transports: dict[Rank, tuple[str, ...]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    """Those that were agreed."""

    @property
    def waiting(self) -> list[Rank]:
        """Ranks that are not ready to write to the node."""
        return [rank for rank, orders in self.connecting.items() if orders]


class DecodeNodesListener(Protocol):
    """Who hears what happens to known decode nodes. Never raises."""

    def peer_gone(self, peer: str, reason: str) -> None:
        """An incarnation has ended, or cannot be written to any more."""


class DecodeNodes:
    """The decode nodes that a prefill node writes to."""

    def __init__(
        self,
        myself: Self,
        workers: HandshakeWorkers,
        *,
        inspections: Inspections,
        send: Callable[[str, PeerMessage], None],
        names_of: Callable[[str], frozenset[str]] = lambda _key: frozenset(),
    ) -> None:
        """`names_of(key)`: the instances that the holder of a key may speak for; empty: any. No callback raises."""
        self._myself = myself
        self._workers = workers
        self._inspections = inspections
        self.send = send
        """Queue a message to a known or unknown peer. Never raises."""
        self._names_of = names_of
        self._known: dict[str, _KnownDecode] = {}
        self._listeners: list[DecodeNodesListener] = []

    def watch(self, listener: DecodeNodesListener) -> None:
        """Let somebody hear of nodes that are gone, from now on."""
        self._listeners.append(listener)

    def hello(self, peer: str, message: Hello, *, key: str = "") -> None:
        """A decode node introduces itself, for the first time or after it changed. `key` is what it proved to own.

        What it says of its memory is checked off the loop; until that has ended, `holds` keeps what else it says.
        """
        node = message.node
        try:
            self._check_name(peer, node, key)
            agreed = self._agree(node, message.features)
            known = self._known.get(peer)
            if known is None or known.node != Introduced.of(node):
                work = partial(check_introduction, node, self._myself)
                self._inspections.begin(peer, message, work, partial(self._inspected, peer, message, key))
            else:
                known.features = agreed
                if not known.waiting:
                    self._welcome(peer)
        except BridgeError as error:
            self._refuse(peer, node, error)

    def _agree(self, node: NodeDescription, theirs: Features) -> tuple[str, ...]:
        us, them = f"prefill instance {self._myself.instance}", f"decode instance {node.instance}"
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
            self._refuse(peer, node, error)
        else:
            log.error("inspection_failed", peer=peer, exc_info=error)
            self._reject(peer, BridgeError.code, f"its introduction could not be checked: {type(error).__name__}")

    def _connect(self, peer: str, hello: Hello, key: str) -> None:
        node = hello.node
        self._succeed(peer, node)
        known = self._known.get(peer)
        if known is None:
            known = self._known[peer] = _KnownDecode(Introduced.of(node), key, dict.fromkeys(self._workers.layers, 0))
        known.node, known.features = Introduced.of(node), self._agree(node, hello.features)
        for rank in known.connecting:
            known.connecting[rank] += 1
            self._workers.send(rank, ConnectPeer(peer=peer, ranks=node.ranks))

    def _check_name(self, peer: str, node: NodeDescription, key: str) -> None:
        present = [
            ClaimedName(other.node.instance, other.node.node, other.key)
            for one, other in self._known.items()
            if one != peer
        ]
        check_name(ClaimedName(node.instance, node.node, key), bound_to=self._names_of(key), present=present)
        if node.role is not Role.DECODE or node.incarnation != peer:
            raise InvalidInputError(
                f"hello must come from a decode node in its own name, got role {node.role} as {node.incarnation}"
            )

    def _refuse(self, peer: str, node: NodeDescription, error: BridgeError) -> None:
        log.warning("peer_rejected", peer=peer, instance=node.instance, code=error.code, reason=str(error))
        self._reject(peer, error.code, str(error))

    def _succeed(self, peer: str, node: NodeDescription) -> None:
        """A new incarnation of a known node ends the old one."""
        for old, known in list(self._known.items()):
            if old != peer and (known.node.instance, known.node.node) == (node.instance, node.node):
                self.gone(old, f"it was restarted (now {peer})")

    def _reject(self, peer: str, code: str, reason: str) -> None:
        """Say that we cannot work together (any more); what was under way between us ends first."""
        self.gone(peer, f"it was rejected: {reason}")
        self.send(peer, Rejected(code=code, message=reason[:REASON_CHARS]))

    def worker_connected(self, message: PeerConnected) -> None:
        """A rank worker can write to a peer, or cannot."""
        known = self._known.get(message.peer)
        if known is None or message.rank not in known.connecting:
            return
        known.connecting[message.rank] = max(0, known.connecting[message.rank] - 1)
        if known.connecting[message.rank]:
            return  # the answer to an order that a later one has replaced
        known.transports[message.rank] = message.transports
        if message.error_code:
            log.warning("peer_unreachable", peer=message.peer, rank=str(message.rank), reason=message.error)
            self._reject(message.peer, message.error_code, message.error)
        elif not known.waiting:
            self._welcome(message.peer)

    def _welcome(self, peer: str) -> None:
        myself = self._myself
        welcome = Welcome(
            instance=myself.instance,
            node=myself.node,
            incarnation=myself.incarnation,
            pp_size=myself.pp_size,
            tp_size=myself.tp_size,
            stage_boundaries=myself.stage_boundaries,
            ranks=tuple(self._workers.layers),
            features=PEER_FEATURES,
        )
        self.send(peer, welcome)
        known = self._known[peer]
        log.info("peer_welcomed", peer=peer, instance=known.node.instance, features=known.features)

    def worker_ready(self, rank: Rank) -> None:
        """A rank worker is (back) at work: it has to be connected to everybody."""
        for peer, known in self._known.items():
            known.connecting[rank] = 1
            self._workers.send(rank, ConnectPeer(peer=peer, ranks=known.node.ranks))

    def gone(self, peer: str, reason: str) -> None:
        """Forget a peer that has ended or is silent."""
        self._inspections.drop(peer)
        if self._known.pop(peer, None) is None:
            return
        for rank in self._workers.layers:
            self._workers.send(rank, DisconnectPeer(peer=peer))
        for listener in self._listeners:
            listener.peer_gone(peer, reason)

    def transport(self, peer: str, rank: Rank) -> str:
        """Name what a rank of ours reaches a peer over; several, where its ranks differ, are joined by '+'."""
        known = self._known.get(peer)
        return "+".join(sorted(set(known.transports.get(rank, ())))) if known is not None else ""

    def peers(self) -> tuple[DecodeNodeStatus, ...]:
        """For `/status`."""
        return tuple(
            DecodeNodeStatus(
                instance=known.node.instance,
                node=known.node.node,
                incarnation=peer,
                transports={str(rank): tuple(names) for rank, names in known.transports.items()},
                connecting=tuple(sorted(map(str, known.waiting))),
                features=tuple(known.features),
            )
            for peer, known in self._known.items()
        )

    def known(self) -> list[str]:
        """Incarnations of all known peers."""
        return list(self._known)
