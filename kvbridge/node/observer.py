"""What the services tell about themselves, as a protocol: telemetry implements it, tests count with it."""

from __future__ import annotations

from typing import Protocol

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Role
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.states import RoomState


class Observer(Protocol):
    """Receives facts; never raises, never waits."""

    def refused(self, reason: str) -> None:
        """Something from outside was refused; `reason` is one of a small set of words."""

    def waited(self, outcome: str, seconds: float) -> None:
        """A request that waited for pages waits no more: it was `admitted` or `refused`, it had its `timeout`, or `left`."""

    def room(self, role: Role, state: RoomState, code: str) -> None:
        """A room came into a state; `code` is that of its first cause, empty while there is none."""

    def sent(self, amounts: Amounts, phases_s: dict[str, float]) -> None:
        """A rank has sent its part of a room."""

    def mismatched(self, component: ComponentKind, pages: int) -> None:
        """That many pages of a component have arrived with other bytes than were sent."""

    def received(self, amounts: Amounts, phases_s: dict[str, float]) -> None:
        """A room has arrived."""
