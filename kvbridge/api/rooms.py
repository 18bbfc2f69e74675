"""Documents of a daemon's API about rooms. Field names are the JSON names."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive, Role, RoomId
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import Namespace, Retention
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import MAX_INSTANCE_NODES, MAX_PAGE_HASHES_BYTES
from kvbridge.tier.keys import KEY_BYTES


def _from_base64(given: object) -> object:
    """Return bytes; text comes from JSON, and values of this process are bytes already."""
    if not isinstance(given, str):
        return given
    if len(given) > _MAX_TEXT:
        raise ValueError(f"{len(given)} characters are more than any prompt has keys: at most {_MAX_TEXT}")
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("no base64 (RFC 4648 section 4, with its padding) of page keys") from None
    if len(data) % KEY_BYTES:
        raise ValueError(f"page keys have {KEY_BYTES} bytes each, these are {len(data)} bytes in all")
    return data


MAX_LISTED = 200
"""Rooms on one page of a listing."""
_MAX_TEXT = -(-MAX_PAGE_HASHES_BYTES // 3) * 4
_THREE_KEYS, _TWO_KEYS, _ONE_KEY = (
    "[A-Za-z0-9+/]{64}",
    "[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=",
    "[A-Za-z0-9+/]{21}[AQgw]==",
)
PageHashes = Annotated[
    bytes,
    BeforeValidator(_from_base64),
    PlainSerializer(lambda data: base64.b64encode(data).decode(), return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "contentEncoding": "base64",
            "pattern": f"^({_THREE_KEYS})*({_TWO_KEYS}|{_ONE_KEY})?$",
            "maxLength": _MAX_TEXT,
        }
    ),
    Field(repr=False),
]
"""Keys (`kvbridge.tier.keys`) of all whole pages of a prompt in their order, 16 bytes each; base64 in JSON."""


class RoomRequest(FrozenModel):
    """A request that needs a room."""

    room: RoomId | None = None
    """Null: the daemon draws an id."""
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    client: Annotated[str, Field(max_length=200)] = ""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Longest wait for pages, bounded by `admission.max_wait_s` and `pairing.max_wait_s`."""
    page_hashes: PageHashes = b""
    """Pages with equal keys are shared between requests; empty: nothing is shared. A node whose `tier` is off ignores the keys, and
    bootstrap does not send them to such a node."""
    namespace: Namespace = ""
    """Requests share pages within one namespace, which is a part of the keys. The request's token must allow the namespace."""
    retention: Retention | None = None
    """Priority of its cached pages and for how long, as for an agent between two calls of its tools. Null: no priority. There is no
    effect where nothing is cached, or when the namespace, or all together, have their share of pages (`tier.retained_share`)."""


class AdmissionRequest(RoomRequest):
    """A request to one daemon. On decode, `prefill` names the writing nodes; on prefill it is left out."""

    generation: Positive = 1
    prefill: Annotated[tuple[PeerAddress, ...], Field(max_length=MAX_INSTANCE_NODES)] = ()
    begin_within_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time from the admission within which a prefill engine begins the room, or the room ends: the rest of its ticket. Null:
    `timeouts.begin_s` of the prefill daemon."""


class RoomReport(FrozenModel):
    """A room as its daemon sees it. The report of a final room is its receipt."""

    room: RoomId
    generation: Positive
    role: Role
    state: RoomState
    client: str = ""
    peers: tuple[str, ...] = ()
    """Nodes at the other end as INSTANCE/NODE; a prefill node before its first answer by its endpoint."""
    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """Prompt tokens that decode had cached: they are not sent."""
    computed_tokens: NonNegative = 0
    """Prefill: prompt tokens that prefill had cached: its engine starts there."""
    host_tokens: NonNegative = 0
    """Cached tokens of this node in its host memory alone."""
    namespace: str = ""
    reason_code: str = ""
    reason: str = ""
    """First cause of its failure or abort."""
    pages: dict[IndexSpace, NonNegative] = Field(default_factory=dict)
    """By index space; empty after its pages were given back."""
    quarantine: str = ""
    """Why nobody may use its pages yet although the room is over or being stopped; else empty."""
    amounts: Amounts = Field(default_factory=dict)
    """Sent or received rows and bytes, by component."""
    phases_s: dict[str, float] = Field(default_factory=dict)
    """Duration of each phase."""
    age_s: float = 0.0
    """Seconds since its admission."""
    waits_for: str = ""
    """Awaited event in words; empty when the room waits for nothing."""
    expires_in_s: float | None = None
    """Seconds until the room ends without that event; null: no limit."""
    limit: str = ""
    """Configuration key of that limit, or field of the request."""


class RoomQuery(FrozenModel, defer_build=False):
    """Which rooms to list."""

    state: Annotated[frozenset[RoomState], Field(description="Only rooms in one of these states.")] = frozenset()
    peer: Annotated[
        str,
        Field(max_length=400, description="Only rooms with this node at the other end: INSTANCE/NODE or INSTANCE."),
    ] = ""
    client: Annotated[str | None, Field(max_length=200, description="Only rooms of this client.")] = None
    after: Annotated[NonNegative, Field(description="`next` of the page before; 0: from the oldest.")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED, description="Rooms on a page at most.")] = 100


class DroppedObjects(FrozenModel):
    """Result for the objects of this node's model in the store below host memory, also those from other nodes."""

    outcome: Literal["dropped", "kept", "failed"]
    """`kept`: as asked. `failed`: some objects may still be found; ask again."""
    objects: NonNegative = 0
    """Dropped pages, and parts of checkpoints."""
    reason: str = ""


class DroppedPrefixes(FrozenModel):
    """Answer of a daemon that has dropped its prefixes. A page is one in each space that grows with the tokens."""

    dropped_pages: NonNegative
    """Pages of prompts and answers that no request finds any more."""
    read_pages: NonNegative
    """Dropped pages that open rooms still read; they are free when the last of these rooms has ended."""
    store: DroppedObjects | None = None
    """None: no store below host memory."""


class RoomPage(FrozenModel):
    """A page of a listing, in the order of admission: open rooms, and the receipts that the daemon still has."""

    rooms: tuple[RoomReport, ...]
    next: NonNegative | None
    """`after` for the next page, which may be empty; null: the end. A page may be short, because the daemon looks at a bounded
    number of rooms for each."""


class TimelineEntry(FrozenModel):
    """An event of a room."""

    after_s: float
    """Time from the admission."""
    what: str
    """The event in words, or the new state."""
    state: RoomState | None = None
    details: dict[str, str] = Field(default_factory=dict)


class RoomTimeline(FrozenModel):
    """Events of one attempt at a room on one node, in their order."""

    room: RoomId
    generation: Positive
    age_s: float
    entries: tuple[TimelineEntry, ...]
