"""The prefill nodes that write to a decode node: from our Hello until they are gone."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvbridge.api.status import PrefillNodeStatus
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, FingerprintMismatchError, InvalidInputError, PeerError, errors_by_code
from kvbridge.core.prefixes import identity_conflict
from kvbridge.core.wire.messages import (
    FEATURES,
    MAX_PACKED_NODE_BYTES,
    Digests,
    Done,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    NodeDescription,
    PathLost,
    PeerMessage,
    Rejected,
    Welcome,
    agree,
)
from kvbridge.telemetry.facts import EventStream, PeerAccepted, PeerLost, PeerRejected

if TYPE_CHECKING:
    from kvbridge.node.decode.writers import WrittenRooms

FORMER_KEPT = 1_024
"""Addresses whose last incarnation is remembered."""
LINKS_A_TURN = 4
"""Links that are opened in one turn of the event loop; each takes it milliseconds."""


@dataclass(eq=False)
class _KnownPrefill:
    address: PeerAddress
    node: Welcome | None = None
    """The words of the node that answers there now; None before it has welcomed this node."""
    features: tuple[str, ...] = ()
    """The features that were agreed last."""
    error: BridgeError | None = None

    @property
    def peer(self) -> str:
        return self.node.incarnation if self.node is not None else self.address.endpoint


class Links(Protocol):
    """The connections to prefill nodes, by address: `daemon/decode.py`. Only `connect` raises."""

    def connect(self, address: PeerAddress) -> None:
        """Connect to an address that is not connected to."""

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        """Queue a message."""

    def disconnect(self, address: PeerAddress) -> None:
        """End the connection; nothing more comes from it."""

    def names_of(self, key: str) -> frozenset[str]:
        """Return the instances that the holder of a key may speak for; empty: any."""

    def soon(self, do: Callable[[], None]) -> None:
        """Call `do` in the loop's next turn."""


