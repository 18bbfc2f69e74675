"""The one door for what peers and rank workers say of rooms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic

from kvbridge.core.session.hearing import Hearing, Meaning
from kvbridge.core.wire.messages import RoomMessage
from kvbridge.node.driver import RoomT
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts

Heard = tuple[RoomT | None, Meaning | None]


@dataclass(frozen=True, slots=True)
class RoomHearing(Generic[RoomT]):
    """Called from the event loop's thread only."""

    table: Hearing[Any, Any]
    rooms: RoomBook[RoomT]
    facts: RoomFacts
    speaker_of: Callable[[RoomT | None, str, Any], StrEnum | None]
    """Who says something of a room, as the table knows speakers; None: somebody whom it does not concern."""

    def look_up(self, who: str, message: RoomMessage, *, kind: str) -> Heard[RoomT]:
        """Return the room that a message is about and what the message means, None when nothing is to be done about it.

        `who`: the incarnation of a peer; empty for a rank worker of this node. `kind`: the `type` of the message.
        """
        room = self.rooms.find(message.room, message.generation)
        speaker = self.speaker_of(room, who, message)
        meaning = self.table.meaning(None if room is None else room.state, speaker, kind)
        if meaning is None:
            cause = "stale" if room is None or room.over else "foreign" if speaker is None else "unexpected"
            self.facts.refuse_message(who, message, f"{cause}_{kind}")
        return room, None if meaning is Meaning.LATE else meaning
