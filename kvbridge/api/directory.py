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
"""URL of a node's engine for requests of the OpenAI API; empty: the node does not say."""


class Load(FrozenModel):
    """How full a node is, sent with each heartbeat."""

    rooms: NonNegative = 0
    available_pages: dict[str, NonNegative] = Field(default_factory=dict)
    """Pages that a request can have now, by index space: free pages, and cached pages that nobody reads."""
    total_pages: dict[str, NonNegative] = Field(default_factory=dict)
    prefixes_kept_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Prefixes used within this many seconds are still cached here, unless their request failed. Null: none are cached."""
    sent_bytes: Annotated[dict[Name, NonNegative], Field(max_length=256)] = Field(default_factory=dict)
    """Bytes that this process has sent to each instance, since it first met the instance."""


class ControlMode(StrEnum):
    """How a decode node and a prefill node meet."""

    CURVE = "curve"
    """Encrypted; both show their keys."""
    PLAIN = "plain"
    LOCAL = "local"
    """Not encrypted; both are on one machine."""


GROWS = ConfigDict(json_schema_extra={"additionalProperties": True})
"""Schema of documents that a node sends by itself: fields that a later release adds are ignored."""
Reasons = Annotated[tuple[Annotated[str, Field(max_length=2_000)], ...], Field(max_length=32)]


class NodeHeartbeat(FrozenModel):
    """A node's sign of life, sent every heartbeat interval. A node that the directory does not know is told to register again.

    Fields that a later release adds are ignored.
    """

    model_config = GROWS

    incarnation: Name
    ready: bool
    reasons: Reasons = ()
    """Reasons why it is not ready."""
    load: Load = Load()


class NodeRegistration(NodeHeartbeat):
    """One daemon's entry in the directory, and its first heartbeat. Fields that a later release adds are ignored."""

    instance: Name
    node: Name
    role: Role
    http_url: HttpUrl
    engine_url: EngineUrl = ""
    control: PeerAddress | None = None
    """Control socket where decode nodes meet a prefill node; null for a decode node, which listens nowhere."""
    meets_by: Annotated[tuple[ControlMode, ...], Field(min_length=1)] = (ControlMode.PLAIN,)
    """Ways to meet the other role: the one way in which a prefill node listens, all ways that a decode node may use."""
    pp_size: Positive
    tp_size: Positive
    stage_boundaries: tuple[Positive, ...] = ()
    """First layer of each pipeline stage but the first."""
    ranks: tuple[Rank, ...]
    """The ranks that live on this node."""
    fingerprint: Name
    model_identity: ModelIdentity | None = None
    """Its model, by its `tier` section; null: it does not say."""
    geometry: ModelGeometry
    host: tuple[ComponentKind, ...] = ()
    """Components in the node's host pool, where their pages are counted."""
    ready: bool = True
    features: Features = Features()
    """Features that the node has, and those that it requires of bootstrap."""

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The part that changes."""
        return NodeHeartbeat(incarnation=self.incarnation, ready=self.ready, reasons=self.reasons, load=self.load)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role is Role.PREFILL and self.control is None:
            raise ValueError("a prefill node needs `control`: decode nodes meet it there")
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
    """Seconds since its last heartbeat."""


class Registered(NodeView):
    """Answer to a registration."""

    features: Features = Features()
    """Features that this bootstrap has, and those that it requires of nodes."""


class InstanceView(FrozenModel):
    """One instance in a listing."""

    instance: str
    role: Role
    model: str
    fingerprint: str
    model_identity: ModelIdentity | None = None
    """Its model; null: it does not say."""
    tokens_per_page: Positive
    pp_size: Positive
    tp_size: Positive
    meets_by: tuple[ControlMode, ...]
    """Ways in which its nodes and those of the other role can meet."""
    complete: bool
    """Whether all pp x tp ranks are there."""
    ready: bool
    """Whether it is complete, every node is ready, and there is an instance to pair with it."""
    reasons: tuple[str, ...] = ()
    """Why it is not ready."""
    nodes: tuple[NodeView, ...]


class PairRequest(RoomRequest):
    """Ask bootstrap for a pair of instances for one request."""

    fingerprint: str = ""
    """Fingerprint of the instances to use, when several models share a directory; empty: any."""


class TicketEnd(FrozenModel):
    """One side of a ticket: where to send the request."""

    instance: Name
    http_urls: tuple[HttpUrl, ...]
    engine_urls: tuple[HttpUrl, ...] = ()
    """Addresses of the engines that nodes have told."""


class Ticket(FrozenModel):
    """A request that is paired, and reserved on both ends. Both ends give it up unless it is used in time."""

    room: RoomId
    generation: Positive
    prefill: TicketEnd
    decode: TicketEnd
    expires_in_s: float
    """Seconds from now within which a prefill engine has to begin the room."""
    prefix_tokens: NonNegative = 0
    """Prompt tokens that decode reported as cached at admission: they are not sent."""
    computed_tokens: NonNegative = 0
    """Prompt tokens that prefill reported as cached at admission: its engine starts there or earlier."""

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
