"""Rooms that end before this decode node has met their prefill nodes, which hold them and are told when they are met.

Owns: whom there is still something to tell. Must not know: why a room has ended, how a node becomes known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.features import Feature
from kvbridge.core.wire.messages import Abort, Intend
from kvbridge.node.handshake.prefill_nodes import KnownNode, PrefillNodes

MOST = 4_096
"""What is kept until it can be said. Of more the oldest is forgotten: prefill then holds that room until `timeouts.offer_s`."""


def holds_rooms(node: KnownNode) -> bool:
    """Whether a prefill node can be told that we will come; else it hears of a room by our offer alone."""
    return Feature.INTENTS in node.features


@dataclass(slots=True)
class Withdrawals:
    """What is kept goes when its node has answered, or does not. Called from the event loop's thread only."""

    nodes: PrefillNodes
    _kept: OrderedDict[tuple[int, int, PeerAddress], tuple[Intend, Abort]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, addresses: Iterable[PeerAddress], intent: Intend, abort: Abort) -> None:
        """Say that nobody comes for a room, now or when its nodes are known. Never raises."""
        added = {(intent.room, intent.generation, address): (intent, abort) for address in addresses}
        self._kept.update(added)
        self._settle(added)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def settle(self) -> None:
        """Look again: a node has answered, or does not any more. Never raises."""
        self._settle(list(self._kept))

    def _settle(self, keys: Iterable[tuple[int, int, PeerAddress]]) -> None:
        for key in keys:
            try:
                node = self.nodes.known_node(key[-1])
            except BridgeError:  # whoever asked for the room was told why; with us that node has nothing to do
                del self._kept[key]
                continue
            if node is None:
                continue
            intent, abort = self._kept.pop(key)
            if holds_rooms(node):
                # An Abort ends a room only for whoever has come for it.
                self.nodes.send(node.peer, intent)
                self.nodes.send(node.peer, abort)
