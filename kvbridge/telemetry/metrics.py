"""Every metric of kvbridge, declared once: those of nodes here, the others in `telemetry/service_metrics.py`.

Owns: names, units, labels and their closed sets of values, help, METRICS.md. Must not know: how values are kept
(`telemetry/registry.py`), what a daemon does with its day.

Names start with `kvbridge_` and end with a base unit. Label values come from small closed sets, or are bounded: `peer` is the name
of a node as `instance/node`, at most `MAX_LABEL_VALUES` of them. A room or an address is never a label: those belong in logs.
`instance` and `job` are no labels of ours, since Prometheus sets them; a daemon's own name is `daemon`.
"""

from __future__ import annotations

from pathlib import Path

from kvbridge.config.transports import TransportName
from kvbridge.core.geometry.checkpoints import CheckpointCause
from kvbridge.core.prefixes import Evicted
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.phases import LIMITS, PHASES
from kvbridge.telemetry.service_metrics import SERVICE_METRICS
from kvbridge.telemetry.specs import DECODE, EVERYBODY, PHASE_BUCKETS_S, PREFILL, MetricKind, MetricSpec
from kvbridge.telemetry.tier_metrics import TIER_METRICS

MAX_LABEL_VALUES = 64
"""Distinct words that an open label of one metric may show; further ones count as "other"."""
TABLE_PATH = Path(__file__).with_name("METRICS.md")

_SIZE_BUCKETS_BYTES = tuple(float(1 << power) for power in range(10, 27, 2))
_WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_ENDINGS = (
    (RoomState.COMPLETED.value, ""),
    (RoomState.ABORTED.value, "aborted"),
    *((RoomState.FAILED.value, code) for code in ("deadline", "integrity", "peer_failed", "transport_failed")),
)
_PAGE_STATES = ("free", "held", "leased", "quarantined", "cached")

