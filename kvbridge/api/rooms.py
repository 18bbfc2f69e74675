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
    """Turn JSON's text into bytes; what is bytes already came from this process."""
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
"""Page keys (`kvbridge.tier.keys`), 16 bytes each, one for each whole page of the prompt in its order; in JSON as base64."""


class RoomRequest(FrozenModel):
    """One request that needs a room."""

    room: RoomId | None = None
    """Null: whoever is asked draws one."""
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    client: Annotated[str, Field(max_length=200)] = ""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Wait this long for pages when they are not free; 0: do not wait. `admission.max_wait_s` and `pairing.max_wait_s` bound it."""
    page_hashes: PageHashes = b""
    """The keys of all whole pages of the prompt, 16 bytes each, in base64: what may be shared with other requests. Empty: nothing.
    A node whose `tier` is off does without them, and bootstrap does not send them to such a node."""
    namespace: Namespace = ""
    """Requests of one namespace share: it enters the keys, and the token of the request must be allowed to name it."""
    retention: Retention | None = None
    """How much its cached pages matter and for how long, for an agent between two calls of its tools. Null: as any others. Without
    effect where nothing is cached, and when its namespace, or all together, have as many as they may (`tier.retained_share`)."""


class AdmissionRequest(RoomRequest):
    """Admit one request. On decode, `prefill` names the nodes that will write; on prefill it is left out."""

    generation: Positive = 1
    prefill: Annotated[tuple[PeerAddress, ...], Field(max_length=MAX_INSTANCE_NODES)] = ()
    begin_within_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """A prefill engine begins the room within this time from its admission, or the room ends: what is left of its ticket.
    Null: `timeouts.begin_s` of the prefill daemon."""


class RoomReport(FrozenModel):
    """One room, as its daemon sees it now. For a final room this is its receipt."""

    room: RoomId
    generation: Positive
    role: Role
    state: RoomState
    client: str = ""
    peers: tuple[str, ...] = ()
    """The nodes at the other end, each as INSTANCE/NODE; where a prefill node listens before it has answered."""
    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """How much of the prompt decode held already, which is not sent."""
    computed_tokens: NonNegative = 0
    """Prefill: how much of the prompt prefill held already, where its engine starts to compute."""
    host_tokens: NonNegative = 0
    """How many of the last tokens that this node held were in its host memory alone and come back from there."""
    namespace: str = ""
    """As the request named it: requests of one namespace share prefixes."""
    reason_code: str = ""
    reason: str = ""
    """Why it failed or was aborted; the first cause."""
    pages: dict[IndexSpace, NonNegative] = Field(default_factory=dict)
    """The pages that it has here, by index space; none once they were given back."""
    quarantine: str = ""
    """Why nobody may use these pages yet, though the room is over or being stopped; empty when that is not so."""
    amounts: Amounts = Field(default_factory=dict)
    """Rows and bytes that were sent, or have arrived, by component."""
    phases_s: dict[str, float] = Field(default_factory=dict)
    """How long each step took, in seconds."""
    age_s: float = 0.0
    """Seconds since it was admitted."""
    waits_for: str = ""
    """The event that the room waits for, in words; empty when it waits for nothing."""
    expires_in_s: float | None = None
    """Seconds until the present wait ends the room, unless what it waits for happens; null when nothing limits it now."""
    limit: str = ""
    """The configuration key of that limit, or the field of the request that set it."""


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
    """Outcome for the objects of this node's model in the store below host memory, whichever node put them there."""

    outcome: Literal["dropped", "kept", "failed"]
    """`kept`: so it was asked. `failed`: some may still be there, and would be found; ask again."""
    objects: NonNegative = 0
    """Dropped ones: pages, and parts of checkpoints."""
    reason: str = ""
    """Why it failed."""


class DroppedPrefixes(FrozenModel):
    """Answer of a daemon that has dropped its prefixes. A page is one in each space that grows with the tokens."""

    dropped_pages: NonNegative
    """Pages of prompts and answers that no request finds any more."""
    read_pages: NonNegative
    """Those of these pages that rooms under way still read; they are free when the last of the rooms has ended."""
    store: DroppedObjects | None = None
    """None: the node has no store below host memory."""


class RoomPage(FrozenModel):
    """Some rooms of a daemon, in the order of their admission: those under way, and the receipts that it still has."""

    rooms: tuple[RoomReport, ...]
    next: NonNegative | None
    """To be sent as `after` for the next page, which may be empty; null when there is none. A page looks at a bounded number of
    rooms, so it may be short although others follow."""


class TimelineEntry(FrozenModel):
    """Something that happened to a room."""

    after_s: float
    """Since the room was admitted."""
    what: str
    """The state that it came into, or what else happened, in words."""
    state: RoomState | None = None
    """The state that it came into, if it did."""
    details: dict[str, str] = Field(default_factory=dict)


class RoomTimeline(FrozenModel):
    """Events of one attempt at a room on one node, in their order."""

    room: RoomId
    generation: Positive
    age_s: float
    entries: tuple[TimelineEntry, ...]
