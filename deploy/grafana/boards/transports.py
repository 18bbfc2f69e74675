"""Bytes: how many, how fast, by which transport, to whom, in pieces of what size."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, now, of_each, quantile, rate, rate_of_each
from deploy.grafana.panels import Board, Query, Row, Variable, heat, lines, table

PEER = 'peer=~"$peer"'
BY_TRANSPORT = "direction, transport"

BOARD = Board(
    "kvbridge-transports",
    "kvbridge / Transports by peer and size",
    "Bytes by transport, component, peer and size of copies; which peer is slow, silent or failing.",
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
                    "Rate while busy",
                    "Bytes over the time in which at least one transfer was under way: what the wire gives. Compare it with "
                    "what `kvbridge bench-peer` measures on an idle system.",
                    Query(
                        f"{rate('transferred_bytes_total', BY_TRANSPORT)} / "
                        f"({rate('transfer_busy_seconds_total', BY_TRANSPORT)} > 0)",
                        "{{direction}} {{transport}}",
                    ),
                    unit="Bps",
                ),
                lines(
                    "Share of time busy",
                    "Of each daemon. Near 1 the transport is the bottleneck.",
                    Query(
                        rate_of_each("transfer_busy_seconds_total", BY_TRANSPORT),
                        "{{daemon}} {{direction}} {{transport}}",
                    ),
                    unit="percentunit",
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
            "Sizes",
            (
                heat(
                    "Sizes of copies",
                    "Copies by size, each room's at their mean. Many small ones are bound by their count, not by bytes.",
                    rate("operation_bytes_bucket", "le", where='direction="sent"'),
                    unit="bytes",
                ),
                lines(
                    "Copies a second",
                    "By transport.",
                    Query(rate("operation_bytes_count", "transport", where='direction="sent"'), "{{transport}}"),
                    unit="ops",
                    width=6,
                ),
                lines(
                    "Size of a copy by component, median",
                    "A component of small rows is sent in small copies; larger pages help.",
                    Query(quantile(0.5, "operation_bytes", "component", where='direction="sent"'), "{{component}}"),
                    unit="bytes",
                    width=6,
                ),
            ),
        ),
        Row(
            "Peers",
            (
                table(
                    "Every peer",
                    "As the chosen daemons see them. Slow: a low rate while busy beside others of the same transport. Silent: the "
                    "highest age. Failing: rooms and handshakes in the time shown.",
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
                    "Silence",
                    "Since a connected peer was last heard of. Heartbeats are 2 s apart unless configured otherwise; at "
                    "timeouts.peer_silence_s it counts as lost.",
                    Query(now("peer_silence_seconds", "peer", where=PEER, how="max"), "{{peer}}"),
                    unit="s",
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
                    "Peers",
                    "Nodes of the other role, by state; rooms go to and from connected ones.",
                    Query(now("peers", "state"), "{{state}}"),
                ),
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
