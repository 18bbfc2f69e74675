"""Where the time of a room goes, on both sides."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, gained, mean, now, quantile, rate
from deploy.grafana.panels import Board, Query, Row, heat, lines, table, text

PREFILL = "admit_to_begin|admit_to_offer_received|offer_to_order|plan|first_byte|move|digest|offer_to_sent"
DECODE = "admit_to_offer|verify|verify_busy|offer_to_commit|admit_to_commit|commit_to_claim|claim_to_release"
IN_TURN = "admit_to_offer|offer_to_commit|commit_to_claim"
"""Decode's phases that follow one another and add up to the whole."""

BOARD = Board(
    "kvbridge-room",
    "kvbridge / One room's way",
    "Where the time of a room goes: the whole, its parts one after another, and what happened to rooms that did not arrive.",
    (
        Row(
            "The whole",
            (
                heat(
                    "From admission to claim",
                    "Rooms by how long they took, from their admission on decode to the first claim by an engine. Two bands "
                    "mean two kinds of rooms; look at lengths or peers.",
                    rate("admission_to_claim_seconds_bucket", "le"),
                    unit="s",
                ),
                lines(
                    "From admission to claim, quantiles",
                    "The same as quantiles over all chosen decode nodes.",
                    *(
                        Query(quantile(share, "admission_to_claim_seconds"), f"p{share * 100:g}")
                        for share in (0.5, 0.9, 0.99)
                    ),
                    unit="s",
                    width=12,
                ),
            ),
        ),
        Row(
            "Its parts",
            (
                text(
                    "Decode's `admit_to_offer`, `offer_to_commit` and `commit_to_claim` follow one another and are the whole. "
                    "While `offer_to_commit` runs, prefill is in `offer_to_order` (waiting for its engine to publish), `plan`, "
                    "`first_byte` and `move`. Long `commit_to_claim`: the decode engine is late, not the network.",
                    height=3,
                ),
                lines(
                    "Mean time of the parts, decode",
                    "Parts that follow one another; their sum is the mean of the whole.",
                    Query(mean("phase_duration_seconds", "phase", where=f'phase=~"{IN_TURN}"'), "{{phase}}"),
                    unit="s",
                    stacked=True,
                    width=12,
                ),
                lines(
                    "Mean time of the parts, prefill",
                    "They overlap: orders of several chunks are under way together.",
                    Query(mean("phase_duration_seconds", "phase", where=f'phase=~"{PREFILL}"'), "{{phase}}"),
                    unit="s",
                    width=12,
                ),
                lines(
                    "Slowest hundredth by phase, decode",
                    "p99 of every phase that passes on decode.",
                    Query(quantile(0.99, "phase_duration_seconds", "phase", where=f'phase=~"{DECODE}"'), "{{phase}}"),
                    unit="s",
                    width=12,
                ),
                lines(
                    "Slowest hundredth by phase, prefill",
                    "p99 of every phase that passes on prefill.",
                    Query(quantile(0.99, "phase_duration_seconds", "phase", where=f'phase=~"{PREFILL}"'), "{{phase}}"),
                    unit="s",
                    width=12,
                ),
                table(
                    "Phases in the time shown",
                    "Every phase with its quantiles. A phase without figures did not happen: `verify` and `digest` are there with "
                    "integrity.digest only.",
                    {
                        "p99": Query(quantile(0.99, "phase_duration_seconds", "phase", window="$__range")),
                        "p90": Query(quantile(0.9, "phase_duration_seconds", "phase", window="$__range")),
                        "p50": Query(quantile(0.5, "phase_duration_seconds", "phase", window="$__range")),
                        "Rooms": Query(gained("phase_duration_seconds_count", "phase")),
                    },
                    by=("phase",),
                    units={"p50": "s", "p90": "s", "p99": "s", "Rooms": "short"},
                ),
            ),
        ),
        Row(
            "Before it and beside it",
            (
                lines(
                    "Pairings",
                    "Requests to bootstrap in a second, by outcome.",
                    Query(rate("pairings_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                ),
                lines(
                    "Time of a pairing, p99",
                    "Both reservations included. It is part of the time to first token, and not of the way above.",
                    Query(quantile(0.99, "pairing_duration_seconds", "outcome"), "{{outcome}}"),
                    unit="s",
                ),
                lines(
                    "Waits for pages, p99",
                    "By how the wait ended: admitted, refused, timeout, or the client left.",
                    Query(quantile(0.99, "admission_wait_seconds", "outcome"), "{{outcome}}"),
                    unit="s",
                ),
                lines(
                    "Rooms by state",
                    "Rooms that are known now and not over, on both sides together.",
                    Query(now("rooms", "state", where='state!~"completed|aborted|failed"'), "{{state}}"),
                    stacked=True,
                ),
                lines(
                    "Rooms that did not arrive",
                    "Aborted and failed rooms a second, by the code of the first cause.",
                    Query(rate("rooms_ended_total", "state, code", where='state!="completed"'), "{{state}} {{code}}"),
                    unit="ops",
                ),
                lines(
                    "Rooms ended by a limit",
                    "Rooms in the time shown that ended because something did not happen in time, by the key of the limit in "
                    "the configuration.",
                    Query(
                        f"sum by (limit) (increase(kvbridge_rooms_ended_by_limit_total{{{CHOSEN}}}[$__rate_interval]))",
                        "{{limit}}",
                    ),
                ),
                lines(
                    "Pages that arrived with other bytes",
                    "By component; each failed its room, and anything but 0 is the alert KvbridgeDigestMismatch. "
                    "Decode compares them with integrity.digest only: without it nobody looks.",
                    Query(
                        f"sum by (component) (increase(kvbridge_digest_mismatches_total{{{CHOSEN}}}[$__rate_interval]))",
                        "{{component}}",
                    ),
                ),
            ),
        ),
    ),
)
