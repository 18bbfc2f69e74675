"""Every metric of kvbridge, declared once: those of nodes here, the others in `telemetry/service_metrics.py`.

Names start with `kvbridge_` and end with a base unit. Label values come from small closed sets, or are bounded: `peer` is the name
of a node as `instance/node`, at most `MAX_LABEL_VALUES` of them. A room or an address is never a label: those belong in logs.
`instance` and `job` are no labels of ours, since Prometheus sets them; a daemon's own name is `daemon`.
"""

from __future__ import annotations

from kvbridge.core.errors import DeadlineError, TransportError
from kvbridge.core.prefixes import Evicted
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry import service_metrics  # noqa: F401 - declares its own
from kvbridge.telemetry.phases import LIMITS, PHASES
from kvbridge.telemetry.specs import (
    DECLARED,
    DECODE,
    EVERYBODY,
    PHASE_BUCKETS_S,
    counter,
    gauge,
    histogram,
)

MAX_LABEL_VALUES = 64
"""Distinct words that an open label of one metric may show; further ones count as "other"."""
DONE = "done"
DIRECTIONS = ("backup", "load_back")
_ENDINGS = (
    (RoomState.COMPLETED.value, ""),
    (RoomState.ABORTED.value, "aborted"),
    *((RoomState.FAILED.value, code) for code in ("deadline", "integrity", "peer_failed", "transport_failed")),
)
_PAGE_STATES = ("free", "held", "leased", "quarantined", "cached")
_WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_UNUSABLE = ("timed_out", "unreachable")
_STORE_OUTCOMES = {
    "put": ("stored", "full", *_UNUSABLE),
    "get": ("hit", "absent", "short", "other_key", "wrong_digest", "other_version", *_UNUSABLE),
    "has": ("present", "absent", *_UNUSABLE),
    "drop": ("dropped", *_UNUSABLE),
    "clear": ("dropped", *_UNUSABLE),
}
"""By what a store is asked: how that can end."""

# What runs.
BUILD = gauge(
    "kvbridge_build_info",
    "Always 1; what is running: its name, its model, the versions of what it is built on.",
    "version role daemon model fingerprint python torch mooncake nixl",
    on=EVERYBODY,
)
READY = gauge("kvbridge_ready", "1 while new rooms can be admitted, or requests routed.", on=EVERYBODY)
DIRECTORY_REGISTRATION = gauge(
    "kvbridge_directory_registration",
    "1 for where the node stands with the directory now: it announces itself to none, is registered, refused, replaced by "
    "another process of its name, or the directory cannot be reached.",
    state=("none", "registered", "refused", "replaced", "unreachable"),
)

# Bytes.
TRANSFERRED = counter(
    "kvbridge_transferred_bytes_total", "KV cache moved, counted when it has arrived.", "component direction transport"
)
DIGEST_MISMATCHES = counter(
    "kvbridge_digest_mismatches_total",
    "Pages that arrived with other bytes than were sent; each failed its room.",
    "component",
    on=(DECODE,),
)
SPARSE_ROWS = counter(
    "kvbridge_sparse_rows_total",
    "Rows of sparse decode, over all layers, as engines tell when they release a room: selected ones that were in the hot "
    "buffer (hit) or had to be loaded from the host; loaded at admission; new ones that were written to the host.",
    on=(DECODE,),
    outcome=("hit", "loaded", "preloaded", "backed_up"),
)

# Prefixes that stay, the host tier, the store below.
PREFIX_TOKENS = counter(
    "kvbridge_prefix_tokens_total",
    "Prompt tokens of rooms with page keys, when they were admitted: cached here (hit), so that decode is not sent their "
    "growing rows and prefill does not compute them, or not.",
    outcome=("hit", "miss"),
)
PREFIX_EVICTED = counter(
    "kvbridge_prefix_evicted_pages_total",
    "Cached pages of prompts and answers that have gone: others needed the room (space), also of pages that had been retained "
    "once (retention_ended) or still were (retained); or they were dropped: by an operator, since their bytes had changed "
    "(integrity), since their rank worker had ended (memory_lost).",
    reason=tuple(reason.value for reason in Evicted),
)
TIER_PAGES = gauge(
    "kvbridge_host_tier_pages",
    "Cached pages of prompts and answers, by where they are: on the device alone, on device and host, on the host alone.",
    residency=("device", "both", "host"),
)
TIER_COPIES = counter(
    "kvbridge_host_tier_copies_total",
    "Orders to copy cached pages that have ended, from the device to host memory (backup) or back (load_back): done, or the "
    "code of the first cause. A backup that failed leaves the pages on the device as they were.",
    direction=DIRECTIONS,
    outcome=(DONE, DeadlineError.code, TransportError.code, "worker_gone"),
)
TIER_COPIED = counter(
    "kvbridge_host_tier_copied_bytes_total", "Bytes of them, over all ranks of this node.", direction=DIRECTIONS
)
TIER_COPY_SECONDS = counter(
    "kvbridge_host_tier_copy_seconds_total",
    "For how long the slowest rank was copying, without its pauses; its rate is the share of the time in which the link to the "
    "device was in use for this, at most tier.host.backup.link_share for backups.",
    direction=DIRECTIONS,
)
STORE_STATE = gauge(
    "kvbridge_prefix_store_state",
    "1 for the state of the store below host memory: starting, its process is not ready; closed, it is asked; open, it has "
    "failed too often and is not asked for a while; half_open, one request tries whether it works again.",
    state=("starting", "closed", "open", "half_open"),
)
STORE_OBJECTS = counter(
    "kvbridge_prefix_store_objects_total",
    "Objects (pages with all components and layers) that the store was asked to put, get, drop, or whether it has them, by "
    "how that ended; clear: to drop all of one kind, of this model. A get is a hit only when every byte was compared; absent, "
    "short, other_key, wrong_digest, other_version, timed_out and unreachable are misses.",
    "verb outcome",
    series=tuple((verb, outcome) for verb, outcomes in _STORE_OUTCOMES.items() for outcome in outcomes),
)
STORE_BYTES = counter(
    "kvbridge_prefix_store_bytes_total", "Bytes of objects that were put or got whole.", verb=("put", "get")
)
STORE_PREFETCHES = counter(
    "kvbridge_prefix_store_prefetches_total",
    "Requests whose prompts were looked for in the store: all that there was came (found); tier.prefetch_s was over before, "
    "whatever had come (late); a part of it came, the rest was missing or bad (part); there was nothing; or a defect, whose "
    "traceback is in the log, ended it (failed).",
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
    "Wall time during which at least one transfer with the peer was under way; bytes over this is its rate.",
    "peer direction transport",
)
PEER_FAILURES = counter(
    "kvbridge_peer_failures_total",
    "What went wrong with a peer: its rooms that failed, by the code of the first cause; handshakes that were refused, by "
    "their code; `lost`: it was gone, silent, or restarted; `path_lost`: rooms went on over another transport.",
    "peer code",
)

