"""The services' facts as metrics: implements `service.observer.Observer` over `telemetry.Metrics`."""

from __future__ import annotations

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Role
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.metrics import Direction, Metrics


class MetricsObserver:
    """Counts what the services tell."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def refused(self, reason: str) -> None:
        """Something from outside was refused."""
        self._metrics.admission_refused(reason)

    def waited(self, outcome: str, seconds: float) -> None:
        """A request that waited for pages waits no more."""
        self._metrics.admission_waited(outcome, seconds)

    def room(self, role: Role, state: RoomState, code: str) -> None:
        """A room came into a state; `code` is that of its first cause, empty while there is none."""
        del role
        if state.final:
            self._metrics.room_ended(state.value, code)

    def sent(self, amounts: Amounts, phases_s: dict[str, float]) -> None:
        """A rank has sent its part of a room."""
        del amounts  # counted order by order, with their transport
        self._metrics.phases(phases_s)

    def mismatched(self, component: ComponentKind, pages: int) -> None:
        """That many pages of a component have arrived with other bytes than were sent."""
        self._metrics.digest_mismatches(component, pages)

    def received(self, amounts: Amounts, phases_s: dict[str, float]) -> None:
        """A room has arrived."""
        self._metrics.transferred(amounts, Direction.RECEIVED, "any")
        self._metrics.phases(phases_s)
