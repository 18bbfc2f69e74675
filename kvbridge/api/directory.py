"""What bootstrap is told and asked. Field names are the JSON names of the API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from kvbridge.api.rooms import PageHashes, RoomReport
from kvbridge.core.addresses import HTTP_URL, PeerAddress
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, Role, RoomId
from kvbridge.core.prefixes import ModelIdentity, Namespace, Retention
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.features import Features

Name = Annotated[str, Field(min_length=1, max_length=200)]
HttpUrl = Annotated[str, Field(pattern=f"^{HTTP_URL}$", max_length=500)]
EngineUrl = Annotated[str, Field(pattern=f"^({HTTP_URL})?$", max_length=500)]
"""Where a node's engine answers requests of the OpenAI API; empty: the node does not say."""


class Load(FrozenModel):
    """How full a node is, sent with each heartbeat."""

    rooms: NonNegative = 0
    available_pages: dict[str, NonNegative] = Field(default_factory=dict)
    """Pages that a request can have now, by index space: free ones, and cached ones that nobody reads."""
    total_pages: dict[str, NonNegative] = Field(default_factory=dict)
    prefixes_kept_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What it was given with page keys and used within so many seconds it still has, but for what never came to its end. Null: it
    keeps no prefixes."""
    sent_bytes: Annotated[dict[Name, NonNegative], Field(max_length=256)] = Field(default_factory=dict)
    """What this process has sent to each instance since it knows it: the sender's word for a link, which it counts in any case."""


class ControlMode(StrEnum):
    """How a decode node meets a prefill node."""

    CURVE = "curve"
    """Encrypted, and both show their keys."""
    PLAIN = "plain"
    LOCAL = "local"
    """In the clear, but both are on one machine."""


GROWS = ConfigDict(json_schema_extra={"additionalProperties": True})
"""Of what a node sends by itself: fields that a later release adds are ignored."""
Reasons = Annotated[tuple[Annotated[str, Field(max_length=2_000)], ...], Field(max_length=32)]


class NodeRegistration(FrozenModel):
    """One daemon's entry in the directory. What a later release adds to it is ignored."""

    model_config = GROWS

    instance: Name
    node: Name
    role: Role
    incarnation: Name
    http_url: HttpUrl
    engine_url: EngineUrl = ""
    control: PeerAddress | None = None
    """Where decode nodes meet it; decode nodes themselves listen to nobody and have none."""
    meets_by: Annotated[tuple[ControlMode, ...], Field(min_length=1)] = (ControlMode.PLAIN,)
    """How nodes of the other role can be met: the one way in which a prefill node listens, all that a decode node may use."""
    pp_size: Positive
    tp_size: Positive
    stage_boundaries: tuple[Positive, ...] = ()
    """The first layers of the instance's pipeline stages but the first."""
    ranks: tuple[Rank, ...]
    """The ranks that live on this node."""
    fingerprint: Name
    model_identity: ModelIdentity | None = None
    """Which model it holds, by its `tier` section; null: it does not say."""
    geometry: ModelGeometry
    host: tuple[ComponentKind, ...] = ()
    """The components that live in the node's host pool, so that their pages are counted there."""
    ready: bool = True
    reasons: Reasons = ()
    """Why it is not ready."""
    load: Load = Load()
    features: Features = Features()
    """What the node has, and requires of bootstrap, for their conversation."""

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The part of it that changes."""
        return NodeHeartbeat(incarnation=self.incarnation, ready=self.ready, reasons=self.reasons, load=self.load)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role is Role.PREFILL and self.control is None:
            raise ValueError("a prefill node needs `control`, or no decode node could meet it")
        return self


class NodeHeartbeat(FrozenModel):
    """Sent every heartbeat interval; a node that the directory does not know (any more) is told to register again.

    What a later release adds to it is ignored.
    """

    model_config = GROWS

    incarnation: Name
    ready: bool
    reasons: Reasons = ()
    load: Load = Load()


class NodeView(FrozenModel):
    """One node in a listing."""

    node: str
    http_url: str
    engine_url: EngineUrl = ""
    control_endpoint: str
    incarnation: str
    epoch: Positive
    ranks: tuple[Rank, ...]
    ready: bool
    load: Load
    silent_s: float
    """Seconds since it was last heard of."""


class Registered(NodeView):
    """The answer to a registration."""

    features: Features = Features()
    """What this bootstrap has, and requires of nodes, for their conversation."""


class InstanceView(FrozenModel):
    """One instance in a listing."""

    instance: str
    role: Role
    model: str
    fingerprint: str
    model_identity: ModelIdentity | None = None
    """Which model it says it holds; null: it does not say."""
    tokens_per_page: Positive
    pp_size: Positive
    tp_size: Positive
    meets_by: tuple[ControlMode, ...]
    """How its nodes and those of the other role can meet."""
    complete: bool
    """Whether all pp x tp ranks are there."""
    ready: bool
    """Whether it is complete, every node is ready, and somebody could be paired with it."""
    reasons: tuple[str, ...] = ()
    """Why it is not ready."""
    nodes: tuple[NodeView, ...]


class PairRequest(FrozenModel):
    """Ask bootstrap for a pair of instances for one request."""

    room: RoomId | None = None
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    fingerprint: str = ""
    """Only instances of this fingerprint, when several models share a directory."""
    client: Annotated[str, Field(max_length=200)] = ""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Wait so long for pages when no pair has them free; 0: be told at once. At most `pairing.max_wait_s`."""
    page_hashes: PageHashes = b""
    """The keys of all whole pages of the prompt, 16 bytes each, in base64: what may be shared with other requests. Empty: nothing.
    Instances that do not say which model they hold (`tier`) are not sent them."""
    namespace: Namespace = ""
    """Who shares: it enters the keys, and the token of the request must be allowed to name it."""
    retention: Retention | None = None
    """How much its cached pages matter and for how long, for an agent between two calls of its tools. Null: as any others. Without
    effect where nothing is cached, and when its namespace, or all together, have as many as they may (`tier.retained_share`)."""


class TicketEnd(FrozenModel):
    """One side of a ticket: where to send the request."""

    instance: Name
    http_urls: tuple[HttpUrl, ...]
    engine_urls: tuple[HttpUrl, ...] = ()
    """Of the engines, as far as their nodes have told them."""


class Ticket(FrozenModel):
    """A paired and, on both ends, reserved request. Both ends give it up unless it is used in time."""

    room: RoomId
    generation: Positive
    prefill: TicketEnd
    decode: TicketEnd
    expires_in_s: float
    """A prefill engine has to begin the room within so many seconds from now."""
    prefix_tokens: NonNegative = 0
    """How much of the prompt decode held when it admitted the room, by its own word: it is not sent."""
    computed_tokens: NonNegative = 0
    """How much of it prefill held then, by its own word: its engine starts no later than there."""

    def after(self, seconds: float) -> Self:
        """Return the ticket as it is so much later."""
        return self.model_copy(update={"expires_in_s": max(0.0, self.expires_in_s - seconds)})


class EndReport(FrozenModel):
    """What one daemon says of a room, or why it could not be asked."""

    url: str
    report: RoomReport | None = None
    error_code: str = ""
    error: str = ""


class PairReport(FrozenModel):
    """A paired room, as its daemons see it now."""

    room: RoomId
    generation: Positive
    state: RoomState
    """The decode side's state, or the prefill side's when no decode daemon answers."""
    ticket: Ticket
    prefill: tuple[EndReport, ...]
    decode: tuple[EndReport, ...]
