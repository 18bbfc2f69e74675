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
    """Turn text from JSON into bytes; values of this process are bytes already."""
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
    """A request that needs a room."""

    room: RoomId | None = None
    """Id of the room; null: the daemon that is asked draws one."""
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    client: Annotated[str, Field(max_length=200)] = ""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Longest wait for pages that are not free; 0: do not wait. `admission.max_wait_s` and `pairing.max_wait_s` bound it."""
    page_hashes: PageHashes = b""
    """Keys of all whole pages of the prompt, 16 bytes each, in base64. Pages with equal keys are shared between requests. Empty:
    nothing is shared. A node whose `tier` is off ignores the keys, and bootstrap does not send them to such a node."""
    namespace: Namespace = ""
    """Requests share pages within one namespace: it enters the keys, and the token of the request must be allowed to name it."""
    retention: Retention | None = None
    """Importance of its cached pages and for how long, for an agent between two calls of its tools. Null: as any others. It has
    no effect where nothing is cached, and when its namespace, or all together, have their share of pages
    (`tier.retained_share`)."""


class AdmissionRequest(RoomRequest):
    """A request to one daemon. On decode, `prefill` names the nodes that will write; on prefill it is left out."""

    generation: Positive = 1
    prefill: Annotated[tuple[PeerAddress, ...], Field(max_length=MAX_INSTANCE_NODES)] = ()
    begin_within_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time from the admission within which a prefill engine begins the room, or the room ends: the rest of its ticket. Null:
    `timeouts.begin_s` of the prefill daemon."""


class RoomReport(FrozenModel):
    """A room as its daemon sees it now. For a final room this is its receipt."""

    room: RoomId
    generation: Positive
    role: Role
    state: RoomState
    client: str = ""
    peers: tuple[str, ...] = ()
    """Nodes at the other end, each as INSTANCE/NODE; a prefill node that has not answered yet, by its endpoint."""
    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """Prompt tokens that decode had cached, which are not sent."""
    computed_tokens: NonNegative = 0
    """Prefill: prompt tokens that prefill had cached; its engine starts to compute there."""
    host_tokens: NonNegative = 0
    """Cached tokens of this node that were in its host memory alone, and come back from there."""
    namespace: str = ""
    """Namespace of the request: requests of one namespace share prefixes."""
    reason_code: str = ""
    reason: str = ""
    """Why it failed or was aborted; the first cause."""
    pages: dict[IndexSpace, NonNegative] = Field(default_factory=dict)
    """Pages that it has here, by index space; none once they were given back."""
    quarantine: str = ""
    """Reason why nobody may use these pages yet, though the room is over or being stopped; empty when there is none."""
    amounts: Amounts = Field(default_factory=dict)
    """Rows and bytes that were sent, or have arrived, by component."""
    phases_s: dict[str, float] = Field(default_factory=dict)
    """Time of each step."""
    age_s: float = 0.0
    """Seconds since it was admitted."""
    waits_for: str = ""
    """Event that the room waits for, in words; empty when it waits for nothing."""
    expires_in_s: float | None = None
    """Seconds until the room ends, unless the event that it waits for happens; null when nothing limits the wait."""
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
    """Outcome for the objects of this node's model in the store below host memory, also those that other nodes have written."""

    outcome: Literal["dropped", "kept", "failed"]
    """`kept`: as asked. `failed`: some objects may still be there and be found; ask again."""
    objects: NonNegative = 0
    """Dropped objects: pages, and parts of checkpoints."""
    reason: str = ""
    """Why it failed."""


class DroppedPrefixes(FrozenModel):
    """Answer of a daemon that has dropped its prefixes. A page is one in each space that grows with the tokens."""

    dropped_pages: NonNegative
    """Pages of prompts and answers that no request finds any more."""
    read_pages: NonNegative
    """Dropped pages that rooms under way still read; they are free when the last of these rooms has ended."""
    store: DroppedObjects | None = None
    """None: the node has no store below host memory."""


class RoomPage(FrozenModel):
    """Some rooms of a daemon, in the order of their admission: those under way, and the receipts that it still has."""

    rooms: tuple[RoomReport, ...]
    next: NonNegative | None
    """Value of `after` for the next page, which may be empty; null when there is none. A page looks at a bounded number of
    rooms, so it may be short although others follow."""


class TimelineEntry(FrozenModel):
    """Something that happened to a room."""

    after_s: float
    """Since the room was admitted."""
    what: str
    """The event in words; for a new state, the state."""
    state: RoomState | None = None
    """The new state, if there is one."""
    details: dict[str, str] = Field(default_factory=dict)


class RoomTimeline(FrozenModel):
    """Events of one attempt at a room on one node, in their order."""

    room: RoomId
    generation: Positive
    age_s: float
    entries: tuple[TimelineEntry, ...]
