"""What the status page is shown, beyond `/status`: rooms and their timelines.

Owns: these answers. Must not know: HTTP, who keeps them. Field names here are the JSON names of the API.

Times named `at_s` and `_since_s` are on the daemon's own clock, as is `now_s` in each message of `GET /v1/events`: their difference
is an age, and what does not change needs no message.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvbridge.core.ids import FrozenModel, Positive, RoomId, examples
from kvbridge.core.session.states import RoomState

Document = dict[str, Any]
"""A JSON object."""


class RoomLine(FrozenModel):
    """One attempt at one room, in few words."""

    room: RoomId
    generation: Positive
    state: RoomState
    admitted_since_s: float
    state_since_s: float
    peer: str
    """The incarnation of the node at the other end; empty while there is none."""
    code: str
    reason: str
    """Why it failed or was aborted; empty while nothing went wrong."""


class TimelineEntry(FrozenModel):
    """Something that happened to a room."""

    after_s: float
    """Since the room was admitted."""
    what: str
    """The state that it came into, or what else happened, in words."""
    state: RoomState | None = None
    """The state that it came into, if it did."""
    details: dict[str, str] = Field(default_factory=dict)


class RoomTimeline(FrozenModel):
    """What happened to one attempt at a room on one node, the first in front."""

    model_config = examples(
        {
            "room": 77,
            "generation": 1,
            "age_s": 2.5,
            "entries": [
                {"after_s": 0.0, "what": "admitted", "state": "admitted"},
                {"after_s": 0.004, "what": "offered", "state": "offered", "details": {"peer": "9f1c3a5e7b2d4860"}},
            ],
        }
    )

    room: RoomId
    generation: Positive
    age_s: float
    entries: tuple[TimelineEntry, ...]
