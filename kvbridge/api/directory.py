"""Documents of bootstrap's API. Field names are the JSON names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from kvbridge.api.rooms import RoomReport, RoomRequest
from kvbridge.core.addresses import HTTP_URL, PeerAddress
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, Role, RoomId
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Features

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
    """Prefixes used within the last so many seconds are still cached here, unless their request failed. Null: none are kept."""
    sent_bytes: Annotated[dict[Name, NonNegative], Field(max_length=256)] = Field(default_factory=dict)
    """Bytes that this process has sent to each instance since it knows the instance."""


class ControlMode(StrEnum):
    """How a decode node meets a prefill node."""

    CURVE = "curve"
    """Encrypted, and both show their keys."""
    PLAIN = "plain"
    LOCAL = "local"
    """In the clear, but both are on one machine."""


GROWS = ConfigDict(json_schema_extra={"additionalProperties": True})
"""For documents that a node sends by itself: fields that a later release adds are ignored."""
Reasons = Annotated[tuple[Annotated[str, Field(max_length=2_000)], ...], Field(max_length=32)]


class NodeHeartbeat(FrozenModel):
    """Sent every heartbeat interval; a node that the directory does not know (any more) is told to register again.

    Fields that a later release adds are ignored.
    """

    model_config = GROWS

    incarnation: Name
    ready: bool
    reasons: Reasons = ()
    """Why it is not ready."""
    load: Load = Load()


class NodeRegistration(NodeHeartbeat):
    """One daemon's entry in the directory, and its first heartbeat. Fields that a later release adds are ignored."""

    instance: Name
    node: Name
    role: Role
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
    """The model that it holds, by its `tier` section; null: it does not say."""
    geometry: ModelGeometry
    host: tuple[ComponentKind, ...] = ()
    """The components that live in the node's host pool, so that their pages are counted there."""
    ready: bool = True
    features: Features = Features()
    """Features that the node has, and requires of bootstrap."""

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The part of it that changes."""
        return NodeHeartbeat(incarnation=self.incarnation, ready=self.ready, reasons=self.reasons, load=self.load)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role is Role.PREFILL and self.control is None:
            raise ValueError("a prefill node needs `control`, or no decode node could meet it")
        return self


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
    """Features that this bootstrap has, and requires of nodes."""


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


class PairRequest(RoomRequest):
    """Ask bootstrap for a pair of instances for one request."""

    fingerprint: str = ""
    """Only instances of this fingerprint, when several models share a directory."""


class TicketEnd(FrozenModel):
    """One side of a ticket: where to send the request."""

    instance: Name
    http_urls: tuple[HttpUrl, ...]
    engine_urls: tuple[HttpUrl, ...] = ()
    """Addresses of the engines, as far as their nodes have told them."""


class Ticket(FrozenModel):
    """A paired and, on both ends, reserved request. Both ends give it up unless it is used in time."""

    room: RoomId
    generation: Positive
    prefill: TicketEnd
    decode: TicketEnd
    expires_in_s: float
    """A prefill engine has to begin the room within so many seconds from now."""
    prefix_tokens: NonNegative = 0
    """Prompt tokens that decode held when it admitted the room, as it says: they are not sent."""
    computed_tokens: NonNegative = 0
    """Prompt tokens that prefill held then, as it says: its engine starts no later than there."""

    def after(self, seconds: float) -> Self:
        """Return the ticket as it is so much later."""
        return self.model_copy(update={"expires_in_s": max(0.0, self.expires_in_s - seconds)})


class EndReport(FrozenModel):
    """One daemon's report of a room, or why it could not be asked."""

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