@dataclass(eq=False)
class PrefillNodes:
    """The prefill nodes that write to this decode node.

    There is a link to every address that is known here, and to no other; few are opened in each turn of the loop. A node that is
    gone may still write, or its last bytes may still be on their way: the fence is what shuts it out.
    """

    describe: Callable[[], NodeDescription]
    links: Links
    events: EventStream
    rooms: WrittenRooms = field(init=False)
    """Set before a node is asked for."""
    _unmet: deque[_KnownPrefill] = field(init=False, default_factory=deque)
    """Nodes without a link yet."""
    _opened_in_turn: int = field(init=False, default=0)
    _known: dict[PeerAddress, _KnownPrefill] = field(init=False, default_factory=dict)
    _former: OrderedDict[PeerAddress, str] = field(init=False, default_factory=OrderedDict)
    """The incarnation that answered last at an address, while it does not now."""
    _by_peer: dict[str, _KnownPrefill] = field(init=False, default_factory=dict)
    """Nodes that have welcomed this node, by their incarnation."""
    _same: dict[PeerAddress, _KnownPrefill] = field(init=False, default_factory=dict)
    """Further addresses of nodes, while those answer: there is one link to an incarnation."""

    # ------------------------------------------------------------------ for rooms

    def known_node(self, address: PeerAddress) -> Welcome | None:
        """Return the node at an address if it has welcomed this node, else say hello (once) and return None.

        Raises PeerError or FingerprintMismatchError when it has rejected this node since the last attempt.
        """
        known = self._known.get(address) or self._same.get(address)
        if known is None:
            self._introduce(address)
            return None
        if known.error is not None:
            raise known.error
        return known.node

    def _introduce(self, address: PeerAddress) -> None:
        ranks = self.describe().ranks
        size_bytes = sum(map(len, ranks))
        if size_bytes > MAX_PACKED_NODE_BYTES:
            raise InvalidInputError(
                f"this decode node needs {size_bytes} bytes to describe its {len(ranks)} ranks, and may take "
                f"{MAX_PACKED_NODE_BYTES}: make its memory of longer extents (pools.host.extent_bytes), or of fewer ranks"
            )
        known = _KnownPrefill(address)
        if self._opened_in_turn < LINKS_A_TURN:
            self._meet(known)
        else:
            self._unmet.append(known)
        self._known[address] = known

    def _meet(self, known: _KnownPrefill) -> None:
        self._opened_in_turn += 1
        if self._opened_in_turn == 1:
            self.links.soon(self._next_turn)
        self.links.connect(known.address)
        self._say_hello(known.address)

    def _next_turn(self) -> None:
        self._opened_in_turn = 0
        while self._unmet and self._opened_in_turn < LINKS_A_TURN:
            known = self._unmet.popleft()
            try:
                self._meet(known)
            except BridgeError as error:
                self._reject(known, error)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message; it is dropped when the node is lost: rooms ask again when the node is back. Never raises."""
        known = self._by_peer.get(peer)
        if known is not None:
            self.links.send(known.address, message)

    # ------------------------------------------------------------------ messages of prefill nodes

    def received(self, address: PeerAddress, peer: str, message: PeerMessage) -> None:
        """Take a message of a node. Raises the BridgeError for which rooms refuse it."""
        match message:
            case Welcome() if message.incarnation == peer:
                self._welcomed(address, message)
            case Rejected():
                if known := self._known.get(address):
                    kind = errors_by_code().get(message.code, PeerError)
                    text = f"the prefill node at {address.endpoint} rejected us: {message.message}"
                    self._reject(known, kind(text))
            case Digests() | Done() | PathLost() | Failed() | Drained() if self.speaks(address, peer):
                self.rooms.hear(peer, message)
            case Welcome() | Digests() | Done() | PathLost() | Failed() | Drained():
                text = f"{message.type} from {address.endpoint} in the name of {peer}"
                self.events.frame_refused("unmet", text)
            case Heartbeat():
                pass
            case _:
                text = f"{message.type} from {peer}: a decode daemon does not take it"
                self.events.frame_refused("wrong_direction", text)

    def speaks(self, address: PeerAddress, peer: str) -> bool:
        """Return whether an incarnation is the one that answers at an address, or did last."""
        known = self._known.get(address)
        current = known.node if known is not None else None
        return (current is not None and current.incarnation == peer) or self._former.get(address) == peer

    def _welcomed(self, address: PeerAddress, message: Welcome) -> None:
        known = self._known.get(address)
        if known is None:
            return
        try:
            self._believe(known, message)
        except BridgeError as error:
            self._reject(known, error)
            return
        if known.node is not None and known.node.incarnation != message.incarnation:
            self._lose(known, f"another incarnation answers at {address.endpoint}")
        known.node = message
        self._by_peer.setdefault(message.incarnation, known)
        self.events.emit(PeerAccepted(peer=message.incarnation, name=message.name, features=known.features))
        self.rooms.nodes_changed()

    def _believe(self, known: _KnownPrefill, message: Welcome) -> None:
        """Raise when a node does not fit, or cannot be the one that it claims to be. A node may have two addresses with one key."""
        address = known.address
        us, them = "this decode node", f"the prefill node {message.name} at {address.endpoint}"
        known.features = agree(FEATURES, message.features, us=us, them=them)
        if conflict := identity_conflict(message.model_identity, self.describe().model_identity):
            raise FingerprintMismatchError(f"{them}: {conflict}")
        doubt = f"the prefill node at {address.endpoint} is not believed: "
        names = self.links.names_of(address.public_key)
        if names and message.instance not in names:
            raise PeerError(
                f"{doubt}its key speaks for instance {', '.join(sorted(names))}, not for {message.instance}"
            )
        others = {other for other in (*self._known, *self._former) if other.public_key != address.public_key}
        if any(self.speaks(other, message.incarnation) for other in others):
            incarnation = message.incarnation
            raise PeerError(
                f"{doubt}it calls itself {incarnation}, which is another node's incarnation under another key"
            )

    def _reject(self, known: _KnownPrefill, error: BridgeError) -> None:
        self.events.emit(PeerRejected(peer=known.peer, code=error.code, reason=str(error)))
        self._fail(known, error, str(error))

    # ------------------------------------------------------------------ reports of links

    def lost(self, address: PeerAddress, reason: str) -> None:
        """Give up a prefill node that does not answer any more; the next room says hello again."""
        if known := self._known.get(address):
            self.events.emit(PeerLost(peer=known.peer, reason=reason))
            self._fail(known, PeerError(f"the prefill node at {address.endpoint} cannot be reached: {reason}"), reason)

    def same(self, address: PeerAddress, other: PeerAddress) -> None:
        """Note that one incarnation answers at two addresses: the link of the other address serves both."""
        known, meant = self._known.pop(address, None), self._known.get(other)
        self.links.disconnect(address)
        if known is not None:
            self._lose(known, f"the node at {other.endpoint} answers there now")
        if meant is not None:
            if len(self._same) >= FORMER_KEPT:
                del self._same[next(iter(self._same))]
            self._same[address] = meant
        self.rooms.nodes_changed()

    def restarted(self, address: PeerAddress) -> None:
        """Say hello again: another incarnation answers at a known address, or the same one has forgotten this node."""
        if known := self._known.get(address):
            self._lose(known, f"the prefill node at {address.endpoint} was restarted or has forgotten us")
            self._say_hello(address)

    def _lose(self, known: _KnownPrefill, reason: str) -> None:
        if known.node is not None:
            self.events.emit(PeerLost(peer=known.node.incarnation, reason=reason))
        self._disconnect(known, reason)

    def _disconnect(self, known: _KnownPrefill, reason: str) -> None:
        """Send nothing more to the incarnation that answered, by whatever address: it is out of reach."""
        self._same = {address: meant for address, meant in self._same.items() if meant is not known}
        node, known.node = known.node, None
        if node is not None:
            if self._by_peer.get(node.incarnation) is known:
                del self._by_peer[node.incarnation]
            self._former[known.address] = node.incarnation
            self._former.move_to_end(known.address)
            if len(self._former) > FORMER_KEPT:
                self._former.popitem(last=False)
            self.rooms.peer_gone(node.incarnation, reason)

    def _fail(self, known: _KnownPrefill, error: BridgeError, reason: str) -> None:
        """Let every room that waits see the error, then forget the node: the next room says hello again."""
        self._disconnect(known, reason)
        known.error = error
        self.rooms.nodes_changed()
        if self._known.get(known.address) is known:
            del self._known[known.address]
            self.links.disconnect(known.address)

    # ------------------------------------------------------------------ for the daemon

    def refresh(self) -> None:
        """Tell every prefill node that this node has changed: a rank worker is back with new endpoints."""
        for address in list(self._known):
            self._say_hello(address)

    def _say_hello(self, address: PeerAddress) -> None:
        self.links.send(address, Hello(node=self.describe(), features=FEATURES))

    def peers(self) -> tuple[PrefillNodeStatus, ...]:
        """Return the state of every node, for `/status`."""
        return tuple(
            PrefillNodeStatus(
                endpoint=known.address.endpoint,
                node=known.node.name if known.node else "",
                incarnation=known.node.incarnation if known.node else "",
                ranks=tuple(map(str, known.node.ranks)) if known.node else (),
                features=known.features,
            )
            for known in self._known.values()
        )
