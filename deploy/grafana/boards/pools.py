"""Pages: how many there are, who has them, what is waited for."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, NAME, now, of_each, quantile, rate, rate_of_each
from deploy.grafana.panels import Board, Query, Row, Variable, lines, number, table

_HIT = 'outcome="hit"'
_HITS, _LOADED = (rate("sparse_rows_total", where=f'outcome="{outcome}"') for outcome in ("hit", "loaded"))
_LEAST_RATE = 0.001
"""Tokens a second: without requests that have page keys the share is 0, and not nothing divided by nothing."""

BOARD = Board(
    "kvbridge-pools",
    "kvbridge / Pools, leases, quarantine",
    "Pages of each index space: free, cached, held by engines, leased to transfers, in quarantine. What waits for them, and why "
    "they do not come back.",
    (
        Row(
            "Pages",
            (
                lines(
                    "Pages of $space",
                    "By state, over the chosen daemons. Leased: a transfer reads or writes them. Held: by an engine or a room. "
                    "Quarantined: nobody may use them until something is proved. Cached: prefixes that stay.",
                    Query(now("pool_pages", "state", where='space="$space"'), "{{state}}"),
                    stacked=True,
                    width=24,
                    repeat="space",
                ),
                lines(
                    "Available share of each daemon",
                    "The scarcest space of each daemon. At 0 the daemon refuses, or lets requests with `wait_s` wait.",
                    Query(
                        f"min by (job, instance) (sum by (job, instance, space) (kvbridge_pages_available{{{CHOSEN}}}) / "
                        f"sum by (job, instance, space) (kvbridge_pool_pages{{{CHOSEN}}})) * {NAME}",
                        "{{daemon}}",
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Row(
            "Prefixes that stay",
            (
                lines(
                    "Cached share of prompts",
                    "Of the prompt tokens of requests with page keys, the share that was cached when they were admitted. On "
                    "prefill they are not computed, on decode not received.",
                    Query(
                        f"{rate('prefix_tokens_total', 'job, instance', where=_HIT)} / "
                        f"clamp_min({rate('prefix_tokens_total', 'job, instance')}, {_LEAST_RATE}) * {NAME}",
                        "{{daemon}}",
                    ),
                    unit="percentunit",
                ),
                lines(
                    "Evicted pages",
                    "Cached pages that have gone, a second, by why. Many for space and a low share of cached prompts: more memory "
                    "would pay (`kvbridge fit --trace` says how much). Retained ones: requests ask to keep more than fits.",
                    Query(rate_of_each("prefix_evicted_pages_total", "reason"), "{{daemon}}: {{reason}}"),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Host tier",
            (
                lines(
                    "Cached pages by place",
                    "On the device alone: gone when others need the place. Both: given up without losing anything. Host: they come "
                    "back when a prompt shares them.",
                    Query(now("host_tier_pages", "residency"), "{{residency}}"),
                    stacked=True,
                ),
                lines(
                    "Copied between device and host",
                    "Bytes a second, by direction.",
                    Query(rate("host_tier_copied_bytes_total", "direction"), "{{direction}}"),
                    unit="Bps",
                ),
                lines(
                    "Share of the time in which it is copied",
                    "Of backups at most tier.host.backup.link_share; the rest is left to transfers and sparse decode.",
                    Query(rate_of_each("host_tier_copy_seconds_total", "direction"), "{{daemon}} {{direction}}"),
                    unit="percentunit",
                ),
                lines(
                    "Orders to copy",
                    "A second, by how they ended. Anything but `done` is in the log (`pages_not_copied`), with the reason.",
                    Query(rate("host_tier_copies_total", "direction, outcome"), "{{direction}} {{outcome}}"),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Store below host memory",
            (
                lines(
                    "State of the store",
                    "Closed: it is asked. Open: it has failed too often and is left alone for a while; requests go on without it.",
                    Query(now("prefix_store_state", "state"), "{{state}}"),
                ),
                lines(
                    "Objects",
                    "A second, by what was asked and how it ended. Absent is a miss; short, other_key and wrong_digest are bad "
                    "objects, which were dropped.",
                    Query(rate("prefix_store_objects_total", "verb, outcome"), "{{verb}} {{outcome}}"),
                    unit="ops",
                ),
                lines(
                    "Bytes to and from the store",
                    "A second, of whole objects.",
                    Query(rate("prefix_store_bytes_total", "verb"), "{{verb}}"),
                    unit="Bps",
                ),
                lines(
                    "Prompts that were looked for",
                    "A second: all that the store had of them came (found); tier.prefetch_s was over before (late); a part came, "
                    "the rest was missing or bad (part); or there was nothing.",
                    Query(rate("prefix_store_prefetches_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Admission",
            (
                number(
                    "Waiting requests",
                    "Requests with `wait_s` that wait for pages now.",
                    now("admission_waiting_requests"),
                ),
                number(
                    "Starved for",
                    "For how long not even the smallest request fits on some daemon; 0 if one does everywhere.",
                    now("admission_starved_seconds", how="max"),
                    unit="s",
                    bad_above=10,
                ),
                lines(
                    "Refused requests",
                    "Refusals a second by code; `wait_timeout` and `queue_full` are kinds of `capacity`.",
                    Query(rate("admissions_refused_total", "code"), "{{code}}"),
                    unit="ops",
                    width=12,
                ),
                lines(
                    "Time until admitted, p99",
                    "Of requests that had to wait, by how the wait ended.",
                    Query(quantile(0.99, "admission_wait_seconds", "outcome"), "{{outcome}}"),
                    unit="s",
                    width=12,
                ),
            ),
        ),
        Row(
            "Sparse decode",
            (
                lines(
                    "Selected rows found in the hot buffer",
                    "Share of hits. The rest was loaded from the host while attention waited: more hot rows help, "
                    "if memory allows (`kvbridge fit`).",
                    Query(f"{_HITS} / ({_HITS} + {_LOADED})", "hits"),
                    unit="percentunit",
                    width=12,
                    empty_unless="an engine has told what its hot buffer did (`release(room, sparse=...)`)",
                ),
                lines(
                    "Rows a second",
                    "Over all layers. hit: was in the hot buffer; loaded: from the host, in a step; preloaded: likewise, at "
                    "admission; backed_up: new ones, to the host.",
                    Query(rate("sparse_rows_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                    width=12,
                ),
            ),
        ),
        Row(
            "Leases and quarantine",
            (
                lines(
                    "Pages in quarantine",
                    "By daemon. They come back when what is missing is proved.",
                    Query(of_each("pool_pages", where='state="quarantined"'), "{{daemon}}"),
                ),
                lines(
                    "Rooms in quarantine",
                    "By what is not proved yet: that a transport of ours is quiet, a writer is shut out, an engine has let go, or "
                    "the process of an engine has ended.",
                    Query(now("rooms_quarantined", "reason"), "{{reason}}"),
                ),
                lines(
                    "Writers shut out",
                    "Fences in one step: a writer gave no proof, so decode gave out new endpoints and closed the old ones.",
                    Query(
                        f"delta(kvbridge_endpoint_epoch{{{CHOSEN}}}[$__rate_interval]) * {NAME}",
                        "{{daemon}}",
                    ),
                ),
                lines(
                    "Engines",
                    "Engine processes by state. `gone`: its connection has ended and pages wait for the end of its process.",
                    Query(now("engines", "state"), "{{state}}"),
                ),
                lines(
                    "Rank workers started again",
                    "A second, each daemon. Rooms that were on the worker fail.",
                    Query(rate_of_each("worker_restarts_total", "reason"), "{{daemon}} {{reason}}"),
                    unit="ops",
                ),
                table(
                    "Pages of each daemon now",
                    "Every space of every chosen daemon. Over all states the pages sum to the pool.",
                    {
                        state.capitalize(): Query(
                            f'sum by (daemon, space) (kvbridge_pool_pages{{{CHOSEN}, state="{state}"}} * on (job, instance) '
                            "group_left (daemon) kvbridge_build_info)"
                        )
                        for state in ("quarantined", "leased", "held", "cached", "free")
                    },
                    by=("daemon", "space"),
                    units={},
                ),
            ),
        ),
    ),
    (Variable("space", "Index space", 'label_values(kvbridge_pool_pages{instance=~"$instance"}, space)'),),
)
