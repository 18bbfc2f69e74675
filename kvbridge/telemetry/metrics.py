"""Every metric of kvbridge, declared once; `telemetry/registry.py` keeps the values.

Names start with `kvbridge_` and end with a base unit. Label values come from small closed sets, or are bounded: `peer` is a node's
`instance/node`, at most `MAX_LABEL_VALUES` of them. Rooms and addresses belong in logs, never in labels. Prometheus sets the labels
`instance` and `job`, so a daemon's own name is `daemon`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvbridge.core.errors import (
    CapacityError,
    DeadlineError,
    FingerprintMismatchError,
    NamespaceError,
    NotReadyError,
    TransportError,
)
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import Evicted
from kvbridge.core.session.tables import RoomState

PREFILL, DECODE, BOOTSTRAP, ROUTER = Role.PREFILL.value, Role.DECODE.value, "bootstrap", "router"
SENT, RECEIVED = "sent", "received"
"""The direction of bytes, seen from this daemon."""
NODES = (PREFILL, DECODE)
EVERYBODY = (*NODES, BOOTSTRAP, ROUTER)
PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets for everything that a request waits for."""
MAX_LABEL_VALUES = 64
"""An open label of one metric shows this many distinct words; further ones count as "other"."""

PHASES: Mapping[Role, Mapping[str, str]] = {
    Role.PREFILL: {
        "admit_to_begin": "from admission until an engine begins the room",
        "admit_to_offer_received": "from admission until decode's page tables are here",
        "offer_to_order": "from the offer until the first order to a rank",
        "plan": "planning, all orders of the slowest rank",
        "submit": "handing planned operations to the transports, all orders of the slowest rank",
        "first_byte": "from an order until its first bytes were submitted, all orders of the slowest rank",
        "move": "bytes under way, all orders of the slowest rank, which may overlap",
        "digest": "checksums of what was sent, all orders of the slowest rank",
        "offer_to_sent": "from the offer until everything has been sent",
    },
    Role.DECODE: {
        "admit_to_offer": "from admission until the page tables are on their way to prefill",
        "verify": "from the order to compare checksums until all are compared, the slowest rank",
        "verify_busy": "the part of that in which checksums were computed",
        "offer_to_commit": "from the offer until every row is accounted for",
        "admit_to_commit": "from admission until then",
        "commit_to_claim": "a committed room waits for its first engine",
        "claim_to_release": "engines use the pages",
    },
}
"""By role, the phases of a room by the names of metrics, reports and logs. A phase is counted on its node when it is over."""

LIMITS = (
    "begin_within_s",
    *(f"timeouts.{name}_s" for name in ("begin", "claim", "handshake", "offer", "pages", "room", "verify")),
)
"""The limits that end a room when nothing happens in time."""


class MetricSpec:
    """One metric of the daemons `roles`. `name` is the name that is scraped."""

    def __init__(  # noqa: PLR0913 - the parts of a declaration
        self,
        kind: str,
        name: str,
        meaning: str,
        labels: str = "",
        *,
        on: tuple[str, ...] = NODES,
        series: tuple[tuple[str, ...], ...] = (),
        buckets: tuple[float, ...] = (),
        **values: tuple[str, ...],
    ) -> None:
        """`values`: every word of a label, where the words are known here; `labels` may then be empty.

        `series`: label values that are shown from the start, where not every combination can occur.
        """
        self.kind, self.name, self.help, self.roles = kind, name, meaning, on
        self.labels = tuple(labels.split()) or tuple(values)
        self.values, self.series, self.buckets = values, series, buckets
        METRICS.append(self)


METRICS: list[MetricSpec] = []
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
counter, gauge, histogram = partial(MetricSpec, COUNTER), partial(MetricSpec, GAUGE), partial(MetricSpec, HISTOGRAM)

DONE = "done"
DIRECTIONS = ("backup", "load_back")
_ENDINGS = (
    (RoomState.COMPLETED.value, ""),
    (RoomState.ABORTED.value, "aborted"),
    *((RoomState.FAILED.value, code) for code in ("deadline", "integrity", "peer_failed", "transport_failed")),
)
_UNUSABLE = ("timed_out", "unreachable")
_STORE_OUTCOMES = {
    "put": ("stored", "full", *_UNUSABLE),
    "get": ("hit", "absent", "short", "other_key", "wrong_digest", "other_version", *_UNUSABLE),
    "has": ("present", "absent", *_UNUSABLE),
    "drop": ("dropped", *_UNUSABLE),
    "clear": ("dropped", *_UNUSABLE),
}
"""The outcomes of each call to a store."""
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
ROUTED_ORDERS = ("none", "paired", "plain", "decode_alone")
_REFUSALS = (CapacityError, NotReadyError, DeadlineError, FingerprintMismatchError, NamespaceError)
_PAIRING_OUTCOMES = ("paired", *(error.code for error in _REFUSALS))

