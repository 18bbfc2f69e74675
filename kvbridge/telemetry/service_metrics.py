"""Metrics of what is no node's own work: the directory, the router, HTTP, the log and traces."""

from __future__ import annotations

from kvbridge.core.errors import CapacityError, DeadlineError, FingerprintMismatchError, NamespaceError, NotReadyError
from kvbridge.telemetry.specs import BOOTSTRAP, EVERYBODY, NODES, PHASE_BUCKETS_S, ROUTER, counter, gauge, histogram

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
ROUTED_ORDERS = ("none", "paired", "plain", "decode_alone")
ROUTED_OUTCOMES = ("answered", "refused", "failed", "broken", "over_limit", "client_left")
_REFUSALS = (CapacityError, NotReadyError, DeadlineError, FingerprintMismatchError, NamespaceError)
_PAIRING_OUTCOMES = ("paired", *(error.code for error in _REFUSALS))

# The directory.
INSTANCES = gauge(
    "kvbridge_instances",
    "Registered instances: ready to be paired, complete and not ready, or with ranks missing.",
    on=(BOOTSTRAP,),
    role=NODES,
    state=("ready", "not_ready", "incomplete"),
)
PAIRINGS = counter(
    "kvbridge_pairings_total",
    "Requests for a pair: `paired`, or the code of the error that the caller was answered.",
    on=(BOOTSTRAP,),
    outcome=_PAIRING_OUTCOMES,
)
PAIRING_DURATION = histogram(
    "kvbridge_pairing_duration_seconds",
    "How long they took, both reservations included.",
    on=(BOOTSTRAP,),
    outcome=_PAIRING_OUTCOMES,
    buckets=PHASE_BUCKETS_S,
)
PAIRING_PREFIXES = counter(
    "kvbridge_pairing_prefixes_total",
    "Requests with page keys that got a pair, by what became of the guess who holds the beginning of the prompt: `right`, "
    "`stale` (it holds none), `passed_over` (another was so much emptier, or it was full), `none` (there was no guess).",
    on=(BOOTSTRAP,),
    role=NODES,
    outcome=("right", "stale", "passed_over", "none"),
)
STORE_REFUSED = counter(
    "kvbridge_store_values_refused_total",
    "Values in the directory's store that were malformed and treated as absent: node or room.",
    on=(BOOTSTRAP,),
    reason=("node", "room"),
)
STORE_FAILED = counter(
    "kvbridge_store_failures_total",
    "Calls to the directory's store that failed: timeout, connection or refused.",
    on=(BOOTSTRAP,),
    reason=("connection", "refused", "timeout"),
)

# The router.
ROUTED = counter(
    "kvbridge_router_requests_total",
    "Requests to the router, by how they were sent (`none`: nothing came back) and what became of them: answered, refused by "
    "a server as the client's mistake, failed before or broken after the first byte, over the limit, or the client left.",
    on=(ROUTER,),
    order=ROUTED_ORDERS,
    outcome=ROUTED_OUTCOMES,
)
FIRST_BYTE = histogram(
    "kvbridge_router_first_byte_seconds",
    "From a request to the first byte of its answer, all that was tried included.",
    on=(ROUTER,),
    order=ROUTED_ORDERS[1:],
    buckets=(*PHASE_BUCKETS_S, 60.0, 120.0, 300.0),
)
ATTEMPTS_FAILED = counter(
    "kvbridge_router_attempts_failed_total",
    "Attempts before the first byte that failed at a server: no connection, a status of 500 or more, an answer that broke, "
    "ill health while it was waited for, other addresses than the router knew.",
    on=(ROUTER,),
    role=NODES,
    reason=("broken", "busy", "connect", "health", "moved", "status"),
)
ROUTER_SERVERS = gauge(
    "kvbridge_router_servers",
    "Servers that are well, and those that get no request now.",
    on=(ROUTER,),
    role=NODES,
    state=("well", "out"),
)

# HTTP, the log, traces.
HTTP_REQUESTS = counter(
    "kvbridge_http_requests_total",
    "HTTP requests that were answered, by the route's template (`other`: no route) and status; 499: the caller left first.",
    "route method code",
    on=EVERYBODY,
)
HTTP_DURATION = histogram(
    "kvbridge_http_request_duration_seconds",
    "How long they took, until the last byte of the answer; those that wait for something wait.",
    "route method",
    on=EVERYBODY,
    buckets=(*PHASE_BUCKETS_S, 60.0),
)
LINES_LEFT_OUT = counter(
    "kvbridge_log_lines_left_out_total",
    "Log lines that were not written because there were too many of their kind, which a line `lines_left_out` tells.",
    on=EVERYBODY,
    event=(
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
    ),
)
SPANS = counter(
    "kvbridge_trace_spans_total",
    "Spans of traces (telemetry.traces): taken by the collector, lost because it did not take them, or dropped because too "
    "many waited for it.",
    on=EVERYBODY,
    outcome=("exported", "failed", "dropped"),
)
