"""Where a room stands, as users see it."""

from __future__ import annotations

from enum import StrEnum


class RoomState(StrEnum):
    """Where a room stands, as users see it; one vocabulary for both sides."""

    ADMITTED = "admitted"
    OFFERED = "offered"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to the room."""
        return self in _FINAL


WITHDRAWN = "withdrawn"
"""Code of a room that failed since prefill's engine computes its prompt once more: the next generation of it is or will be held."""
_FINAL = frozenset({RoomState.COMPLETED, RoomState.ABORTED, RoomState.FAILED})