# What runs.
BUILD = gauge(
    "kvbridge_build_info",
    "Always 1. The labels say what runs: name, model, versions of libraries.",
    "version role daemon model fingerprint python torch mooncake nixl",
    on=EVERYBODY,
)
READY = gauge("kvbridge_ready", "1 while new rooms can be admitted, or requests routed.", on=EVERYBODY)
DIRECTORY_REGISTRATION = gauge(
    "kvbridge_directory_registration",
    "1 for the node's state in the directory; `none`: it announces itself to none.",
    state=("none", "registered", "refused", "replaced", "unreachable"),
)

# Bytes.
TRANSFERRED = counter(
    "kvbridge_transferred_bytes_total", "KV cache moved, counted when it has arrived.", "component direction transport"
)
DIGEST_MISMATCHES = counter(
    "kvbridge_digest_mismatches_total",
    "Pages that arrived with other bytes than were sent; each has failed its room.",
    "component",
    on=(DECODE,),
)
SPARSE_ROWS = counter(
    "kvbridge_sparse_rows_total",
    "Rows of sparse decode over all layers, reported at the release of a room: selected rows in the hot buffer (hit) or loaded "
    "from the host (loaded), rows loaded at admission (preloaded), new rows written to the host (backed_up).",
    on=(DECODE,),
    outcome=("hit", "loaded", "preloaded", "backed_up"),
)

# Cached prefixes, the host tier, the store below.
PREFIX_TOKENS = counter(
    "kvbridge_prefix_tokens_total",
    "Prompt tokens of rooms with page keys at admission: cached here (hit), so decode is not sent their growing rows or prefill "
    "does not compute them; or not cached (miss).",
    outcome=("hit", "miss"),
)
PREFIX_EVICTED = counter(
    "kvbridge_prefix_evicted_pages_total",
    "Cached pages that have gone. Evicted to make room: never retained (space), after their retention (retention_ended), "
    "retained (retained). Dropped: by an operator, for changed bytes (integrity), with their rank worker (memory_lost).",
    reason=tuple(reason.value for reason in Evicted),
)
TIER_PAGES = gauge(
    "kvbridge_host_tier_pages",
    "Cached pages of prompts and answers: on the device alone, on device and host, on the host alone.",
    residency=("device", "both", "host"),
)
TIER_COPIES = counter(
    "kvbridge_host_tier_copies_total",
    "Ended orders to copy cached pages to host memory (backup) or back (load_back): done, or the code of the first cause. After"
    " a failed backup the pages are on the device as before.",
    direction=DIRECTIONS,
    outcome=(DONE, DeadlineError.code, TransportError.code, "worker_gone"),
)
TIER_COPIED = counter(
    "kvbridge_host_tier_copied_bytes_total", "Bytes copied, over all ranks of this node.", direction=DIRECTIONS
)
TIER_COPY_SECONDS = counter(
    "kvbridge_host_tier_copy_seconds_total",
    "Copying time of the slowest rank without its pauses. The rate is the share of time in which copies used the link to the "
    "device, for backups at most tier.host.backup.link_share.",
    direction=DIRECTIONS,
)
STORE_STATE = gauge(
    "kvbridge_prefix_store_state",
    "1 for the state of the store below host memory: its process is not ready (starting), it gets requests (closed), it has "
    "failed too often and gets none for a while (open), or one request as a test (half_open).",
    state=("starting", "closed", "open", "half_open"),
)
STORE_OBJECTS = counter(
    "kvbridge_prefix_store_objects_total",
    "Calls to the store by verb and outcome. An object is a page with all components and layers; clear drops all objects of one"
    " kind of this model. A get is a hit only after a comparison of every byte; all of its other outcomes are misses.",
    "verb outcome",
    series=tuple((verb, outcome) for verb, outcomes in _STORE_OUTCOMES.items() for outcome in outcomes),
)
STORE_BYTES = counter(
    "kvbridge_prefix_store_bytes_total", "Bytes of objects that were put or got whole.", verb=("put", "get")
)
STORE_PREFETCHES = counter(
    "kvbridge_prefix_store_prefetches_total",
    "Prompts looked up in the store: every page that it has came (found), tier.prefetch_s was over before (late), some pages "
    "came (part), it had none (nothing), a defect ended the search (failed; its traceback is in the log).",
    outcome=("found", "late", "part", "nothing", "failed"),
)

