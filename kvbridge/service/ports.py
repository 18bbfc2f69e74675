"""What the doors of a daemon ask of the services behind them.

Owns: the requests, the answers and the protocols between `http` and the services. Must not know: HTTP, sockets.
Field names here are the JSON names of the API.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, model_validator

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, Role, RoomId
from kvbridge.core.plan.operations import Amounts

Name = Annotated[str, Field(min_length=1, max_length=200)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://", max_length=500)]


class PeerAddress(FrozenModel):
    """How to reach the control door of one prefill node."""

    endpoint: Annotated[str, Field(pattern=r"^(tcp|ipc)://", max_length=500)]
    public_key: Annotated[str, Field(max_length=40)] = ""
    """CURVE public key in Z85 (40 characters), or empty when the cluster runs without keys."""


class AdmissionRequest(FrozenModel):
    """Admit one request. On decode, `prefill` names the nodes that will write; on prefill it is left out."""

    room: RoomId | None = None
    """None lets the daemon draw one."""
    generation: Positive = 1
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    prefill: tuple[PeerAddress, ...] = ()
    client: Annotated[str, Field(max_length=200)] = ""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Wait so long for pages when they are not free; 0: be told at once. At most `admission.max_wait_s`."""
    begin_within_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """A prefill engine begins the room within so many seconds of its admission, or it ends: what is left of its ticket.
    Null: `timeouts.begin_s` of the prefill daemon."""


class RoomState(StrEnum):
    """Where a room stands, as users see it; one vocabulary for both sides."""

    ADMITTED = "admitted"
    OFFERED = "offered"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to the room."""
        return self in {RoomState.COMPLETED, RoomState.ABORTED, RoomState.FAILED}


class RoomReport(FrozenModel):
    """One room, as its daemon sees it now. For a final room this is its receipt."""

    room: RoomId
    generation: Positive
    role: Role
    state: RoomState
    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """How much of the prompt the decode engine held already, by its own word."""
    reason_code: str = ""
    reason: str = ""
    """Why it failed or was aborted; the first cause."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)
    age_s: float = 0.0
    expires_in_s: float | None = None
    """When the present wait ends the room, unless what it waits for happens; null when nothing limits it now."""
    limit: str = ""
    """The configuration key of that limit, or the field of the request that set it."""


class Readiness(FrozenModel):
    """Whether new rooms can be admitted, and every reason why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


class RoomsPort(Protocol):
    """Admission on one daemon (prefill or decode)."""

    async def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve for a request, at once or within its `wait_s`; nothing is kept of one that is refused or cancelled.

        Raises CapacityError when it does not fit (in time), ClientLimitError, InvalidInputError, ConflictError.
        """

    def report(self, room: int) -> RoomReport:
        """Raises UnknownRoomError."""

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return when the room is in one of the states or final, or with its present state after `timeout_s`."""

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""


class StatusPort(Protocol):
    """What operators ask of any daemon."""

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see, as JSON-able data: role, ranks, peers, rooms and pools by state."""


# ------------------------------------------------------------------------------------------- bootstrap


class Load(FrozenModel):
    """How full a node is, sent with each heartbeat."""

    rooms: NonNegative = 0
    free_pages: dict[str, NonNegative] = Field(default_factory=dict)
    """Free pages by index space."""
    total_pages: dict[str, NonNegative] = Field(default_factory=dict)


class ControlMode(StrEnum):
    """How a decode node meets a prefill node."""

    CURVE = "curve"
    """Encrypted, and both show their keys."""
    PLAIN = "plain"
    LOCAL = "local"
    """In the clear, but both are on one machine."""


Reasons = Annotated[tuple[Annotated[str, Field(max_length=2_000)], ...], Field(max_length=32)]


class NodeRegistration(FrozenModel):
    """One daemon's entry in the directory."""

    instance: Name
    node: Name
    role: Role
    incarnation: Name
    http_url: HttpUrl
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
    geometry: ModelGeometry
    host: tuple[ComponentKind, ...] = ()
    """The components that live in the node's host pool, so that their pages are counted there."""
    ready: bool = True
    reasons: Reasons = ()
    """Why it is not ready."""
    load: Load = Load()

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
    """Sent every heartbeat interval; a node that the directory does not know (any more) is told to register again."""

    incarnation: Name
    ready: bool
    reasons: Reasons = ()
    load: Load = Load()


class PairRequest(FrozenModel):
    """Ask bootstrap for a pair of instances for one request."""

    room: RoomId | None = None
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    fingerprint: str = ""
    """Only instances of this fingerprint, when several models share a directory."""
    client: Annotated[str, Field(max_length=200)] = ""


class TicketEnd(FrozenModel):
    """One side of a ticket: where to send the request."""

    instance: Name
    http_urls: tuple[HttpUrl, ...]


class Ticket(FrozenModel):
    """A paired and, on both ends, reserved request. Both ends give it up unless it is used in time."""

    room: RoomId
    generation: Positive
    prefill: TicketEnd
    decode: TicketEnd
    expires_in_s: float
    """A prefill engine has to begin the room within so many seconds from now."""

    def after(self, seconds: float) -> Self:
        """Return the ticket as it is so much later."""
        return self.model_copy(update={"expires_in_s": max(0.0, self.expires_in_s - seconds)})
