"""The prefill nodes that write to a decode node: from our Hello to the end of the acquaintance.

Owns: which prefill addresses are known, and which incarnation answers there. Must not know: sockets (control delivers and sends),
rooms (they ask `met`; a listener hears when something changed).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbridge.api.rooms import PeerAddress
from kvbridge.api.status import PrefillNodeStatus
from kvbridge.core.errors import ERROR_OF_CODE, BridgeError, FeatureError, InvalidInputError, PeerError
from kvbridge.core.wire.features import PEER_FEATURES, Features, agree
from kvbridge.core.wire.messages import MAX_PACKED_NODE_BYTES, Hello, NodeDescription, PeerMessage, Rejected, Welcome
from kvbridge.node.receiver.room import KnownNode

FORMER_KEPT = 1_024
"""Addresses of which the incarnation is remembered that was met there last."""


@dataclass(eq=False)
class _KnownPrefill:
    address: PeerAddress
    met: KnownNode | None = None
    features: tuple[str, ...] = ()
    """Those that were agreed when it was met last."""
    error: BridgeError | None = None


class Links(Protocol):
    """The connections to prefill nodes, by address. Only `open` raises."""

    def open(self, address: PeerAddress) -> None:
        """Connect to an address that is not connected to."""

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        """Queue a message."""

    def close(self, address: PeerAddress) -> None:
        """End the connection; nothing more comes from it."""


class PrefillNodesListener(Protocol):
    """Who hears what happens to known prefill nodes. Never raises."""

    def nodes_changed(self) -> None:
        """A node has answered, or does not answer any more."""

    def peer_gone(self, peer: str, reason: str) -> None:
        """An incarnation is out of reach."""


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
        features: Features = PEER_FEATURES,
        names_of: Callable[[str], frozenset[str]] = lambda _key: frozenset(),
    ) -> None:
        """`features`: what we have, and require of prefill nodes.

        `names_of(key)`: the instances that the holder of a key may speak for (empty: any). No callback raises.
        """
        self._describe = describe
        self._links = links
        self._features = features
        self._names_of = names_of
        self._known: dict[PeerAddress, _KnownPrefill] = {}
        self._former: OrderedDict[PeerAddress, str] = OrderedDict()
        """The incarnation that was met last behind an address, as long as it is not met there now."""
        self._listeners: list[PrefillNodesListener] = []

    def watch(self, listener: PrefillNodesListener) -> None:
        """Let somebody hear of nodes that have answered or are gone, from now on."""
        self._listeners.append(listener)

    def known_node(self, address: PeerAddress) -> KnownNode | None:
        """See `receiver.PrefillNodes`."""
        known = self._known.get(address)
        if known is None:
            self._introduce(address)
            return None
        if known.error is not None:
            raise known.error
        return known.met

    def _introduce(self, address: PeerAddress) -> None:
        node = self._describe()
        size_bytes = sum(map(len, node.ranks))
        if size_bytes > MAX_PACKED_NODE_BYTES:
            raise InvalidInputError(
                f"this decode node needs {size_bytes} bytes to describe its {len(node.ranks)} ranks, and may take "
                f"{MAX_PACKED_NODE_BYTES}: make its memory of longer extents (pools.host.extent_bytes), or of fewer ranks"
            )
        self._links.open(address)
        self._known[address] = _KnownPrefill(address)
        self._links.send(address, Hello(node=node, features=self._features))

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
        try:
            us, them = "this decode node", f"the prefill node {message.instance}/{message.node} at {address.endpoint}"
            known.features = agree(self._features, message.features, us=us, them=them)
        except FeatureError as error:
            self._vanish(known, str(error))
            self._fail(known, error)
            return
        reason = self._disbelief(address, message)
        if reason:
            self._vanish(known, reason)
            self._fail(known, PeerError(f"the prefill node at {address.endpoint} is not believed: {reason}"))
            return
        if known.met is not None and known.met.peer != message.incarnation:
            self._vanish(known, f"another incarnation answers at {address.endpoint}")
        facts = message.model_dump(exclude={"type", "incarnation", "ranks", "features"})
        known.met = KnownNode(message.incarnation, **facts, ranks=message.ranks)
        self._changed()

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
        kind = ERROR_OF_CODE.get(message.code, PeerError)
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
            for listener in self._listeners:
                listener.peer_gone(met.peer, reason)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener.nodes_changed()

    def _fail(self, known: _KnownPrefill, error: BridgeError) -> None:
        """Let every room that waits see the error, then forget the node: the next room says hello again."""
        known.error = error
        self._changed()
        if self._known.get(known.address) is known:
            del self._known[known.address]
            self._links.close(known.address)

    def restarted(self, address: PeerAddress) -> None:
        """Another incarnation answers at a known address, or the same one has forgotten us: introduce ourselves."""
        known = self._known.get(address)
        if known is not None:
            self._vanish(known, f"the prefill node at {address.endpoint} was restarted or has forgotten us")
            self._say_hello(address)

    def refresh(self) -> None:
        """We have changed (a rank worker is back with new endpoints): tell everybody."""
        for address in list(self._known):
            self._say_hello(address)

    def _say_hello(self, address: PeerAddress) -> None:
        self._links.send(address, Hello(node=self._describe(), features=self._features))

    def peers(self) -> tuple[PrefillNodeStatus, ...]:
        """For `/status`."""
        return tuple(
            PrefillNodeStatus(
                endpoint=known.address.endpoint,
                node=known.met.name if known.met else "",
                incarnation=known.met.peer if known.met else "",
                ranks=tuple(map(str, known.met.ranks)) if known.met else (),
                features=known.features,
            )
            for known in self._known.values()
        )

    def addresses(self) -> list[PeerAddress]:
        """Every address that we have said hello to."""
        return list(self._known)