# Peers.
PEER_TRANSFERRED = counter(
    "kvbridge_peer_transferred_bytes_total",
    "KV cache moved to or from a peer, counted when it has arrived.",
    "peer direction transport",
)
PEER_BUSY = counter(
    "kvbridge_peer_busy_seconds_total",
    "Wall time of transfers with the peer, counted at their end; overlapping ones count once. Bytes over this is its rate.",
    "peer direction transport",
)
PEER_FAILURES = counter(
    "kvbridge_peer_failures_total",
    "Failures with a peer: failed rooms and refused handshakes by their codes; `lost`: the peer was gone, silent, or restarted;"
    " `path_lost`: rooms went on over another transport.",
    "peer code",
)

# Rooms.
ROOMS = gauge(
    "kvbridge_rooms",
    "Rooms that are known now, by state; on bootstrap the rooms that it paired and remembers.",
    "state",
    on=EVERYBODY,
)
ROOMS_ENDED = counter(
    "kvbridge_rooms_ended_total", "Rooms that ended, with the code of the first cause.", "state code", series=_ENDINGS
)
ENDED_BY_LIMIT = counter(
    "kvbridge_rooms_ended_by_limit_total",
    "Rooms that this node ended after a limit of time, by the limit's key in the configuration, or `begin_within_s`.",
    limit=LIMITS,
)
PHASE = histogram(
    "kvbridge_phase_duration_seconds",
    "Time of a room in each phase, counted when the phase is over (below).",
    "phase",
    buckets=PHASE_BUCKETS_S,
)
ADMISSION_TO_CLAIM = histogram(
    "kvbridge_admission_to_claim_seconds",
    "The whole of a room: from its admission on decode until the first engine claims it.",
    on=(DECODE,),
    buckets=(*PHASE_BUCKETS_S, 60.0, 120.0),
)

# Pages.
POOL = gauge(
    "kvbridge_pool_pages",
    "Pages of each index space; over all states they sum to the pool.",
    "space state",
    state=("free", "held", "leased", "quarantined", "cached"),
)
AVAILABLE = gauge(
    "kvbridge_pages_available",
    "Pages that a request can have now: free ones, and cached ones that nobody reads.",
    "space",
)
QUARANTINED = gauge(
    "kvbridge_rooms_quarantined",
    "Rooms whose pages nobody may use before a proof: of a quiet transport, a shut-out writer, a release by an engine, or the "
    "end of the process of an engine that left without a release.",
    reason=("transport_not_quiet", "writer_being_shut_out", "engine_not_released", "engine_process_alive"),
)
EPOCH = gauge(
    "kvbridge_endpoint_epoch",
    "Epoch of the endpoints of rank workers; it rises each time that writers had to be shut out.",
    on=(DECODE,),
)

# Admission.
REFUSED = counter(
    "kvbridge_admissions_refused_total",
    "Requests that were not admitted, by stable error code; `wait_timeout` and `queue_full` are kinds of `capacity`.",
    code=(
        *("capacity", "client_limit", "conflict", "invalid_input", "namespace_forbidden", "not_ready"),
        *("queue_full", "wait_timeout"),
    ),
)
MESSAGES_REFUSED = counter(
    "kvbridge_room_messages_refused_total",
    "Refused messages of peers and rank workers about rooms: stale, foreign, unexpected in that state and so on.",
    "code",
)
WAIT = histogram(
    "kvbridge_admission_wait_seconds",
    "Waits of requests for pages, until they were admitted or refused, their time was over, or their client left.",
    outcome=("admitted", "refused", "timeout", "left"),
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
WAITING = gauge("kvbridge_admission_waiting_requests", "Requests that wait for pages now.")
STARVED = gauge("kvbridge_admission_starved_seconds", "For how long not even the smallest request fits; 0 if one does.")

# Processes beside the node, control messages.
ENGINES = gauge(
    "kvbridge_engines",
    "Engine processes: attached; gone, while pages wait for the end of their process.",
    state=("attached", "gone"),
)
WORKERS = gauge("kvbridge_workers", "Rank workers of this node.", state=("absent", "starting", "ready"))
WORKER_RESTARTS = counter(
    "kvbridge_worker_restarts_total",
    "Rank workers started again: after their own end (exited), a kill by their node (killed), a signal from elsewhere, such as "
    "the kernel's for want of memory or a crash in native code (signal), a failed start (start_failed).",
    reason=("exited", "killed", "signal", "start_failed"),
)
REGISTRATION = gauge(
    "kvbridge_registration_progress_ratio", "Pool memory registered with the transport: 1 when all is."
)
FRAMES_REFUSED = counter(
    "kvbridge_control_frames_refused_total",
    "Refused control frames and connections: malformed, stale, duplicate, unauthenticated and so on.",
    "reason",
)
RESENT = counter("kvbridge_control_resends_total", "Control messages that were sent again.")
UNDELIVERED = counter("kvbridge_control_undelivered_total", "Control messages that were given up unacknowledged.")

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
    "Requests for a pair: `paired`, or the code of the error in the answer.",
    on=(BOOTSTRAP,),
    outcome=_PAIRING_OUTCOMES,
)
PAIRING_DURATION = histogram(
    "kvbridge_pairing_duration_seconds",
    "Time of requests for a pair, both reservations included.",
    on=(BOOTSTRAP,),
    outcome=_PAIRING_OUTCOMES,
    buckets=PHASE_BUCKETS_S,
)
PAIRING_PREFIXES = counter(
    "kvbridge_pairing_prefixes_total",
    "Paired requests with page keys, by the guess which instance holds the beginning of the prompt: `right`, `stale` (it holds "
    "none), `passed_over` (it was full, or another so much emptier), `none` (no guess).",
    on=(BOOTSTRAP,),
    role=NODES,
    outcome=("right", "stale", "passed_over", "none"),
)
STORE_REFUSED = counter(
    "kvbridge_store_values_refused_total",
    "Malformed values in the directory's store, treated as absent: node or room.",
    on=(BOOTSTRAP,),
    reason=("node", "room"),
)
STORE_FAILED = counter(
    "kvbridge_store_failures_total",
    "Failed calls to the directory's store: timeout, connection or refused.",
    on=(BOOTSTRAP,),
    reason=("connection", "refused", "timeout"),
)

