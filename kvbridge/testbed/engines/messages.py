"""What every command with engine processes and they themselves say to one another.

Owns: the part of a job that is the same for all, and the events that are. Must not know: how these travel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvbridge.core.ids import FrozenModel, Positive, RoomId
from kvbridge.core.wire.engine_messages import RoomEvent


class EngineJob(FrozenModel):
    """What every engine process of a command reads."""

    prefill_runtime_dir: Path
    decode_runtime_dir: Path
    chunk_tokens: Positive


class Attached(FrozenModel):
    """The engine has attached to its daemon."""

    type: Literal["attached"] = "attached"


class Computed(FrozenModel):
    """One more chunk of some prompt is computed (and published, where there is a daemon)."""

    type: Literal["computed"] = "computed"
    tokens: Positive
    """Of this chunk."""


class Finished(FrozenModel):
    """Prefill: a whole prompt is computed and published. Times are of the machine's monotonic clock."""

    type: Literal["finished"] = "finished"
    number: Positive
    begun_s: float
    finished_s: float
    """Just before `finish`."""


class RoomEnded(FrozenModel):
    """A room ended before its time."""

    type: Literal["room_ended"] = "room_ended"
    room: RoomId
    reason: str

    @classmethod
    def told(cls, event: RoomEvent, side: str) -> RoomEnded:
        """Of what the daemon of a side says."""
        return cls(room=event.room, reason=f"{event.kind} on {side}: {event.reason}")


class Failed(FrozenModel):
    """The process cannot go on and ends."""

    type: Literal["failed"] = "failed"
    message: str
