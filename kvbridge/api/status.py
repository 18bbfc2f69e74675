"""What operators ask of any daemon.

Owns: readiness, and the protocol behind `/ready` and `/status`. Must not know: HTTP, rooms, instances.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvbridge.core.ids import FrozenModel


class Readiness(FrozenModel):
    """Whether new rooms can be admitted, and every reason why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


class StatusPort(Protocol):
    """What operators ask of any daemon."""

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see, as JSON-able data: role, ranks, peers, rooms and pools by state."""
