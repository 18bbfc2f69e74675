"""The waits that an operator may set, by name, in seconds. An error that a wait causes names the key, as `timeouts.offer_s`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from kvbridge.config.endpoints import Seconds
from kvbridge.core.ids import FrozenModel


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
        (
            "control_delivery_s",
            "<",
            "room_keep_s",
            "a late message could meet another attempt at a room that was forgotten",
        ),
    )

    worker_start_s: Seconds = 120.0
    """A rank worker makes and registers its memory (since its last sign of progress)."""
    worker_silence_s: Seconds = 15.0
    """A rank worker that says nothing for so long is taken for dead."""
    control_resend_s: Seconds = 0.5
    """An unacknowledged control message is sent again after this."""
    control_delivery_s: Seconds = 30.0
    """A control message that nobody acknowledged for so long has failed."""
    control_heartbeat_s: Seconds = 2.0
    """Interval of the heartbeats between nodes; a peer to which no connection stands for so long is lost."""
    peer_silence_s: Seconds = 10.0
    """A peer node that says nothing for so long is taken for lost."""
    handshake_s: Seconds = 10.0
    """Decode: every prefill node of a room has welcomed us. Prefill: what a decode node says of its memory has been checked."""
    pages_s: Seconds = 10.0
    """Adopted pools: the engine names the pages of a room."""
    begin_s: Seconds = 60.0
    """Prefill: an engine begins an admitted room. A room of a ticket has what is left of the ticket instead."""
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
    """Decode: before writers that gave no proof are shut out, other rooms that are being written may end within this."""
    verify_s: Seconds = 60.0
    """Decode: the digests of a room that has arrived are computed (integrity.digest)."""
    copy_s: Seconds = 30.0
    """Rank workers have copied the pages of one order between the device and host memory (tier.host)."""
    claim_s: Seconds = 120.0
    """A committed room waits for the decode engine to claim it."""
    engine_settle_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """After the process of an engine that did not detach has ended, before its pages are used again: a GPU may finish some
    milliseconds of work for a process that was killed."""
    room_keep_s: Seconds = 300.0
    """A final room is remembered so long, for reports and to recognise stale messages."""
    shutdown_rooms_s: Seconds = 15.0
    """After the signal, open rooms may end within this; those that do not are aborted."""
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
    """All of pairing one request, every candidate together."""
    store_s: Seconds = 1.0
    """One call to the store of the directory, when that is Redis."""
    ticket_s: Seconds = 60.0
    """A prefill engine begins the room of a ticket within this, or both of its ends give the room up."""
    room_keep_s: Seconds = 600.0
    """A paired room is remembered so long, for reports, cancels and to refuse a second use of its id."""
    shutdown_s: Seconds = 10.0
    """From the signal to the end of the process."""
