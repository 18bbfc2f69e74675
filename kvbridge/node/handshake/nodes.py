"""How nodes get to know each other before the first room: hello, welcome, and the end of an acquaintance.

Owns: which peer nodes are known, in which incarnation, and whether every rank worker can write to them. Must not
know: sockets (control delivers and sends), rooms (they ask `met`, and are told when something changed).

A fingerprint is compared here, once, and the first difference is named in the rejection. A peer's manifests are
checked in full before any worker sees them, so that no address is ever computed from something unchecked; that is done
off the event loop, and of what a peer has said only the packed bytes are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from kvbridge.api.rooms import PeerAddress
from kvbridge.core.errors import BridgeError, InvalidInputError, PeerError, error_codes
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import (
    MAX_PACKED_NODE_BYTES,
    REASON_CHARS,
    Hello,
    NodeDescription,
    PeerMessage,
    Rejected,
    Welcome,
)
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, NodeToWorker, PeerConnected
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import Introduced, Self, check_introduction
from kvbridge.node.handshake.names import Bearer, check_name
from kvbridge.node.receiver.room import KnownNode

log = structlog.get_logger(__name__)

FORMER_KEPT = 1_024
"""Addresses of which the incarnation is remembered that was met there last."""


class MeetingWorkers(Protocol):
    """The rank workers of a prefill node."""

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order. Never raises."""


# ------------------------------------------------------------------------------------------- prefill side


@dataclass(eq=False)
class _KnownDecode:
    node: Introduced
    key: str
    """The public key that it proved to own; empty without keys."""
    connecting: dict[Rank, int] = field(default_factory=dict)
    """ConnectPeer orders that a rank's worker has not answered yet; only the answer to the last one counts."""
    transports: dict[Rank, tuple[str, ...]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[Rank]:
        """Ranks that are not ready to write to the node."""
        return [rank for rank, orders in self.connecting.items() if orders]


class DecodeNodes:
    """The decode nodes that a prefill node writes to."""

    def __init__(
        self,
        myself: Self,
        workers: MeetingWorkers,
        *,
        inspections: Inspections,
        send: Callable[[str, PeerMessage], None],
        on_gone: Callable[[str, str], None],
        names_of: Callable[[str], frozenset[str]] = lambda _key: frozenset(),
    ) -> None:
        """`on_gone(peer, reason)` is called when a peer's life has ended or it cannot be written to any more.

        `names_of(key)`: the instances that the holder of a key may speak for; empty: any. No callback raises.
        """
        self._myself = myself
        self._workers = workers
        self._inspections = inspections
        self._send = send
        self._on_gone = on_gone
        self._names_of = names_of
        self._known: dict[str, _KnownDecode] = {}

    def hello(self, peer: str, message: Hello, *, key: str = "") -> None:
        """A decode node introduces itself, for the first time or after it changed. `key` is what it proved to own.

        What it says of its memory is checked off the loop; until that has ended, `holds` keeps what else it says.
        """
        node = message.node
        try:
            self._check_bearer(peer, node, key)
            known = self._known.get(peer)
            if known is None or known.node != Introduced.of(node):
                work = partial(check_introduction, node, self._myself)
                self._inspections.begin(peer, message, work, partial(self._inspected, peer, node, key))
            elif not known.waiting:
                self._welcome(peer)
        except BridgeError as error:
            self._refuse(peer, node, error)

    def holds(self, peer: str, message: PeerMessage) -> bool:
        """Whether a message has to wait, and does, until the introduction of its peer has been checked."""
        if peer not in self._inspections:
            return False
        try:
            self._inspections.hold(peer, message)
        except BridgeError as error:
            self._reject(peer, error.code, str(error))
        return True

    def _inspected(self, peer: str, node: NodeDescription, key: str, error: BaseException | None) -> None:
        if error is None:
            try:
                self._check_bearer(peer, node, key)  # others may have come meanwhile
            except BridgeError as refusal:
                error = refusal
        if error is None:
            self._connect(peer, node, key)
        elif isinstance(error, BridgeError):
            self._refuse(peer, node, error)
        else:
            log.error("inspection_failed", peer=peer, exc_info=error)
            self._reject(peer, BridgeError.code, f"its introduction could not be checked: {type(error).__name__}")

    def _connect(self, peer: str, node: NodeDescription, key: str) -> None:
        self._succeed(peer, node)
        known = self._known.get(peer)
        if known is None:
            known = self._known[peer] = _KnownDecode(Introduced.of(node), key, dict.fromkeys(self._workers.layers, 0))
        known.node = Introduced.of(node)
        for rank in known.connecting:
            known.connecting[rank] += 1
            self._workers.send(rank, ConnectPeer(peer=peer, ranks=node.ranks))

    def _check_bearer(self, peer: str, node: NodeDescription, key: str) -> None:
        present = [
            Bearer(other.node.instance, other.node.node, other.key) for one, other in self._known.items() if one != peer
        ]
        check_name(Bearer(node.instance, node.node, key), bound_to=self._names_of(key), present=present)
        if node.role is not Role.DECODE or node.incarnation != peer:
            raise InvalidInputError(
                f"hello must come from a decode node in its own name, got role {node.role} as {node.incarnation}"
            )

    def _refuse(self, peer: str, node: NodeDescription, error: BridgeError) -> None:
        log.warning("peer_rejected", peer=peer, instance=node.instance, code=error.code, reason=str(error))
        self._reject(peer, error.code, str(error))

    def _succeed(self, peer: str, node: NodeDescription) -> None:
        """A new life of a known node ends the old one."""
        for old, known in list(self._known.items()):
            if old != peer and (known.node.instance, known.node.node) == (node.instance, node.node):
                self.gone(old, f"it was restarted (now {peer})")

    def _reject(self, peer: str, code: str, reason: str) -> None:
        """Say that we cannot work together (any more); what was under way between us ends first."""
        self.gone(peer, f"it was rejected: {reason}")
        self._send(peer, Rejected(code=code, message=reason[:REASON_CHARS]))

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
        )
        self._send(peer, welcome)
        log.info("peer_welcomed", peer=peer, instance=self._known[peer].node.instance)

    def worker_ready(self, rank: Rank) -> None:
        """A rank worker is (back) at work: it has to be connected to everybody."""
        for peer, known in self._known.items():
            known.connecting[rank] = 1
            self._workers.send(rank, ConnectPeer(peer=peer, ranks=known.node.ranks))

    def gone(self, peer: str, reason: str) -> None:
        """Forget a peer whose life has ended or who is silent."""
        self._inspections.drop(peer)
        if self._known.pop(peer, None) is None:
            return
        for rank in self._workers.layers:
            self._workers.send(rank, DisconnectPeer(peer=peer))
        self._on_gone(peer, reason)

    def transport(self, peer: str, rank: Rank) -> str:
        """Name what a rank of ours reaches a peer over; several, where its ranks differ, are joined by '+'."""
        known = self._known.get(peer)
        return "+".join(sorted(set(known.transports.get(rank, ())))) if known is not None else ""

    def peers(self) -> list[dict[str, object]]:
        """For `/status`."""
        return [
            {
                "instance": known.node.instance,
                "node": known.node.node,
                "incarnation": peer,
                "transports": {str(rank): list(names) for rank, names in known.transports.items()},
                "connecting": sorted(map(str, known.waiting)),
            }
            for peer, known in self._known.items()
        ]

    def known(self) -> list[str]:
        """Incarnations of all known peers."""
        return list(self._known)


