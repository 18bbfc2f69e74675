"""Counts of transfers: taken in the scheduler's process, shown in vLLM's log line and in the `/metrics` of its server.

Counts are plain values that can be packed. They cover the time since the last ones, except that held blocks are the current ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvbridge.core.wire.engine_messages import RoomEvent

Counts = dict[str, Any]
"""`seconds`, `bytes`, `operations`: one entry for each loaded room, in order. `sent`: rooms that decode has taken from here.
`failures`: rooms that ended otherwise, and errors of hooks, by code. `held_rooms`, `held_blocks`: finished requests that wait for
decode, and their blocks; None in a process that does not know them."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BUCKETS_BYTES = tuple(1 << power for power in range(14, 36, 3))
TRANSFER_PHASE = "offer_to_commit"
"""Phase of decode's rooms from the message that names the blocks until all rows are in them."""


def no_counts() -> Counts:
    """Return empty counts."""
    lists: Counts = {"seconds": [], "bytes": [], "operations": []}
    return {**lists, "sent": 0, "failures": {}, "held_rooms": None, "held_blocks": None}


def add_counts(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Counts:
    """Return the sum of both."""
    codes = {*earlier["failures"], *later["failures"]}
    return {
        **{key: [*earlier[key], *later[key]] for key in ("seconds", "bytes", "operations")},
        "sent": earlier["sent"] + later["sent"],
        "failures": {code: earlier["failures"].get(code, 0) + later["failures"].get(code, 0) for code in codes},
        **{key: earlier[key] if later[key] is None else later[key] for key in ("held_rooms", "held_blocks")},
    }


def is_nothing(counts: Mapping[str, Any]) -> bool:
    """Whether there is nothing to show. A held count of 0 must be shown, because otherwise the last one stays."""
    return not any(counts.values()) and counts["held_rooms"] is None


def summary(counts: Mapping[str, Any]) -> dict[str, int | float]:
    """Return counts for vLLM's log line."""
    loads, seconds = len(counts["seconds"]), sum(counts["seconds"])
    shown: dict[str, int | float] = {
        "Loads": loads,
        "Avg load time (ms)": round(1e3 * seconds / loads, 3) if loads else 0,
        "Max load time (ms)": round(1e3 * max(counts["seconds"], default=0.0), 3),
        "MB": round(sum(counts["bytes"]) / 1e6, 3),
        "MB/s": round(sum(counts["bytes"]) / 1e6 / seconds, 3) if seconds else 0,
        "Operations": sum(counts["operations"]),
        "Sent": counts["sent"],
        "Held requests": counts["held_rooms"] or 0,
        "Held blocks": counts["held_blocks"] or 0,
    }
    return shown | {f"Failed ({code})": count for code, count in sorted(counts["failures"].items())}


class TransferStats:
    """Counts since the last `take`. For the scheduler's thread only."""

    def __init__(self) -> None:
        self._counts = no_counts()
        self._held: dict[str, int] = {}
        self._changed = False

    def heard(self, events: Iterable[RoomEvent]) -> None:
        """Count the ends of rooms."""
        for event in events:
            if event.kind == "committed":
                amounts = event.amounts.values()
                self._counts["seconds"].append(event.phases_s.get(TRANSFER_PHASE, 0.0))
                self._counts["bytes"].append(sum(amount.bytes for amount in amounts))
                self._counts["operations"].append(sum(amount.operations for amount in amounts))
            elif event.kind == "completed":
                self._counts["sent"] += 1
            elif event.kind in {"failed", "aborted", "refused"}:
                self.failed(event.code or event.kind)
            else:
                continue
            self._changed = True

    def failed(self, code: str) -> None:
        self._counts["failures"][code] = self._counts["failures"].get(code, 0) + 1
        self._changed = True

    @property
    def holds(self) -> bool:
        """Whether blocks of finished requests wait for decode."""
        return bool(self._held)

    def held(self, request: str, blocks: int) -> None:
        """A finished request's blocks wait for decode."""
        self._held[request] = blocks
        self._changed = True

    def let_go(self, requests: Iterable[str]) -> None:
        """Blocks of these requests wait no longer."""
        for request in requests:
            self._changed |= self._held.pop(request, None) is not None

    def take(self, *, holds: bool = True) -> Counts | None:
        """Return the counts since the last call; None without a change. `holds`: this process knows the held blocks."""
        if not self._changed:
            return None
        counts, self._counts, self._changed = self._counts, no_counts(), False
        held = {"held_rooms": len(self._held), "held_blocks": sum(self._held.values())}
        return counts | held if holds else counts