METRICS: tuple[MetricSpec, ...] = (
    # What runs.
    BUILD := MetricSpec(
        "kvbridge_build_info",
        _GAUGE,
        ("version", "role", "daemon", "model", "fingerprint", "python", "torch", "mooncake", "nixl"),
        "Always 1; what is running: its name, its model, the versions of what it is built on.",
        EVERYBODY,
    ),
    READY := MetricSpec(
        "kvbridge_ready", _GAUGE, (), "1 while new rooms can be admitted, or requests routed.", EVERYBODY
    ),
    DIRECTORY_REGISTRATION := MetricSpec(
        "kvbridge_directory_registration",
        _GAUGE,
        ("state",),
        "1 for where the node stands with the directory now: it announces itself to none, is registered, refused, replaced by "
        "another process of its name, or the directory cannot be reached.",
        values={"state": ("none", "registered", "refused", "replaced", "unreachable")},
    ),
    # Bytes.
    TRANSFERRED := MetricSpec(
        "kvbridge_transferred_bytes_total",
        _COUNTER,
        ("component", "direction", "transport"),
        "KV cache moved, counted when it has arrived.",
    ),
    BUSY := MetricSpec(
        "kvbridge_transfer_busy_seconds_total",
        _COUNTER,
        ("direction", "transport"),
        "Wall time during which at least one transfer was under way; bytes over this is the honest rate. On decode as its "
        "prefill nodes report it, when a rank has sent its part of a room.",
    ),
    OPERATION := MetricSpec(
        "kvbridge_operation_bytes",
        _HISTOGRAM,
        ("component", "direction", "transport"),
        "Sizes of copies, each room's at their mean; small ones are bound by their count. One that copies several components "
        "counts with the one that it begins in.",
        buckets=_SIZE_BUCKETS_BYTES,
    ),
    DIGEST_MISMATCHES := MetricSpec(
        "kvbridge_digest_mismatches_total",
        _COUNTER,
        ("component",),
        "Pages that arrived with other bytes than were sent; each failed its room.",
        (DECODE,),
    ),
    SPARSE_ROWS := MetricSpec(
        "kvbridge_sparse_rows_total",
        _COUNTER,
        ("outcome",),
        "Rows of sparse decode, over all layers, as engines tell when they release a room: selected ones that were in the hot "
        "buffer (hit) or had to be loaded from the host; loaded at admission; new ones that were written to the host.",
        (DECODE,),
        values={"outcome": ("hit", "loaded", "preloaded", "backed_up")},
    ),
    # Prefixes that stay.
    PREFIX_TOKENS := MetricSpec(
        "kvbridge_prefix_tokens_total",
        _COUNTER,
        ("outcome",),
        "Prompt tokens of rooms with page keys, when they were admitted: cached here (hit), so that decode is not sent their "
        "growing rows and prefill does not compute them, or not.",
        values={"outcome": ("hit", "miss")},
    ),
    HOST_TOKENS := MetricSpec(
        "kvbridge_prefix_host_tokens_total",
        _COUNTER,
        (),
        "Of the tokens that were hit, those whose pages were in host memory alone (`tier.host`) and came back from there.",
    ),
    PREFIX_BYTES := MetricSpec(
        "kvbridge_prefix_saved_bytes_total",
        _COUNTER,
        (),
        "Bytes of growing rows that were not sent to this node, since it held them.",
        (DECODE,),
    ),
    PREFIX_PAGES := MetricSpec(
        "kvbridge_prefix_pages",
        _GAUGE,
        ("state",),
        "Pages of prompts and answers that are cached: read by rooms that have not let go of them, or by nobody, so that they "
        "can be evicted. One is a page in each space that grows with the tokens.",
        values={"state": ("read", "unread")},
    ),
    PREFIX_EVICTED := MetricSpec(
        "kvbridge_prefix_evicted_pages_total",
        _COUNTER,
        ("reason",),
        "Cached pages of prompts and answers that have gone: others needed the room (space), also of pages that had been retained "
        "once (retention_ended) or still were (retained); or they were dropped: by an operator, since their bytes had changed "
        "(integrity), since their rank worker had ended (memory_lost).",
        values={"reason": tuple(reason.value for reason in Evicted)},
    ),
    PREFIX_RETAINED := MetricSpec(
        "kvbridge_prefix_retained_pages",
        _GAUGE,
        (),
        "Cached pages that are to go after others now, as requests said with `retention`.",
    ),
    RETENTION_REFUSED := MetricSpec(
        "kvbridge_prefix_retention_refused_total",
        _COUNTER,
        (),
        "Requests whose `retention` did not count, since their namespace, or all together, had as many retained pages as they may "
        "(tier.retained_share).",
    ),
    CHECKPOINTS := MetricSpec(
        "kvbridge_prefix_checkpoints",
        _GAUGE,
        (),
        "Checkpoints that are kept: windows and states at a page's end, from which an engine can go on.",
        (PREFILL,),
    ),
    CHECKPOINTS_KEPT := MetricSpec(
        "kvbridge_prefix_checkpoints_kept_total",
        _COUNTER,
        ("reason",),
        "Checkpoints that engines have written and that were kept, by where: at the end of a prompt, where a prompt has left a "
        "known prefix, or every tier.checkpoint_interval_tokens.",
        (PREFILL,),
        values={"reason": tuple(cause.value for cause in CheckpointCause)},
    ),
    CHECKPOINTS_USED := MetricSpec(
        "kvbridge_prefix_checkpoints_used_total", _COUNTER, (), "Rooms that have gone on from a checkpoint.", (PREFILL,)
    ),
    CHECKPOINTS_EVICTED := MetricSpec(
        "kvbridge_prefix_checkpoints_evicted_total",
        _COUNTER,
        (),
        "Checkpoints that made place for other requests, alone or with their page.",
        (PREFILL,),
    ),
    *TIER_METRICS,
    # Peers.
    PEERS := MetricSpec(
        "kvbridge_peers",
        _GAUGE,
        ("state",),
        "Nodes of the other role that are known: rooms can go to and from connected ones.",
        values={"state": ("connected", "connecting")},
    ),
    PEER_TRANSFERRED := MetricSpec(
        "kvbridge_peer_transferred_bytes_total",
        _COUNTER,
        ("peer", "direction", "transport"),
        "KV cache moved to or from a peer, counted when it has arrived.",
    ),
    PEER_BUSY := MetricSpec(
        "kvbridge_peer_busy_seconds_total",
        _COUNTER,
        ("peer", "direction", "transport"),
        "Wall time during which at least one transfer with the peer was under way; bytes over this is its rate.",
    ),
    PEER_FAILURES := MetricSpec(
        "kvbridge_peer_failures_total",
        _COUNTER,
        ("peer", "code"),
        "What went wrong with a peer: its rooms that failed, by the code of the first cause; handshakes that were refused, by "
        "their code; `lost`: it was gone, silent, or restarted; `path_lost`: rooms went on over another transport.",
    ),
    PEER_SILENCE := MetricSpec(
        "kvbridge_peer_silence_seconds",
        _GAUGE,
        ("peer",),
        "Since a connected peer was last heard of; it is lost at timeouts.peer_silence_s. Of several, the longest.",
    ),
    # Rooms.
    ROOMS := MetricSpec(
        "kvbridge_rooms",
        _GAUGE,
        ("state",),
        "Rooms that are known now, by state; on bootstrap those that it paired and remembers.",
        EVERYBODY,
    ),
    ROOMS_ENDED := MetricSpec(
        "kvbridge_rooms_ended_total",
        _COUNTER,
        ("state", "code"),
        "Rooms that ended, with the code of the first cause.",
        series=_ENDINGS,
    ),
    ENDED_BY_LIMIT := MetricSpec(
        "kvbridge_rooms_ended_by_limit_total",
        _COUNTER,
        ("limit",),
        "Rooms that this node ended because something did not happen in time, by the limit's key in the configuration, or "
        "`begin_within_s` of the admission.",
        values={"limit": LIMITS},
    ),
    PHASE := MetricSpec(
        "kvbridge_phase_duration_seconds",
        _HISTOGRAM,
        ("phase",),
        "How long a room spent in each phase, counted when the phase is over (below).",
        buckets=PHASE_BUCKETS_S,
    ),
    ADMISSION_TO_CLAIM := MetricSpec(
        "kvbridge_admission_to_claim_seconds",
        _HISTOGRAM,
        (),
        "The whole of a room: from its admission on decode until the first engine claims it.",
        (DECODE,),
        buckets=(*PHASE_BUCKETS_S, 60.0, 120.0),
    ),
    # Pages.
    POOL := MetricSpec(
        "kvbridge_pool_pages",
        _GAUGE,
        ("space", "state"),
        "Pages of each index space; over all states they sum to the pool.",
        values={"state": _PAGE_STATES},
    ),
    POOL_BYTES := MetricSpec(
        "kvbridge_pool_bytes",
        _GAUGE,
        ("space", "state"),
        "The same in bytes, over the ranks of this node: a page has its part in every layer and rank.",
        values={"state": _PAGE_STATES},
    ),
    AVAILABLE := MetricSpec(
        "kvbridge_pages_available",
        _GAUGE,
        ("space",),
        "Pages that a request can have now: free ones, and cached ones that nobody reads.",
    ),
    EXPECTED_FREE := MetricSpec(
        "kvbridge_pages_expected_free",
        _GAUGE,
        ("space", "within"),
        "Pages that are available now or will probably be within 1s, 10s and 60s: those of rooms that are ending, and the rest at "
        "the rate of the last releases. The same estimate as Retry-After.",
        values={"within": ("1s", "10s", "60s")},
    ),
    QUARANTINED := MetricSpec(
        "kvbridge_rooms_quarantined",
        _GAUGE,
        ("reason",),
        "Rooms whose pages nobody may use yet, by what is not proved: a transport of ours is quiet, a writer is shut out, "
        "an engine has let go, the process of an engine that left without letting go has ended.",
        values={
            "reason": (
                "transport_not_quiet",
                "writer_being_shut_out",
                "engine_not_released",
                "engine_process_alive",
            )
        },
    ),
    EPOCH := MetricSpec(
        "kvbridge_endpoint_epoch",
        _GAUGE,
        (),
        "Epoch of the endpoints that rank workers give out; it rises each time that writers had to be shut out.",
        (DECODE,),
    ),
    # Admission.
    REFUSED := MetricSpec(
        "kvbridge_admissions_refused_total",
        _COUNTER,
        ("code",),
        "Requests that were not admitted, by stable error code; `wait_timeout` and `queue_full` are kinds of `capacity`.",
        values={
            "code": (
                "capacity",
                "client_limit",
                "conflict",
                "invalid_input",
                "namespace_forbidden",
                "not_ready",
                "queue_full",
                "wait_timeout",
            )
        },
    ),
    MESSAGES_REFUSED := MetricSpec(
        "kvbridge_room_messages_refused_total",
        _COUNTER,
        ("code",),
        "Messages of peers and rank workers about rooms that were refused: stale, foreign, unexpected in that state and so on.",
    ),
    WAIT := MetricSpec(
        "kvbridge_admission_wait_seconds",
        _HISTOGRAM,
        ("outcome",),
        "How long requests waited for pages: until admitted, refused, their timeout, or their client left.",
        values={"outcome": ("admitted", "refused", "timeout", "left")},
        buckets=_WAIT_BUCKETS_S,
    ),
    WAITING := MetricSpec("kvbridge_admission_waiting_requests", _GAUGE, (), "Requests that wait for pages now."),
    OLDEST_WAIT := MetricSpec(
        "kvbridge_admission_oldest_wait_seconds", _GAUGE, (), "How long the oldest of them waits."
    ),
    STARVED := MetricSpec(
        "kvbridge_admission_starved_seconds",
        _GAUGE,
        (),
        "For how long not even the smallest request fits; 0 if one does.",
    ),
    # Processes beside the node.
    ENGINES := MetricSpec(
        "kvbridge_engines",
        _GAUGE,
        ("state",),
        "Engine processes: attached; gone, while pages wait for the end of their process.",
        values={"state": ("attached", "gone")},
    ),
    WORKERS := MetricSpec(
        "kvbridge_workers",
        _GAUGE,
        ("state",),
        "Rank workers of this node.",
        values={"state": ("absent", "starting", "ready")},
    ),
    WORKER_RESTARTS := MetricSpec(
        "kvbridge_worker_restarts_total",
        _COUNTER,
        ("reason",),
        "Rank workers started again.",
        values={"reason": ("exited", "killed", "start_failed")},
    ),
    SUCCESSORS_FAILED := MetricSpec(
        "kvbridge_transport_successors_failed_total",
        _COUNTER,
        ("transport",),
        "Transports that rank workers could not build in the place of others; each is tried again.",
        values={"transport": tuple(name.value for name in TransportName)},
    ),
    REGISTRATION := MetricSpec(
        "kvbridge_registration_progress_ratio", _GAUGE, (), "Pool memory registered with the transport: 1 when all is."
    ),
    # Control messages.
    FRAMES_REFUSED := MetricSpec(
        "kvbridge_control_frames_refused_total",
        _COUNTER,
        ("reason",),
        "Control frames and connections that were refused: malformed, stale, duplicate, unauthenticated and so on.",
    ),
    RESENT := MetricSpec("kvbridge_control_resends_total", _COUNTER, (), "Control messages that were sent again."),
    UNDELIVERED := MetricSpec(
        "kvbridge_control_undelivered_total", _COUNTER, (), "Control messages that were given up unacknowledged."
    ),
    *SERVICE_METRICS,
)


def metrics_table() -> str:
    """Return the text of METRICS.md: every metric in a table, and every phase."""
    lines = ["# Metrics", "", "| name | type | labels | daemons | meaning |", "|---|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        roles = "all" if spec.roles == EVERYBODY else ", ".join(spec.roles)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {roles} | {spec.help} |")
    lines += ["", "The usual `process_*` metrics are there as well.", "", "## Phases of a room", ""]
    lines += ["| daemon | `phase` | meaning |", "|---|---|---|"]
    lines += [f"| {role} | `{phase}` | {what} |" for role, phases in PHASES.items() for phase, what in phases.items()]
    return "\n".join([*lines, ""])
