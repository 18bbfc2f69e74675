"""Examples of the longest requests and answers, which the descriptions of the HTTP APIs publish.

Owns: these literals; a test reads them with the models that publish them. Must not know: the models.
"""

from __future__ import annotations

from typing import Any

_FINGERPRINT = "e05c47269450f4ae77606e8f99c134d2"
_GEOMETRY = {
    "name": "tiny-gqa",
    "layer_count": 3,
    "tokens_per_page": 256,
    "components": [
        {
            "kind": "mha_kv",
            "layers": [0, 1, 2],
            "space": "full",
            "encoding": "bf16",
            "liveness": "growing",
            "row_parts_bytes": [64],
            "slots_per_page": 256,
            "rows_per_logical_page": 256,
            "tokens_per_row": 1,
            "window": 0,
            "block": 1,
            "overlap": 0,
            "lanes": 4,
            "page_alignment_bytes": 1,
            "host_capable": False,
        }
    ],
    "facts": {},
}
_LOAD = {
    "rooms": 1,
    "available_pages": {"full": 60},
    "total_pages": {"full": 64},
    "prefixes_kept_s": 1840.5,
    "sent_bytes": {"decode-0": 1_572_864},
}

REGISTRATION: dict[str, Any] = {
    "instance": "prefill-0",
    "node": "node-0",
    "role": "prefill",
    "incarnation": "9f1c3a5e7b2d4860",
    "http_url": "http://10.0.0.7:7901",
    "engine_url": "http://10.0.0.7:8000",
    "control": {"endpoint": "tcp://10.0.0.7:7911", "public_key": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"},
    "meets_by": ["curve"],
    "pp_size": 1,
    "tp_size": 1,
    "stage_boundaries": [],
    "ranks": [{"pp": 0, "tp": 0}],
    "fingerprint": _FINGERPRINT,
    "model_identity": {"name": "tiny-gqa", "revision": "2026-11-01"},
    "geometry": _GEOMETRY,
    "host": [],
    "ready": True,
    "reasons": [],
    "load": _LOAD,
    "features": {"has": [], "requires": []},
}

_RANK = {
    "rank": "pp0.tp0",
    "state": "ready",
    "pid": 4121,
    "layers": 3,
    "registered": 1.0,
    "restarts": 0,
    "error": "",
    "transports": ["mooncake"],
}
_NODE: dict[str, Any] = {
    "node": "node-0",
    "version": "0.1.0",
    "uptime_s": 86400.5,
    "model": {
        "name": "tiny-gqa",
        "fingerprint": _FINGERPRINT,
        "tokens_per_page": 256,
        "identity": {"name": "tiny-gqa", "revision": "2026-11-01"},
    },
    "memory_bytes": 12_582_912,
    "ready": {"ready": True, "reasons": []},
    "bootstrap": {"state": "registered", "url": "http://10.0.0.6:7900", "problem": ""},
    "ranks": [_RANK],
    "engines": [{"name": "engine-5012", "pid": 5012, "ranks": ["pp0.tp0"], "gone": ""}],
    "admission": {
        "waiting": 1,
        "oldest_wait_s": 0.4,
        "starved_s": 0.0,
        "clients": [
            {"client": "chat", "rooms": 1, "waiting": 1, "head_waits_s": 0.4, "max_rooms": 0, "max_waiting": 0}
        ],
    },
}
PREFILL_STATUS: dict[str, Any] = _NODE | {
    "role": "prefill",
    "instance": "prefill-0",
    "incarnation": "9f1c3a5e7b2d4860",
    "control": "tcp://10.0.0.7:7911",
    "peers": [
        {
            "instance": "decode-0",
            "node": "node-0",
            "incarnation": "51d0c9b7a3e2f684",
            "transports": {"pp0.tp0": ["mooncake"]},
            "standby": {"pp0.tp0": ["nixl"]},
            "connecting": [],
            "features": [],
        }
    ],
    "rooms": {"transferring": 1, "completed": 41},
    "pools": {"full": {"free": 52, "held": 0, "leased": 4, "quarantined": 0, "cached": 8}},
    "available_pages": {"full": 60},
    "prefixes": {
        "read_pages": 0,
        "unread_pages": 8,
        "readers": 1,
        "evicted_pages": {"space": 11, "retention_ended": 1},
        "hit_tokens": 6_144,
        "miss_tokens": 9_250,
        "host_tokens": 2_048,
        "checkpoints": 3,
        "retained_pages": {"acme": 2},
        "retention_refused": 0,
    },
    "host_tier": {
        "device_pages": 2,
        "both_pages": 6,
        "host_pages": 40,
        "waiting_prompts": 1,
        "in_flight_pages": 2,
        "backed_up_pages": 58,
        "backed_up_bytes": 57_896_064,
        "failed_orders": 0,
        "last_failure": "",
        "longest_order_s": 0.0213,
        "refused_prompts": 0,
        "loaded_back_pages": 16,
        "failed_loads": 0,
        "last_failed_load": "",
        "evicted_read_back_pages": 3,
        "evicted_unused_pages": 7,
    },
    "kept_pools": {
        "waiting_pages": 0,
        "restored_pages": 40,
        "restored_bytes": 39_321_600,
        "lost_pages": 0,
        "refused_pages": 0,
        "refused": "",
        "seconds": 0.021,
    },
    "store": {
        "kind": "files",
        "state": "closed",
        "why_not": "",
        "pid": 4711,
        "objects": {"put": {"stored": 58}, "get": {"hit": 12, "wrong_digest": 1}, "has": {"present": 13, "absent": 70}},
        "fetched_pages": 12,
        "prefetches": {"found": 1, "late": 1, "part": 1, "nothing": 5},
        "waiting_prompts": 0,
        "unsettled": 0,
    },
    "quarantine": {},
    "problems": [],
    "traffic": {
        "51d0c9b7a3e2f684": {
            "sent_bytes": 1_572_864,
            "received_bytes": 0,
            "rooms_completed": 41,
            "rooms_failed": 0,
            "last_ago_s": 0.1,
        }
    },
}
DECODE_STATUS: dict[str, Any] = _NODE | {
    "role": "decode",
    "instance": "decode-0",
    "incarnation": "51d0c9b7a3e2f684",
    "control": "",
    "peers": [
        {
            "endpoint": "tcp://10.0.0.7:7911",
            "node": "prefill-0/node-0",
            "incarnation": "9f1c3a5e7b2d4860",
            "ranks": ["pp0.tp0"],
            "features": [],
        }
    ],
    "rooms": {"transferring": 1, "failed": 1},
    "pools": {"full": {"free": 58, "held": 0, "leased": 4, "quarantined": 2, "cached": 0}},
    "available_pages": {"full": 58},
    "quarantine": {"writers are being shut out": ["room 1042"]},
    "problems": [
        {
            "ago_s": 1.2,
            "what": "peer_lost",
            "whom": "prefill-1/node-0",
            "reason": "silent for 10.1 s (limit: timeouts.peer_silence_s)",
        }
    ],
    "traffic": {
        "9f1c3a5e7b2d4860": {
            "sent_bytes": 0,
            "received_bytes": 1_572_864,
            "rooms_completed": 41,
            "rooms_failed": 0,
            "last_ago_s": 0.1,
        }
    },
    "fence": {
        "epoch": 2,
        "phase": "waiting",
        "rooms": ["1042"],
        "waits_for_rooms": 1,
        "waits_for_ranks": [],
        "transports": ["mooncake"],
    },
}
BOOTSTRAP_STATUS: dict[str, Any] = {
    "role": "bootstrap",
    "incarnation": "0c7be1f2a4d89356",
    "version": "0.1.0",
    "uptime_s": 172800.0,
    "ready": {"ready": False, "reasons": ["no decode instance is ready (0 known)"]},
    "store": {"kind": "memory", "problem": ""},
    "instances": [
        {
            "instance": "prefill-0",
            "role": "prefill",
            "model": "tiny-gqa",
            "fingerprint": _FINGERPRINT,
            "tokens_per_page": 256,
            "pp_size": 1,
            "tp_size": 1,
            "meets_by": ["curve"],
            "complete": True,
            "ready": True,
            "reasons": [],
            "nodes": [
                {
                    "node": "node-0",
                    "http_url": "http://10.0.0.7:7901",
                    "engine_url": "http://10.0.0.7:8000",
                    "control_endpoint": "tcp://10.0.0.7:7911",
                    "incarnation": "9f1c3a5e7b2d4860",
                    "epoch": 1,
                    "ranks": [{"pp": 0, "tp": 0}],
                    "ready": True,
                    "load": _LOAD,
                    "silent_s": 0.7,
                }
            ],
        }
    ],
    "rooms": {"pairing": 0, "paired": 12, "cancelled": 0},
}

ROUTER_STATUS: dict[str, Any] = {
    "role": "router",
    "version": "0.1.0",
    "uptime_s": 172800.0,
    "ready": {"ready": True, "reasons": []},
    "order": "paired",
    "outstanding": 1,
    "limit": 1024,
    "servers": [
        {
            "role": "prefill",
            "url": "http://10.0.0.7:8000",
            "problem": "",
            "outstanding": 0,
            "load_tokens": 0,
            "paired": True,
        },
        {
            "role": "decode",
            "url": "http://10.0.0.8:8000",
            "problem": "",
            "outstanding": 1,
            "load_tokens": 4096,
            "paired": False,
        },
    ],
}
