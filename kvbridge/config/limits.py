"""Admission and waits of daemons. An error that a wait causes names its key, as `timeouts.offer_s`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from kvbridge.config.endpoints import Seconds
from kvbridge.core.ids import FrozenModel, NonNegative, Positive

ClientName = Annotated[str, Field(max_length=200)]


class ClientAdmission(FrozenModel):
    """Caps of one client by name. Null: the cap of everybody."""

    max_rooms: NonNegative | None = None
    """In place of `client_max_rooms`."""
    max_waiting: NonNegative | None = None
    """In place of `client_max_waiting`."""


class AdmissionConfig(FrozenModel):
    """How requests that do not fit are treated, and the caps of a client."""

    max_rooms: Positive = 10_000
    """Rooms on this daemon; more requests are refused as when pages lack. It also bounds rooms whose pages an engine owns."""
    max_wait_s: Seconds = 30.0
    """Longest `wait_s` of a request that is served: the time that it may wait for pages."""
    max_waiting: NonNegative = 1_000
    """Requests that may wait for pages at once; more are refused at once. 0: nobody waits."""
    max_overtakes: NonNegative = 16
    """Requests that may pass one that does not fit, before pages are held back for that one. More of them keep pools fuller."""
    client_max_rooms: NonNegative = 0
    """Rooms and waiting requests of one client on this daemon; more are answered 429. 0: no limit."""
    client_max_waiting: NonNegative = 0
    """Waiting requests of one client; more are answered 429. 0: no limit."""
    clients: dict[ClientName, ClientAdmission] = Field(default_factory=dict)
    """Clients with caps of their own, by name, each as {max_rooms: 64, max_waiting: 8}."""
    retry_after_min_s: Seconds = 0.1
    """Shortest time after which a refused caller is told to come back."""
    retry_after_max_s: Seconds = 30.0
    """Longest time after which a refused caller is told to come back."""
    needs_engine: bool = False
    """/ready is red, and bootstrap sends no request here, while an engine is missing on a rank. False: /ready does not look at
    engines, and requests that come before they attach wait for them."""
    unready_after_s: Seconds = 30.0
    """/ready turns red when not even the smallest request has fitted for so long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.retry_after_min_s > self.retry_after_max_s:
            raise ValueError(
                f"retry_after_min_s ({self.retry_after_min_s:g} s) must not exceed "
                f"retry_after_max_s ({self.retry_after_max_s:g} s)"
            )
        return self


class _Timeouts(FrozenModel):
    RELATIONS: ClassVar[tuple[tuple[str, str, str, str], ...]] = ()
    """(one key, `<` or `<=`, another key, why)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for shorter, relation, longer, why in self.RELATIONS:
            left, right = getattr(self, shorter), getattr(self, longer)
            if left > right or (left == right and relation == "<"):
                must = "must be shorter than" if relation == "<" else "must not exceed"
                raise ValueError(f"{shorter} ({left:g} s) {must} {longer} ({right:g} s): {why}")
        return self


class DaemonTimeouts(_Timeouts):
    """Waits of a prefill or decode daemon and of its rank workers."""

    RELATIONS = (
        ("control_resend_s", "<", "control_delivery_s", "a message could never be sent again"),
        ("control_heartbeat_s", "<", "peer_silence_s", "every peer would be taken for lost between two heartbeats"),
        ("transfer_s", "<", "room_s", "a room would end before its first section may"),
        ("control_delivery_s", "<", "room_keep_s", "a late message could meet another attempt at a forgotten room"),
    )

    worker_start_s: Seconds = 120.0
    """A rank worker makes and registers its memory (since its last sign of progress)."""
    worker_silence_s: Seconds = 15.0
    """A rank worker that says nothing for so long is taken for dead."""
    control_resend_s: Seconds = 0.5
    """An unacknowledged control message is sent again after this."""
    control_delivery_s: Seconds = 30.0
    """A control message that nobody has acknowledged for so long has failed."""
    control_heartbeat_s: Seconds = 2.0
    """Interval of the heartbeats between nodes. A peer without a connection for so long is lost."""
    peer_silence_s: Seconds = 10.0
    """A peer node that says nothing for so long is taken for lost."""
    handshake_s: Seconds = 10.0
    """Decode: all prefill nodes of a room welcome this node. Prefill: the memory that a decode node describes is checked."""
    pages_s: Seconds = 10.0
    """Adopted pools: the engine names the pages of a room."""
    begin_s: Seconds = 60.0
    """Prefill: an engine begins an admitted room. A room of a ticket has the rest of the ticket's time instead."""
    offer_s: Seconds = 60.0
    """Prefill: an admitted room waits for decode's offer."""
    early_offer_s: Seconds = 10.0
    """An offer waits for its room to be admitted on prefill."""
    room_s: Seconds = 600.0
    """From the offer until every byte of the room has been sent."""
    transfer_s: Seconds = 60.0
    """One submitted section, from submission to its end."""
    drain_s: Seconds = 60.0
    """After Abort: the peer answers Drained, or else is shut out; its pages are quarantined until then."""
    fence_s: Seconds = 30.0
    """Decode: other rooms that are being written may end within this before writers that gave no proof are shut out."""
    verify_s: Seconds = 60.0
    """Decode: the digests of a room that has arrived are computed (integrity.digest)."""
    copy_s: Seconds = 30.0
    """Rank workers have copied the pages of one order between the device and host memory (tier.host)."""
    claim_s: Seconds = 120.0
    """A committed room waits for the decode engine to claim it."""
    engine_settle_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """From the end of an engine's process that did not detach to the next use of its pages: a GPU may finish some milliseconds of
    work for a process that was killed."""
    room_keep_s: Seconds = 300.0
    """A final room is remembered so long, for reports and to recognise stale messages."""
    shutdown_rooms_s: Seconds = 15.0
    """Open rooms may end within this after the signal; the others are aborted then."""
    shutdown_close_s: Seconds = 15.0
    """After that: aborts, rank workers end, endpoints close. Both together bound the time from the signal to the end."""


class BootstrapTimeouts(_Timeouts):
    """Waits of the bootstrap service."""

    RELATIONS = (
        ("reserve_s", "<=", "pair_s", "one call is a part of it"),
        ("store_s", "<=", "pair_s", "one call is a part of it"),
        ("pair_s", "<", "room_keep_s", "a room would be forgotten while it is being paired"),
        ("ticket_s", "<=", "room_keep_s", "a ticket would outlive the memory of its room"),
    )

    reserve_s: Seconds = 5.0
    """One daemon reserves one end of a room, gives the reservation back, or reports on the room."""
    pair_s: Seconds = 20.0
    """Pairing of one request, every candidate together."""
    store_s: Seconds = 1.0
    """One call to the store of the directory, when that is Redis."""
    ticket_s: Seconds = 60.0
    """A prefill engine begins the room of a ticket within this, or both of its ends give the room up."""
    room_keep_s: Seconds = 600.0
    """A paired room is remembered so long, for reports, cancels and to refuse a second use of its id."""
    shutdown_s: Seconds = 10.0
    """From the signal to the end of the process."""
