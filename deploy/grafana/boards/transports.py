"""Bytes: how many, how fast, by which transport, to whom."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, of_each, rate
from deploy.grafana.panels import Board, Query, Row, Variable, lines, table

PEER = 'peer=~"$peer"'
BY_TRANSPORT = "direction, transport"

BOARD = Board(
    "kvbridge-transports",
    "kvbridge / Transports by peer",
    "Bytes by transport, component and peer; which peer is slow or failing.",
    (
        Row(
            "Transports",
            (
                lines(
                    "Bytes a second",
                    "What arrives, by direction and transport.",
                    Query(rate("transferred_bytes_total", BY_TRANSPORT), "{{direction}} {{transport}}"),
                    unit="Bps",
                ),
                lines(
                    "Bytes by component",
                    "Which part of the cache is moved, sent bytes.",
                    Query(rate("transferred_bytes_total", "component", where='direction="sent"'), "{{component}}"),
                    unit="Bps",
                    stacked=True,
                    width=12,
                ),
                lines(
                    "Memory registered with transports",
                    "1 when all is; a daemon is not ready before.",
                    Query(of_each("registration_progress_ratio", how="min"), "{{daemon}}"),
                    unit="percentunit",
                    width=12,
                ),
            ),
        ),
        Row(
            "Peers",
            (
                table(
                    "Every peer",
                    "As the chosen daemons see them. Slow: a low rate while busy beside others of the same transport.",
                    {
                        "Bytes/s": Query(
                            rate("peer_transferred_bytes_total", "peer, direction, transport", where=PEER)
                        ),
                        "Rate while busy": Query(
                            f"{rate('peer_transferred_bytes_total', 'peer, direction, transport', where=PEER)} / "
                            f"({rate('peer_busy_seconds_total', 'peer, direction, transport', where=PEER)} > 0)"
                        ),
                    },
                    by=("peer", "direction", "transport"),
                    units={"Bytes/s": "Bps", "Rate while busy": "Bps"},
                ),
                lines(
                    "Rate while busy by peer",
                    "The line at the bottom is the slow peer.",
                    Query(
                        f"{rate('peer_transferred_bytes_total', 'peer, direction', where=PEER)} / "
                        f"({rate('peer_busy_seconds_total', 'peer, direction', where=PEER)} > 0)",
                        "{{direction}} {{peer}}",
                    ),
                    unit="Bps",
                ),
                lines(
                    "Failures by peer",
                    "Rooms that failed with a peer, refused handshakes, and losses (`lost`), a second.",
                    Query(rate("peer_failures_total", "peer, code", where=PEER), "{{peer}} {{code}}"),
                    unit="ops",
                    empty_unless="something went wrong with a peer since the daemons started",
                ),
            ),
        ),
        Row(
            "Control messages",
            (
                lines(
                    "Sent again, given up",
                    "Control messages a second that were not acknowledged in time, and those that never were.",
                    Query(rate("control_resends_total"), "sent again"),
                    Query(rate("control_undelivered_total"), "given up"),
                    unit="ops",
                ),
                lines(
                    "Refused frames and messages",
                    "Frames that were malformed, stale or not authenticated, and refused messages about rooms, a second.",
                    Query(rate("control_frames_refused_total", "reason"), "frame {{reason}}"),
                    Query(rate("room_messages_refused_total", "code"), "message {{code}}"),
                    unit="ops",
                    empty_unless="a frame or a message was refused since the daemons started",
                ),
            ),
        ),
    ),
    (Variable("peer", "Peer", f"label_values(kvbridge_peer_transferred_bytes_total{{{CHOSEN}}}, peer)"),),
)
