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
"""URL of a node's engine for requests of the OpenAI API; empty: not stated."""


class Load(FrozenModel):
    """Load of a node, sent with each heartbeat."""

    rooms: NonNegative = 0
    available_pages: dict[str, NonNegative] = Field(default_factory=dict)
    """By index space: free pages, and cached pages that nobody reads."""
    total_pages: dict[str, NonNegative] = Field(default_factory=dict)
    prefixes_kept_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Prefixes used within this time are still cached, except those of failed requests. Null: no prefixes are cached."""
    sent_bytes: Annotated[dict[Name, NonNegative], Field(max_length=256)] = Field(default_factory=dict)
    """Bytes sent to each instance since this process first met it."""


class ControlMode(StrEnum):
    """Form of the connection between a decode node and a prefill node."""

    CURVE = "curve"
    """Encrypted; both show their keys."""
    PLAIN = "plain"
    LOCAL = "local"
    """Not encrypted; both nodes are on one machine."""


GROWS = ConfigDict(json_schema_extra={"additionalProperties": True})
"""Documents that a node sends by itself: fields of a later release are ignored."""
Reasons = Annotated[tuple[Annotated[str, Field(max_length=2_000)], ...], Field(max_length=32)]


class NodeHeartbeat(FrozenModel):
    """A node's sign of life, sent every heartbeat interval. The directory tells an unknown node to register again."""

    model_config = GROWS

    incarnation: Name
    ready: bool
    reasons: Reasons = ()
    load: Load = Load()


class NodeRegistration(NodeHeartbeat):
    """One daemon's entry in the directory, and its first heartbeat."""

    instance: Name
    node: Name
    role: Role
    http_url: HttpUrl
    engine_url: EngineUrl = ""
    control: PeerAddress | None = None
    """Control socket of a prefill node; null for a decode node, which listens nowhere."""
    meets_by: Annotated[tuple[ControlMode, ...], Field(min_length=1)] = (ControlMode.PLAIN,)
    """Ways to meet the other role: a prefill node listens in one; a decode node names all that it may use."""
    pp_size: Positive
    tp_size: Positive
    stage_boundaries: tuple[Positive, ...] = ()
    """First layer of each pipeline stage except the first."""
    ranks: tuple[Rank, ...]
    """Ranks on this node."""
    fingerprint: Name
    model_identity: ModelIdentity | None = None
    """Its model by its `tier` section; null: not stated."""
    geometry: ModelGeometry
    host: tuple[ComponentKind, ...] = ()
    """Components whose pages are in the host pool."""
    ready: bool = True
    features: Features = Features()
    """Features of the node, and those that it requires of bootstrap."""

    @property
    def heartbeat(self) -> NodeHeartbeat:
        """The changing part."""
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
    """Features of this bootstrap, and those that it requires of nodes."""


class InstanceView(FrozenModel):
    """One instance in a listing."""

    instance: str
    role: Role
    model: str
    fingerprint: str
    model_identity: ModelIdentity | None = None
    """Null: not stated."""
    tokens_per_page: Positive
    pp_size: Positive
    tp_size: Positive
    meets_by: tuple[ControlMode, ...]
    """Ways in which its nodes can meet those of the other role."""
    complete: bool
    """All pp x tp ranks are there."""
    ready: bool
    """It is complete, every node is ready, and an instance of the other role fits."""
    reasons: tuple[str, ...] = ()
    nodes: tuple[NodeView, ...]


class PairRequest(RoomRequest):
    """A request for a pair of instances."""

    fingerprint: str = ""
    """Fingerprint of the instances, when several models share a directory; empty: any."""


class TicketEnd(FrozenModel):
    """Addresses of one side of a pair."""

    instance: Name
    http_urls: tuple[HttpUrl, ...]
    engine_urls: tuple[HttpUrl, ...] = ()
    """Engines that the nodes have named."""


class Ticket(FrozenModel):
    """A pair with both ends reserved. Both ends give the room up unless the ticket is used in time."""

    room: RoomId
    generation: Positive
    prefill: TicketEnd
    decode: TicketEnd
    expires_in_s: float
    """Time within which a prefill engine has to begin the room."""
    prefix_tokens: NonNegative = 0
    """Prompt tokens that decode has cached: they are not sent."""
    computed_tokens: NonNegative = 0
    """Prompt tokens that prefill has cached: its engine starts there or earlier."""

    def after(self, seconds: float) -> Self:
        """Return the ticket as of `seconds` later."""
        return self.model_copy(update={"expires_in_s": max(0.0, self.expires_in_s - seconds)})


class EndReport(FrozenModel):
    """One daemon's report of a room, or the error of asking for it."""

    url: str
    report: RoomReport | None = None
    error_code: str = ""
    error: str = ""


class PairReport(FrozenModel):
    """A paired room, as its daemons see it now."""

    room: RoomId
    generation: Positive
    state: RoomState
    """State on decode; state on prefill when no decode daemon answers."""
    ticket: Ticket
    prefill: tuple[EndReport, ...]
    decode: tuple[EndReport, ...]
