"""What happened to one room on this node, in words."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvbridge.api.rooms import RoomTimeline, TimelineEntry
from kvbridge.core.errors import UnknownRoomError
from kvbridge.core.plan.operations import Amount
from kvbridge.telemetry.events import RoomEntered, RoomFact
from kvbridge.telemetry.recent import RoomTimelines

_NOT_SHOWN = {field.name for field in fields(RoomFact)} | {"state", "trace"}
"""Beside what is shown of every fact, spans, whose trace is among the ids."""


def timeline(timelines: RoomTimelines, room: int, generation: int | None) -> RoomTimeline:
    """Return what happened to a room, to the newest attempt when none is named. Raises UnknownRoomError."""
    found = timelines.of(room, generation)
    if found is None:
        which = f"room {room}" if generation is None else f"room {room} in generation {generation}"
        raise UnknownRoomError(f"what happened to {which} is not kept here (never admitted, or ended and forgotten)")
    generation, kept = found
    return RoomTimeline(
        room=room,
        generation=generation,
        age_s=time.monotonic() - kept.admitted_s,
        entries=tuple(_entry(at_s - kept.admitted_s, fact) for at_s, fact in kept.facts),
    )


def _entry(after_s: float, fact: RoomFact) -> TimelineEntry:
    """Return a fact in words: what it says beyond its room, by the names of its fields."""
    state = fact.state if isinstance(fact, RoomEntered) else None
    details = {
        name.removesuffix("_s"): _text(value)
        for name in (field.name for field in fields(fact))
        if name not in _NOT_SHOWN and (value := getattr(fact, name)) not in ("", {}, ())
    }
    if fact.peer:
        details["peer"] = fact.peer
    what = state.value if state else re.sub(r"(?<!^)(?=[A-Z])", " ", type(fact).__name__).lower()
    return TimelineEntry(after_s=after_s, what=what, state=state, details=details)


def _text(value: Any) -> str:  # noqa: ANN401 - whatever a fact has
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}".replace("_", " ") for key, each in value.items())
    if isinstance(value, Amount):
        return f"{value.bytes:,} bytes"
    if isinstance(value, float):
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"
    return str(value)
