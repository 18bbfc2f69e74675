"""Rooms that end before this decode node has met their prefill nodes, which hold them and are told when they are met."""

from __future__ import annotations

from collections.abc import Iterable

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.messages import Abort, Intend
from kvbridge.node.handshake.prefill_nodes import PrefillNodes

MOST = 4_096
"""What is kept until it can be said. Of more the oldest is forgotten: prefill then holds that room until `timeouts.offer_s`."""


class Withdrawals:
    """What is kept goes when its node has answered, or does not. Called from the event loop's thread only; never raises."""

    def __init__(self, nodes: PrefillNodes) -> None:
        self._nodes = nodes
        self._kept: dict[tuple[int, int, PeerAddress], tuple[Intend, Abort]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, addresses: Iterable[PeerAddress], intent: Intend, abort: Abort) -> None:
        """Say that nobody comes for a room, now or when its nodes are known."""
        added = {(intent.room, intent.generation, address): (intent, abort) for address in addresses}
        self._kept |= added
        self._settle(added)
        for key in list(self._kept)[: max(0, len(self._kept) - MOST)]:
            del self._kept[key]

    def settle(self) -> None:
        """Look again: a node has answered, or does not any more."""
        self._settle(list(self._kept))

    def _settle(self, keys: Iterable[tuple[int, int, PeerAddress]]) -> None:
        for key in keys:
            try:
                node = self._nodes.known_node(key[-1])
            except BridgeError:  # whoever asked for the room was told why; with us that node has nothing to do
                del self._kept[key]
                continue
            if node is not None:
                for message in self._kept.pop(key):  # an Abort ends a room only for whoever has come for it
                    self._nodes.send(node.peer, message)
