"""The meaning of a message about a room, looked up by the state of the room and by who speaks.

The literals are `RECEIVER_HEARS` and `SENDER_HEARS`. A message is looked up before any handler runs, and no handler looks at the
state of a room again: what a literal does not list changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

StateT = TypeVar("StateT", bound=StrEnum)
SpeakerT = TypeVar("SpeakerT", bound=StrEnum)


class Meaning(StrEnum):
    """The meaning of a message for a room. Every message that has none is refused, and counted."""

    TAKE = "take"
    """The room waits for it."""
    PROOF = "proof"
    """It says who touches the pages and who does not any more, and that is all that counts of it."""
    TURN_AWAY = "turn_away"
    """The room is another's, or over: whoever asks for it is told so. It is counted."""
    LATE = "late"
    """It crossed something, or is sent again: it is dropped, and not counted."""


Row = Mapping[Any, Meaning]
"""What each message of one speaker means."""


@dataclass(frozen=True, slots=True)
class Hearing(Generic[StateT, SpeakerT]):
    """The messages that a room expects: for each state, who may say what."""

    rows: Mapping[StateT, Mapping[SpeakerT, Row]]
    unknown: Mapping[SpeakerT, Row]
    """Of a room that this node does not know (any more)."""

    def meaning(self, state: StateT | None, speaker: SpeakerT | None, message: str) -> Meaning | None:
        """Return what a message means for a room in a state (None: unknown), or None when it is to be refused.

        `speaker` is None for somebody whom the room does not concern.
        """
        speakers = self.unknown if state is None else self.rows[state]
        row = None if speaker is None else speakers.get(speaker)
        return None if row is None else row.get(message)