# Rooms.
ROOMS = gauge(
    "kvbridge_rooms",
    "Rooms that are known now, by state; on bootstrap those that it paired and remembers.",
    "state",
    on=EVERYBODY,
)
ROOMS_ENDED = counter(
    "kvbridge_rooms_ended_total", "Rooms that ended, with the code of the first cause.", "state code", series=_ENDINGS
)
ENDED_BY_LIMIT = counter(
    "kvbridge_rooms_ended_by_limit_total",
    "Rooms that this node ended because something did not happen in time, by the limit's key in the configuration, or "
    "`begin_within_s` of the admission.",
    limit=LIMITS,
)
PHASE = histogram(
    "kvbridge_phase_duration_seconds",
    "How long a room spent in each phase, counted when the phase is over (below).",
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
    state=_PAGE_STATES,
)
AVAILABLE = gauge(
    "kvbridge_pages_available",
    "Pages that a request can have now: free ones, and cached ones that nobody reads.",
    "space",
)
QUARANTINED = gauge(
    "kvbridge_rooms_quarantined",
    "Rooms whose pages nobody may use yet, by what is not proved: a transport of ours is quiet, a writer is shut out, "
    "an engine has let go, the process of an engine that left without letting go has ended.",
    reason=("transport_not_quiet", "writer_being_shut_out", "engine_not_released", "engine_process_alive"),
)
EPOCH = gauge(
    "kvbridge_endpoint_epoch",
    "Epoch of the endpoints that rank workers give out; it rises each time that writers had to be shut out.",
    on=(DECODE,),
)

# Admission.
REFUSED = counter(
    "kvbridge_admissions_refused_total",
    "Requests that were not admitted, by stable error code; `wait_timeout` and `queue_full` are kinds of `capacity`.",
    code=(
        "capacity",
        "client_limit",
        "conflict",
        "invalid_input",
        "namespace_forbidden",
        "not_ready",
        "queue_full",
        "wait_timeout",
    ),
)
MESSAGES_REFUSED = counter(
    "kvbridge_room_messages_refused_total",
    "Messages of peers and rank workers about rooms that were refused: stale, foreign, unexpected in that state and so on.",
    "code",
)
WAIT = histogram(
    "kvbridge_admission_wait_seconds",
    "How long requests waited for pages: until admitted, refused, their timeout, or their client left.",
    outcome=("admitted", "refused", "timeout", "left"),
    buckets=_WAIT_BUCKETS_S,
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
    "kvbridge_worker_restarts_total", "Rank workers started again.", reason=("exited", "killed", "start_failed")
)
REGISTRATION = gauge(
    "kvbridge_registration_progress_ratio", "Pool memory registered with the transport: 1 when all is."
)
FRAMES_REFUSED = counter(
    "kvbridge_control_frames_refused_total",
    "Control frames and connections that were refused: malformed, stale, duplicate, unauthenticated and so on.",
    "reason",
)
RESENT = counter("kvbridge_control_resends_total", "Control messages that were sent again.")
UNDELIVERED = counter("kvbridge_control_undelivered_total", "Control messages that were given up unacknowledged.")


METRICS = tuple(DECLARED)


def metrics_table() -> str:
    """Return Markdown: every metric in a table, and every phase."""
    lines = ["| name | type | labels | daemons | meaning |", "|---|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        roles = "all" if spec.roles == EVERYBODY else ", ".join(spec.roles)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {roles} | {spec.help} |")
    lines += ["", "The usual `process_*` metrics are there as well.", "", "## Phases of a room", ""]
    lines += ["| daemon | `phase` | meaning |", "|---|---|---|"]
    lines += [f"| {role} | `{phase}` | {what} |" for role, phases in PHASES.items() for phase, what in phases.items()]
    return "\n".join([*lines, ""])
