"""The first board that one opens: is it well, how much goes through, and where to look next."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, gained, now, of_each, quantile, rate, rate_of_each
from deploy.grafana.panels import Board, Query, Row, lines, number, table

FAILED = 'state="failed"'

BOARD = Board(
    "kvbridge-overview",
    "kvbridge / Overview",
    "Is it well, how much goes through, and where to look next. The other boards are under the link at the top right.",
    (
        Row(
            "Now",
            (
                number(
                    "Daemons not ready",
                    "Daemons that answer and admit no new rooms now, of those chosen. Their /ready says why. A daemon that does "
                    "not answer at all is not counted here; the alert KvbridgeDaemonDown tells of it.",
                    f"count(kvbridge_ready{{{CHOSEN}}} == 0) or vector(0)",
                    bad_above=1,
                ),
                number(
                    "Rooms open",
                    "Rooms that are on their way or in use, counted on decode: admitted there and not yet released.",
                    f'sum(kvbridge_rooms{{{CHOSEN}, state!~"completed|aborted|failed"}} and on (job, instance) '
                    'kvbridge_build_info{role="decode"})',
                ),
                number(
                    "Rooms completed a second",
                    "Counted on decode, when the last engine has released the pages.",
                    f'sum(rate(kvbridge_rooms_ended_total{{{CHOSEN}, state="completed"}}[$__rate_interval]) and on '
                    '(job, instance) kvbridge_build_info{role="decode"})',
                    unit="ops",
                ),
                number(
                    "Rooms that fail",
                    "Share of the rooms that ended in the time shown which failed. Aborted ones were given up by somebody and do "
                    "not count.",
                    f"{gained('rooms_ended_total', where=FAILED)} / ({gained('rooms_ended_total')} > 0) or vector(0)",
                    unit="percentunit",
                    bad_above=0.01,
                ),
                number(
                    "Arriving bytes a second",
                    "KV cache that arrives at decode nodes.",
                    rate("transferred_bytes_total", where='direction="received"'),
                    unit="Bps",
                ),
                number(
                    "Pages in quarantine",
                    "Pages that nobody may use until something is proved. The board 'Pools, leases, quarantine' says what.",
                    now("pool_pages", where='state="quarantined"'),
                    bad_above=1,
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                lines(
                    "Rooms that end",
                    "Rooms that end in a second, by how. On each side: a good room ends once on prefill and once on decode.",
                    Query(rate("rooms_ended_total", "state"), "{{state}}"),
                    unit="ops",
                ),
                lines(
                    "From admission to claim",
                    "The whole way of a room as decode sees it. 'One room's way' takes it apart.",
                    *(
                        Query(quantile(share, "admission_to_claim_seconds"), f"p{share * 100:g}")
                        for share in (0.5, 0.9, 0.99)
                    ),
                    unit="s",
                ),
                lines(
                    "Bytes a second",
                    "KV cache that is sent by prefill and received by decode. Both should lie on one another.",
                    Query(rate("transferred_bytes_total", "direction"), "{{direction}}"),
                    unit="Bps",
                ),
                lines(
                    "Requests not admitted",
                    "Refusals a second by code. `capacity` means that pages are short, `client_limit` that one client wants too "
                    "much, `not_ready` that a daemon cannot serve.",
                    Query(rate("admissions_refused_total", "code"), "{{code}}"),
                    unit="ops",
                ),
                lines(
                    "Pages in use",
                    "Share of each index space that is not available, the fullest daemon. Cached pages that nobody reads are.",
                    Query(
                        f"max by (space) (1 - sum by (job, instance, space) (kvbridge_pages_available{{{CHOSEN}}}) "
                        f"/ sum by (job, instance, space) (kvbridge_pool_pages{{{CHOSEN}}}))",
                        "{{space}}",
                    ),
                    unit="percentunit",
                ),
                lines(
                    "Requests that wait for pages",
                    "How many requests with `wait_s` wait now, on each daemon.",
                    Query(of_each("admission_waiting_requests"), "{{daemon}}"),
                ),
            ),
        ),
        Row(
            "Who",
            (
                table(
                    "Daemons",
                    "Every chosen daemon, with what it runs. Sort by a heading to find the one that differs.",
                    {
                        "Ready": Query(
                            f"sum by (instance) (kvbridge_ready{{{CHOSEN}}}) * on (instance) group_left "
                            "(daemon, role, version, model) kvbridge_build_info"
                        ),
                        "Open rooms": Query(
                            f'sum by (instance) (kvbridge_rooms{{{CHOSEN}, state!~"completed|aborted|failed"}})'
                        ),
                        "Up for": Query(f"max by (instance) (time() - process_start_time_seconds{{{CHOSEN}}})"),
                        "Memory": Query(f"max by (instance) (process_resident_memory_bytes{{{CHOSEN}}})"),
                        "CPU": Query(
                            f"max by (instance) (rate(process_cpu_seconds_total{{{CHOSEN}}}[$__rate_interval]))"
                        ),
                    },
                    by=("daemon", "role", "instance", "version", "model"),
                    units={"Up for": "s", "Memory": "bytes", "CPU": "percentunit"},
                ),
                table(
                    "Firing alerts",
                    "From deploy/prometheus/alerts.yaml, where it is loaded. The runbook has an entry for each.",
                    {"Firing": Query('ALERTS{alertname=~"Kvbridge.*", alertstate="firing"}')},
                    by=("severity", "alertname", "daemon", "instance", "peer", "space"),
                    units={},
                    empty_unless="an alert fires",
                ),
                lines(
                    "CPU of each daemon",
                    "Of the node process, as a share of one core; rank workers are processes of their own. A node near 1 is "
                    "the bottleneck.",
                    Query(rate_of_each("process_cpu_seconds_total"), "{{daemon}}"),
                    unit="percentunit",
                    width=12,
                ),
                lines(
                    "Memory of each daemon",
                    "Resident memory of the node process. Pools are shared memory and count where they are touched.",
                    Query(of_each("process_resident_memory_bytes"), "{{daemon}}"),
                    unit="bytes",
                    width=12,
                ),
            ),
        ),
    ),
)