# ------------------------------------------------------------------------------------------- decode side


@dataclass(eq=False)
class _KnownPrefill:
    address: PeerAddress
    met: KnownNode | None = None
    error: BridgeError | None = None


class Links(Protocol):
    """The connections to prefill nodes, by address. Only `open` raises."""

    def open(self, address: PeerAddress) -> None:
        """Connect to an address that is not connected to."""

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        """Queue a message."""

    def close(self, address: PeerAddress) -> None:
        """End the connection; nothing more comes from it."""


class PrefillNodes:
    """The prefill nodes that write to this decode node. Implements the protocol of the same name in `receiver`.

    There is a link to every address that is known here, and to no other. A node that is gone may still write, or have written
    what is still on its way: rooms do not rely on it (`fence`).
    """

    def __init__(
        self,
        *,
        describe: Callable[[], NodeDescription],
        links: Links,
        on_changed: Callable[[], None],
        on_gone: Callable[[str, str], None],
        names_of: Callable[[str], frozenset[str]] = lambda _key: frozenset(),
    ) -> None:
        """`on_changed` is called after every answer.

        `on_gone(peer, reason)` is called when an incarnation is out of reach; `names_of(key)` are the instances that the
        holder of a key may speak for (empty: any). No callback raises.
        """
        self._describe = describe
        self._links = links
        self._on_changed = on_changed
        self._on_gone = on_gone
        self._names_of = names_of
        self._known: dict[PeerAddress, _KnownPrefill] = {}
        self._former: OrderedDict[PeerAddress, str] = OrderedDict()
        """The incarnation that was met last behind an address, as long as it is not met there now."""

    def known_node(self, address: PeerAddress) -> KnownNode | None:
        """See `receiver.PrefillNodes`."""
        known = self._known.get(address)
        if known is None:
            self._greet(address)
            return None
        if known.error is not None:
            raise known.error
        return known.met

    def _greet(self, address: PeerAddress) -> None:
        node = self._describe()
        size_bytes = sum(map(len, node.ranks))
        if size_bytes > MAX_PACKED_NODE_BYTES:
            raise InvalidInputError(
                f"this decode node needs {size_bytes} bytes to describe its {len(node.ranks)} ranks, and may take "
                f"{MAX_PACKED_NODE_BYTES}: make its memory of longer extents (pools.host.extent_bytes), or of fewer ranks"
            )
        self._links.open(address)
        self._known[address] = _KnownPrefill(address)
        self._links.send(address, Hello(node=node))

    def send(self, peer: str, message: PeerMessage) -> None:
        """See `receiver.PrefillNodes`. Dropped when the node is lost; rooms ask again when it is back."""
        for known in self._known.values():
            if known.met is not None and known.met.peer == peer:
                self._links.send(known.address, message)
                return

    def speaks(self, address: PeerAddress, peer: str) -> bool:
        """Whether an incarnation is the one that was met behind an address, now or last."""
        known = self._known.get(address)
        met = known is not None and known.met is not None and known.met.peer == peer
        return met or self._former.get(address) == peer

    def welcome(self, address: PeerAddress, message: Welcome) -> None:
        """A prefill node has accepted us."""
        known = self._known.get(address)
        if known is None:
            return
        reason = self._disbelief(address, message)
        if reason:
            self._vanish(known, reason)
            self._fail(known, PeerError(f"the prefill node at {address.endpoint} is not believed: {reason}"))
            return
        if known.met is not None and known.met.peer != message.incarnation:
            self._vanish(known, f"another life answers at {address.endpoint}")
        facts = message.model_dump(exclude={"type", "incarnation", "ranks"})
        known.met = KnownNode(message.incarnation, **facts, ranks=message.ranks)
        self._on_changed()

    def _disbelief(self, address: PeerAddress, message: Welcome) -> str:
        """Why a node cannot be who it says; empty when it can. One node may well have two addresses, with one key."""
        names = self._names_of(address.public_key)
        if names and message.instance not in names:
            return f"its key speaks for instance {', '.join(sorted(names))}, not for {message.instance}"
        others = {other for other in (*self._known, *self._former) if other.public_key != address.public_key}
        if any(self.speaks(other, message.incarnation) for other in others):
            return f"it calls itself {message.incarnation}, which is another node's incarnation under another key"
        return ""

    def rejected(self, address: PeerAddress, message: Rejected) -> None:
        """A prefill node will not work with us (any more)."""
        known = self._known.get(address)
        if known is None:
            return
        kind = error_codes().get(message.code, PeerError)
        reason = f"the prefill node at {address.endpoint} rejected us: {message.message}"
        self._vanish(known, reason)
        self._fail(known, kind(reason))

    def lost(self, address: PeerAddress, reason: str) -> None:
        """A prefill node does not answer any more; the next room says hello again."""
        known = self._known.get(address)
        if known is None:
            return
        self._vanish(known, reason)
        self._fail(known, PeerError(f"the prefill node at {address.endpoint} cannot be reached: {reason}"))

    def _vanish(self, known: _KnownPrefill, reason: str) -> None:
        """The incarnation that we had met is out of reach: from here on nothing is sent to it."""
        met, known.met = known.met, None
        if met is not None:
            self._former[known.address] = met.peer
            self._former.move_to_end(known.address)
            if len(self._former) > FORMER_KEPT:
                self._former.popitem(last=False)
            self._on_gone(met.peer, reason)

    def _fail(self, known: _KnownPrefill, error: BridgeError) -> None:
        """Let every room that waits see the error, then forget the node: the next room greets it anew."""
        known.error = error
        self._on_changed()
        if self._known.get(known.address) is known:
            del self._known[known.address]
            self._links.close(known.address)

    def restarted(self, address: PeerAddress) -> None:
        """Another life answers at a known address, or the same one has forgotten us: introduce ourselves."""
        known = self._known.get(address)
        if known is not None:
            self._vanish(known, f"the prefill node at {address.endpoint} was restarted or has forgotten us")
            self._links.send(address, Hello(node=self._describe()))

    def refresh(self) -> None:
        """We have changed (a rank worker is back with new endpoints): tell everybody."""
        for address in list(self._known):
            self._links.send(address, Hello(node=self._describe()))

    def peers(self) -> list[dict[str, object]]:
        """For `/status`."""
        return [
            {
                "endpoint": known.address.endpoint,
                "node": known.met.name if known.met else "",
                "incarnation": known.met.peer if known.met else "",
                "ranks": [str(rank) for rank in known.met.ranks] if known.met else [],
            }
            for known in self._known.values()
        ]

    def addresses(self) -> list[PeerAddress]:
        """Every address that has been greeted."""
        return list(self._known)
