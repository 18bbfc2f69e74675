"""What a replay and its engine processes say to one another.

Owns: the job that both engines read, the orders that the prefill engine takes, the events that both report, and the note that
travels with the bytes from one to the other. Must not know: how these travel, what an engine does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from kvbridge.cli.trace import TraceRequest, prompt_tokens
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, RoomId
from kvbridge.core.plan.operations import Amounts
from kvbridge.engine import Engine
from kvbridge.engine.adapters.synthetic import Comparison
from kvbridge.testbed.engines.channel import Channel
from kvbridge.testbed.engines.messages import Attached, Computed, EngineJob, Failed, Finished, RoomEnded
from kvbridge.tier.keys import NO_KEYS, Keys

MOST_WRONG_ROWS = 20
"""Rows that are named for one room; all wrong bytes are counted."""


class Job(EngineJob):
    """The same for both engines."""

    hold_s_per_token: Annotated[float, Field(ge=0)]
    """How long decode holds a room for each token of its output."""
    prefixes: bool
    """Whether rooms have page keys."""
    answers: bool
    """Whether decode writes answers, and names them with the release."""


class Note(FrozenModel):
    """What the prefill engine gives to `finish`, and the decode engine finds with the claim."""

    number: Positive
    room: RoomId
    prompt_tokens: Positive
    computed_tokens: NonNegative
    """That prefill held already."""
    host_tokens: NonNegative = 0
    """Of these, what came back from host memory."""
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
    """Compute a prompt into this room; decode: serve it."""

    type: Literal["serve"] = "serve"
    number: Positive
    room: RoomId
    prompt_tokens: Positive
    output_tokens: NonNegative
    hash_ids: tuple[NonNegative, ...]
    """What the trace tells of the prompt's tokens."""

    @property
    def fed_tokens(self) -> int:
        """The prompt's, and those of the answer that have rows: the last one has none."""
        return self.prompt_tokens + max(0, self.output_tokens - 1)

    def keys(self, job: Job, engine: Engine, *, tokens: int) -> Keys:
        """Return the page keys of the first `tokens` tokens, as an engine computes them; none when the job does without."""
        if not job.prefixes:
            return NO_KEYS
        facts = TraceRequest(timestamp=0, input_length=tokens, output_length=0, hash_ids=self.hash_ids)
        return engine.page_keys(prompt_tokens(facts, self.number))


# ---------------------------------------------------------------------------------------------- events


class Compared(FrozenModel):
    """Bytes that an engine has looked at."""

    checked_bytes: NonNegative
    wrong_bytes: NonNegative
    wrong_rows: tuple[WrongRow, ...] = ()


class Restored(Compared):
    """Prefill: an engine has looked at every byte of what its node held of a prompt, windows and states included."""

    type: Literal["restored"] = "restored"
    number: Positive


class Arrived(Compared):
    """Decode: a room was claimed and every byte of it looked at."""

    type: Literal["arrived"] = "arrived"
    number: Positive
    amounts: Amounts
    phases_s: dict[str, float]
    """What the two daemons say."""
    after_prefill_s: float
    """From the end of the prompt's computation until the room could be claimed: what the bridge added."""
    check_s: float
    computed_tokens: NonNegative
    """Of the prompt, what prefill held already."""
    prefix_tokens: NonNegative
    """Of the prompt, what decode held already."""
    computed_host_tokens: NonNegative = 0
    prefix_host_tokens: NonNegative = 0
    """Of these two, what came back from host memory."""


class Released(FrozenModel):
    """Decode: a room was given back."""

    type: Literal["released"] = "released"
    number: Positive
    released_s: float
    """On the machine's monotonic clock."""


Event = Attached | Computed | Finished | Restored | Arrived | Released | RoomEnded | Failed
ORDERS: TypeAdapter[Serve] = TypeAdapter(Serve)
EVENTS: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


def joined(found: Mapping[Rank, Comparison], *, number: int, room: int) -> Compared:
    """Join what was found on each rank."""
    rows = [
        WrongRow.model_validate({"number": number, "room": room, "rank": str(rank), **row.as_dict()})
        for rank, each in found.items()
        for row in each.mismatches
    ]
    return Compared(
        checked_bytes=sum(each.checked_bytes for each in found.values()),
        wrong_bytes=sum(each.wrong_bytes for each in found.values()),
        wrong_rows=tuple(rows[:MOST_WRONG_ROWS]),
    )


ReplayChannel: TypeAlias = Channel[Serve]
