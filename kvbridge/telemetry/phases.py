"""The phases of a room and the limits that can end it, by the names that metrics, reports and logs use."""

from __future__ import annotations

from collections.abc import Mapping

from kvbridge.core.ids import Role

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
"""By role: what each phase of a room is. A room's phases are counted on the node where they pass, when they are over."""

LIMITS = (
    "begin_within_s",
    *(f"timeouts.{name}_s" for name in ("begin", "claim", "handshake", "offer", "pages", "room", "verify")),
)
"""Everything that can end a room because nothing happened in time."""
