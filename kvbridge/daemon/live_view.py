"""What the status page is shown, put together from what `/status` says and from what happened to rooms.

Owns: the form of a snapshot. Must not know: who looks, how it is sent.

Nothing in a snapshot changes by the passing of time alone, but `now_s`: it has moments on this process's clock where `/status` has
ages. What is compared one by one is an object with keys, not a list.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvbridge.api.live import Document, RoomLine, RoomTimeline, TimelineEntry
from kvbridge.api.status import BootstrapStatus, DecodeNodeStatus, NodeStatus
from kvbridge.core.errors import UnknownRoomError
from kvbridge.core.plan.operations import Amount
from kvbridge.daemon.node_status import NodeOverview
from kvbridge.daemon.parts import NodeParts
from kvbridge.telemetry.events import RoomEntered, RoomFact
from kvbridge.telemetry.recent import PeerTraffic, RoomKey, Timeline

ROOMS_OF_STATE = 25
"""Rooms that are shown of each state; all are counted."""


class LiveNode:
    """A prefill or decode daemon, for its page."""

    def __init__(self, parts: NodeParts, overview: NodeOverview) -> None:
        self._parts = parts
        self._overview = overview

    def snapshot(self) -> Document:
        """Everything that the page shows now."""
        status, now_s = self._overview.status(), time.monotonic()
        return {
            "now_s": round(now_s, 3),
            "started_s": round(now_s - status.uptime_s),
            "status": status.model_dump(mode="json", exclude={"uptime_s", "peers", "traffic", "problems"}),
            "peers": _peers(status, self._parts.recent.traffic()),
            "rooms": {
                f"{room}:{generation}": _line((room, generation), timeline).model_dump(mode="json")
                for (room, generation), timeline in self._parts.timelines.shown(ROOMS_OF_STATE)
            },
            "ended": {state.value: count for state, count in self._parts.timelines.ended.items()},
            "problems": [
                {"at_s": round(found.at_s, 3), "what": found.what, "whom": found.whom, "reason": found.reason}
                for found in self._parts.recent.problems()
            ],
        }

    def timeline(self, room: int, generation: int | None) -> RoomTimeline:
        """What happened to a room, the newest attempt when none is named. Raises UnknownRoomError."""
        found = self._parts.timelines.of(room, generation)
        if found is None:
            which = f"room {room}" if generation is None else f"room {room} in generation {generation}"
            raise UnknownRoomError(
                f"what happened to {which} is not kept here (never admitted, or ended and forgotten)"
            )
        generation, timeline = found
        return RoomTimeline(
            room=room,
            generation=generation,
            age_s=time.monotonic() - timeline.admitted_s,
            entries=tuple(_entry(at_s - timeline.admitted_s, fact) for at_s, fact in timeline.facts),
        )


def bootstrap_snapshot(status: BootstrapStatus) -> Document:
    """Everything that bootstrap's page shows now."""
    now_s = time.monotonic()
    shown = status.model_dump(mode="json", exclude={"uptime_s", "instances"})
    return {
        "now_s": round(now_s, 3),
        "started_s": round(now_s - status.uptime_s),
        "status": shown,
        "instances": {
            instance.instance: {
                **instance.model_dump(mode="json", exclude={"instance", "nodes"}),
                "nodes": {
                    node.node: {
                        **node.model_dump(mode="json", exclude={"node", "ranks", "silent_s"}),
                        "ranks": len(node.ranks),
                        "heard_s": round(now_s - node.silent_s, 1),
                    }
                    for node in instance.nodes
                },
            }
            for instance in status.instances
        },
    }


def _peers(status: NodeStatus, traffic: Mapping[str, PeerTraffic]) -> Document:
    """The peers of a node by incarnation, with what went to and from each."""
    found = {}
    for peer in status.peers:
        moved = traffic.get(peer.incarnation, PeerTraffic())
        if isinstance(peer, DecodeNodeStatus):
            key, name = peer.incarnation, f"{peer.instance}/{peer.node}"
            problem = f"not connected yet: {', '.join(peer.connecting)}" if peer.connecting else ""
        else:
            key, name = peer.incarnation or peer.endpoint, peer.node or peer.endpoint
            problem = "" if peer.incarnation else "it has not answered yet"
        found[key] = {
            "name": name,
            "problem": problem,
            "sent_bytes": moved.sent_bytes,
            "received_bytes": moved.received_bytes,
            "rooms_completed": moved.rooms_completed,
            "rooms_failed": moved.rooms_failed,
            "last_s": round(moved.last_s, 1),
        }
    return found


def _line(key: RoomKey, timeline: Timeline) -> RoomLine:
    entered = timeline.entered
    return RoomLine(
        room=key[0],
        generation=key[1],
        state=entered.state,
        admitted_since_s=round(timeline.admitted_s, 3),
        state_since_s=round(timeline.entered_s, 3),
        peer=timeline.peer,
        code=entered.code,
        reason=entered.reason,
    )


_NOT_SHOWN = {field.name for field in fields(RoomFact)} | {"state", "trace"}
"""Beside what is shown of every fact, spans, whose trace is among the ids."""


def _entry(after_s: float, fact: RoomFact) -> TimelineEntry:
    """A fact in words: what it says beyond its room, by the names of its fields."""
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
