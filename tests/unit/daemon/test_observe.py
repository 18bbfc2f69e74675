"""What the services tell, as metrics."""

from __future__ import annotations

from kvbridge.core.ids import Role
from kvbridge.core.session.states import RoomState
from kvbridge.daemon.observe import MetricsObserver
from kvbridge.telemetry.metrics import Metrics


def test_an_ended_room_is_counted_with_the_code_of_its_first_cause() -> None:
    metrics = Metrics(role="decode", version="0")
    observer = MetricsObserver(metrics)
    observer.room(Role.DECODE, RoomState.OFFERED, "")
    observer.room(Role.DECODE, RoomState.FAILED, "peer_failed")
    page = metrics.render()[0].decode()
    ended = [line for line in page.splitlines() if line.startswith("kvbridge_rooms_ended_total{")]
    assert ended == ['kvbridge_rooms_ended_total{code="peer_failed",state="failed"} 1.0']
