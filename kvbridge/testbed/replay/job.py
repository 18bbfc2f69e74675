"""What a replay and its engine processes say to one another.

Owns: the job that both engines read, the orders that the prefill engine takes, the events that both report, and the note that
travels with the bytes from one to the other. Must not know: how these travel, what an engine does with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, RoomId
from kvbridge.core.plan.operations import Amounts
from kvbridge.testbed.engines.channel import Channel
from kvbridge.testbed.engines.messages import Attached, Computed, EngineJob, Failed, Finished, RoomEnded

MOST_WRONG_ROWS = 20
"""Rows that are named for one room; all wrong bytes are counted."""


class Job(EngineJob):
    """The same for both engines."""

    hold_s_per_token: Annotated[float, Field(ge=0)]
    """How long decode holds a room for each token of its output."""


class Note(FrozenModel):
    """What the prefill engine gives to `finish`, and the decode engine finds with the claim."""

    number: Positive
    room: RoomId
    prompt_tokens: Positive
    output_tokens: NonNegative
    finished_s: float
    """On the machine's monotonic clock, just before `finish`."""


class WrongRow(FrozenModel):
    """One row that is not what the prefill engine wrote."""

    number: Positive
    """Of the request, counted from 1."""
    room: RoomId
    rank: str
    component: ComponentKind
    layer: NonNegative
    lane: NonNegative
    row: NonNegative
    page_id: NonNegative
    slot: NonNegative
    first_byte: NonNegative
    expected: NonNegative
    found: NonNegative
    wrong_bytes: Positive

    def __str__(self) -> str:
        return (
            f"request {self.number} (room {self.room}): {self.component} layer {self.layer} lane {self.lane} row {self.row}, "
            f"page {self.page_id} slot {self.slot} on rank {self.rank}: {self.wrong_bytes} wrong bytes, the first at "
            f"{self.first_byte}: expected {self.expected:#04x}, found {self.found:#04x}"
        )


# ---------------------------------------------------------------------------------------------- orders


class Serve(FrozenModel):
    """Compute a prompt into this room."""

    type: Literal["serve"] = "serve"
    number: Positive
    room: RoomId
    prompt_tokens: Positive
    output_tokens: NonNegative


# ---------------------------------------------------------------------------------------------- events


class Arrived(FrozenModel):
    """Decode: a room was claimed and every byte of it looked at."""

    type: Literal["arrived"] = "arrived"
    number: Positive
    amounts: Amounts
    phases_s: dict[str, float]
    """What the two daemons say."""
    after_prefill_s: float
    """From the end of the prompt's computation until the room could be claimed: what the bridge added."""
    check_s: float
    checked_bytes: NonNegative
    wrong_bytes: NonNegative
    wrong_rows: tuple[WrongRow, ...] = ()


class Released(FrozenModel):
    """Decode: a room was given back."""

    type: Literal["released"] = "released"
    number: Positive
    released_s: float
    """On the machine's monotonic clock."""


Event = Attached | Computed | Finished | Arrived | Released | RoomEnded | Failed
ORDERS: TypeAdapter[Serve] = TypeAdapter(Serve)
EVENTS: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="type")])

ReplayChannel: TypeAlias = Channel[Serve]
