"""The states of a room, and its two kinds of tables: the transitions of events, and the meanings of messages.

`prefill.py` and `decode.py` have the literals. An action is a name: the service that owns the room carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvbridge.core.errors import ConflictError


class RoomState(StrEnum):
    """The state of a room as users see it; one vocabulary for both sides."""

    ADMITTED = "admitted"
    OFFERED = "offered"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    FAILED = "failed"

    def __init__(self, word: str) -> None:
        self.final = word in {"completed", "aborted", "failed"}
        """Whether nothing more will happen to the room."""


WITHDRAWN = "withdrawn"
"""Code of a room that failed because prefill's engine computes its prompt once more, in the room's next generation."""

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)
ActionT = TypeVar("ActionT", bound=StrEnum)
SpeakerT = TypeVar("SpeakerT", bound=StrEnum)

Transition = tuple[StateT, tuple[ActionT, ...]]


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT, ActionT]):
    """A transition table: for each state, the next state and the actions of each event. An event without a row is not allowed."""

    rows: Mapping[StateT, Mapping[EventT, Transition[StateT, ActionT]]]
    start: StateT
    final: frozenset[StateT]

    def step(self, state: StateT, event: EventT) -> Transition[StateT, ActionT]:
        """Return the next state and the actions. Raises ConflictError when the table does not list the event here."""
        try:
            return self.rows[state][event]
        except KeyError:
            raise ConflictError(f"'{event}' is not possible in state '{state}'") from None


class Meaning(StrEnum):
    """The meaning of a message for a room. A message without a meaning is refused, and counted."""

    TAKE = "take"
    """The room waits for it."""
    PROOF = "proof"
    """Only its statement about who touches the pages counts."""
    TURN_AWAY = "turn_away"
    """The room belongs to another node or is over: the sender is told, and the message is counted."""
    LATE = "late"
    """It crossed another message or is a retry: it is dropped, and not counted."""


Row = Mapping[Any, Meaning]
"""The meaning of each message of one speaker."""


@dataclass(frozen=True, slots=True)
class Hearing(Generic[StateT, SpeakerT]):
    """The messages that a room expects in each state, by speaker. A message is looked up before any handler runs."""

    rows: Mapping[StateT, Mapping[SpeakerT, Row]]
    unknown: Mapping[SpeakerT, Row]
    """For a room that this node does not know (any more)."""

    def meaning(self, state: StateT | None, speaker: SpeakerT | None, message: str) -> Meaning | None:
        """Return the meaning of a message in a state (None: unknown room), or None to refuse it. `speaker`: None for a stranger."""
        speakers = self.unknown if state is None else self.rows[state]
        row = None if speaker is None else speakers.get(speaker)
        return None if row is None else row.get(message)
