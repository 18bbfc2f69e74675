"""What the daemons know of sparse decode: its slots, its host pool, and what was brought for it."""

from __future__ import annotations

from deploy.grafana.expressions import now, quantile, rate
from deploy.grafana.panels import Board, Query, Row, lines, number, text

HOST = 'space="host"'
SLOTS = 'space="request"'
HITS, LOADED = (rate("sparse_rows_total", where=f'outcome="{outcome}"') for outcome in ("hit", "loaded"))

BOARD = Board(
    "kvbridge-sparse",
    "kvbridge / Sparse decode",
    "What the daemons know of sparse decode: its slots, its host pool, and what was brought for it.",
    (
        Row(
            "Slots and host pool",
            (
                number(
                    "Requests that decode",
                    "Rooms that a decode engine has claimed and not released; each has a slot of the hot buffer.",
                    now("rooms", where='state="claimed"'),
                ),
                number(
                    "Hot-buffer slots available",
                    "Share of the index space `request`. At 0 no request can start, whatever is free on the host.",
                    f"{now('pages_available', where=SLOTS)} / {now('pool_pages', where=SLOTS)}",
                    unit="percentunit",
                ),
                number(
                    "Host pages available",
                    "Share of the index space `host`, where all rows are but the newest.",
                    f"{now('pages_available', where=HOST)} / {now('pool_pages', where=HOST)}",
                    unit="percentunit",
                ),
                lines(
                    "Slots of the hot buffer",
                    "By state. A slot is the id of a room in the space `request`.",
                    Query(now("pool_pages", "state", where=SLOTS), "{{state}}"),
                    stacked=True,
                    width=12,
                ),
                lines(
                    "Host pool",
                    "By state, in bytes.",
                    Query(now("pool_bytes", "state", where=HOST), "{{state}}"),
                    unit="bytes",
                    stacked=True,
                    width=12,
                ),
            ),
        ),
        Row(
            "What was brought, and how long it is used",
            (
                lines(
                    "Bytes by component",
                    "What arrives at decode nodes.",
                    Query(rate("transferred_bytes_total", "component", where='direction="received"'), "{{component}}"),
                    unit="Bps",
                    stacked=True,
                    width=12,
                ),
                lines(
                    "Time in use",
                    "How long engines use the pages of a room, from claim to release.",
                    *(
                        Query(
                            quantile(share, "phase_duration_seconds", where='phase="claim_to_release"'),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.9, 0.99)
                    ),
                    unit="s",
                    width=12,
                ),
            ),
        ),
        Row(
            "What the hot buffer did",
            (
                text(
                    "Engines tell it when they release a room (`DecodeEngine.release(room, sparse=...)`), all of the request at "
                    "once; an engine that does not say it shows nothing here. Rows of the ring are not among the selected ones.",
                    height=3,
                ),
                lines(
                    "Selected rows found in the hot buffer",
                    "Share of hits. The rest was loaded from the host while attention waited: more hot rows help, "
                    "if memory allows (`kvbridge fit`).",
                    Query(f"{HITS} / ({HITS} + {LOADED})", "hits"),
                    unit="percentunit",
                    width=12,
                    empty_unless="an engine has told what its hot buffer did",
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
    ),
)
