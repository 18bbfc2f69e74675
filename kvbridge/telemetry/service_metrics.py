"""Metrics of what is no node's own work: the directory, HTTP, the log and traces.

Owns: their declarations, as `telemetry/metrics.py` owns those of rooms, pages and bytes. Must not know: how values are kept.
"""

from __future__ import annotations

from kvbridge.core.errors import CapacityError, DeadlineError, FingerprintMismatchError, NamespaceError, NotReadyError
from kvbridge.telemetry.specs import BOOTSTRAP, EVERYBODY, NODES, PHASE_BUCKETS_S, ROUTER, MetricKind, MetricSpec

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
_PAIRING_OUTCOMES = (
    "paired",
    CapacityError.code,
    NotReadyError.code,
    DeadlineError.code,
    FingerprintMismatchError.code,
    NamespaceError.code,
)
ROUTED_ORDERS = ("none", "paired", "plain", "decode_alone")
ROUTED_OUTCOMES = ("answered", "refused", "failed", "broken", "over_limit", "client_left")

SERVICE_METRICS: tuple[MetricSpec, ...] = (
    # The directory.
    INSTANCES := MetricSpec(
        "kvbridge_instances",
        _GAUGE,
        ("role", "state"),
        "Registered instances: ready to be paired, complete and not ready, or with ranks missing.",
        (BOOTSTRAP,),
        values={"role": NODES, "state": ("ready", "not_ready", "incomplete")},
    ),
    HEARTBEAT_AGE := MetricSpec(
        "kvbridge_heartbeat_age_seconds",
        _GAUGE,
        ("role", "daemon"),
        "Since a registered node was last heard of; it is forgotten at directory.expire_after_s. Of several, the oldest.",
        (BOOTSTRAP,),
    ),
    PAIRINGS := MetricSpec(
        "kvbridge_pairings_total",
        _COUNTER,
        ("outcome",),
        "Requests for a pair: `paired`, or the code of the error that the caller was answered.",
        (BOOTSTRAP,),
        values={"outcome": _PAIRING_OUTCOMES},
    ),
    PAIRING_DURATION := MetricSpec(
        "kvbridge_pairing_duration_seconds",
        _HISTOGRAM,
        ("outcome",),
        "How long they took, both reservations included.",
        (BOOTSTRAP,),
        values={"outcome": _PAIRING_OUTCOMES},
        buckets=PHASE_BUCKETS_S,
    ),
    PAIRING_PREFIXES := MetricSpec(
        "kvbridge_pairing_prefixes_total",
        _COUNTER,
        ("role", "outcome"),
        "Requests with page keys that got a pair, by what became of the guess who holds the beginning of the prompt: `right`, "
        "`stale` (it holds none), `passed_over` (another was so much emptier, or it was full), `none` (there was no guess).",
        (BOOTSTRAP,),
        values={"role": NODES, "outcome": ("right", "stale", "passed_over", "none")},
    ),
    STORE_REFUSED := MetricSpec(
        "kvbridge_store_values_refused_total",
        _COUNTER,
        ("reason",),
        "Values in the directory's store that were malformed and treated as absent: node or room.",
        (BOOTSTRAP,),
        values={"reason": ("node", "room")},
    ),
    STORE_FAILED := MetricSpec(
        "kvbridge_store_failures_total",
        _COUNTER,
        ("reason",),
        "Calls to the directory's store that failed: timeout, connection or refused.",
        (BOOTSTRAP,),
        values={"reason": ("connection", "refused", "timeout")},
    ),
    # The router.
    ROUTED := MetricSpec(
        "kvbridge_router_requests_total",
        _COUNTER,
        ("order", "outcome"),
        "Requests to the router, by how they were sent (`none`: nothing came back) and what became of them: answered, refused by "
        "a server as the client's mistake, failed before or broken after the first byte, over the limit, or the client left.",
        (ROUTER,),
        values={"order": ROUTED_ORDERS, "outcome": ROUTED_OUTCOMES},
    ),
    FIRST_BYTE := MetricSpec(
        "kvbridge_router_first_byte_seconds",
        _HISTOGRAM,
        ("order",),
        "From a request to the first byte of its answer, all that was tried included.",
        (ROUTER,),
        values={"order": ROUTED_ORDERS[1:]},
        buckets=(*PHASE_BUCKETS_S, 60.0, 120.0, 300.0),
    ),
    ATTEMPTS_FAILED := MetricSpec(
        "kvbridge_router_attempts_failed_total",
        _COUNTER,
        ("role", "reason"),
        "Attempts before the first byte that failed at a server: no connection, a status of 500 or more, an answer that broke, "
        "ill health while it was waited for, other addresses than the router knew.",
        (ROUTER,),
        values={"role": NODES, "reason": ("broken", "busy", "connect", "health", "moved", "status")},
    ),
    ROUTER_SERVERS := MetricSpec(
        "kvbridge_router_servers",
        _GAUGE,
        ("role", "state"),
        "Servers that are well, and those that get no request now.",
        (ROUTER,),
        values={"role": NODES, "state": ("well", "out")},
    ),
    ROUTER_OUTSTANDING := MetricSpec(
        "kvbridge_router_outstanding_requests",
        _GAUGE,
        ("role",),
        "Requests under way at all servers of a role.",
        (ROUTER,),
        values={"role": NODES},
    ),
    # HTTP.
    HTTP_REQUESTS := MetricSpec(
        "kvbridge_http_requests_total",
        _COUNTER,
        ("route", "method", "code"),
        "HTTP requests that were answered, by the route's template (`other`: no route) and status; 499: the caller left first.",
        EVERYBODY,
    ),
    HTTP_DURATION := MetricSpec(
        "kvbridge_http_request_duration_seconds",
        _HISTOGRAM,
        ("route", "method"),
        "How long they took, until the last byte of the answer; those that wait for something wait.",
        EVERYBODY,
        buckets=(*PHASE_BUCKETS_S, 60.0),
    ),
    LINES_LEFT_OUT := MetricSpec(
        "kvbridge_log_lines_left_out_total",
        _COUNTER,
        ("event",),
        "Log lines that were not written because there were too many of their kind, which a line `lines_left_out` tells.",
        EVERYBODY,
        values={
            "event": (
                "attempt_failed",
                "connection_refused",
                "frame_refused",
                "library_output",
                "pages_not_copied",
                "prefix_not_kept",
                "request_failed",
                "request_refused_unread",
                "room_ended",
                "room_message_refused",
            )
        },
    ),
    SPANS := MetricSpec(
        "kvbridge_trace_spans_total",
        _COUNTER,
        ("outcome",),
        "Spans of traces (telemetry.traces): taken by the collector, lost because it did not take them, or dropped because too "
        "many waited for it.",
        EVERYBODY,
        values={"outcome": ("exported", "failed", "dropped")},
    ),
    TRACEPARENTS_IGNORED := MetricSpec(
        "kvbridge_traceparents_ignored_total",
        _COUNTER,
        (),
        "Requests whose `traceparent` header is none; they were served without it.",
        EVERYBODY,
    ),
)
