"""The node as the scheduler's half of the connector speaks to it: which incarnation there is, and what it has yet to be told.

Owns: both. Must not know: requests, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.engine.adapters.vllm.requests import RoomCalls


@dataclass(slots=True)
class NodeLine:
    """For the scheduler's thread only."""

    calls: RoomCalls
    incarnation: str = ""
    """Empty while there is none."""
    unsent: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Rooms that are to be given up, why, and whether they are held again: the node did not read."""

    def require(self) -> None:
        """Raise NotReadyError while there is nobody to ask."""
        if not self.incarnation:
            raise NotReadyError("there is no node process to ask; it is started again")

    def give_up(self, room: int, reason: str, *, again: bool = False) -> None:
        """Tell the node, now or at a later step; a node that is gone has told the other side by that."""
        if not self.incarnation:
            return
        self.unsent.pop(room, None)
        try:
            self.calls.abort(room, reason, again=again)
        except BridgeError:
            self.unsent[room] = reason, again

    def send_again(self) -> None:
        """Try what was not sent."""
        for room, (reason, again) in list(self.unsent.items()):
            self.give_up(room, reason, again=again)

    def lost(self) -> None:
        """It is gone, and with it its rooms."""
        self.incarnation = ""
        self.unsent.clear()