# The router.
ROUTED = counter(
    "kvbridge_router_requests_total",
    "Requests to the router by order (`none`: nothing came back) and outcome: answered, refused by a server as the client's "
    "mistake, failed before or broken after the first byte, over the limit, or the client left.",
    on=(ROUTER,),
    order=ROUTED_ORDERS,
    outcome=("answered", "refused", "failed", "broken", "over_limit", "client_left"),
)
FIRST_BYTE = histogram(
    "kvbridge_router_first_byte_seconds",
    "From a request to the first byte of its answer, failed attempts included.",
    on=(ROUTER,),
    order=ROUTED_ORDERS[1:],
    buckets=(*PHASE_BUCKETS_S, 60.0, 120.0, 300.0),
)
OPERATIONS = ("chat", "text_completion")
GEN_AI_DURATION = histogram(
    "gen_ai_server_request_duration_seconds",
    "From a request to the end of its answer, under OpenTelemetry's name; error_type is empty for an answer.",
    on=(ROUTER,),
    gen_ai_operation_name=OPERATIONS,
    error_type=("", "refused", "failed", "broken", "client_left"),
    buckets=(*PHASE_BUCKETS_S, 60.0, 120.0, 300.0),
)
GEN_AI_FIRST_TOKEN = histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From a request whose answer is streamed to the first byte of the answer, under OpenTelemetry's name.",
    on=(ROUTER,),
    gen_ai_operation_name=OPERATIONS,
    buckets=(*PHASE_BUCKETS_S, 60.0, 120.0, 300.0),
)
ATTEMPTS_FAILED = counter(
    "kvbridge_router_attempts_failed_total",
    "Attempts that failed at a server before the first byte: no connection, a status of 500 or more, an answer that broke, "
    "ill health during the wait, other addresses than the router knew.",
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
    "Answered HTTP requests by the route's template (`other`: no route) and status; 499: the caller left first.",
    "route method code",
    on=EVERYBODY,
)
HTTP_DURATION = histogram(
    "kvbridge_http_request_duration_seconds",
    "Time of HTTP requests until the last byte of the answer, waits for rooms and pages included.",
    "route method",
    on=EVERYBODY,
    buckets=(*PHASE_BUCKETS_S, 60.0),
)
LINES_LEFT_OUT = counter(
    "kvbridge_log_lines_left_out_total",
    "Log lines that were left out because there were too many of their kind; a line `lines_left_out` counts them, too.",
    on=EVERYBODY,
    event=(
        *("attempt_failed", "connection_refused", "frame_refused", "library_output", "pages_not_copied"),
        *("prefix_not_kept", "request_failed", "request_refused_unread", "room_ended", "room_message_refused"),
    ),
)
SPANS = counter(
    "kvbridge_trace_spans_total",
    "Spans of traces (telemetry.traces): exported to the collector, failed because it did not take them, or dropped because too"
    " many waited.",
    on=EVERYBODY,
    outcome=("exported", "failed", "dropped"),
)
