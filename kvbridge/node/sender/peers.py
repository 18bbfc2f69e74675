"""What decode nodes say about the rooms of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, ConflictError, KeyMismatchError, PeerError, StaleError, UnknownRoomError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.session.hearing import Meaning
from kvbridge.core.session.sender import SenderEvent
from kvbridge.core.wire.messages import REASON_CHARS, Abort, Drained, Failed, Intend, Offer
from kvbridge.node.driver import RoomDriver
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.room import named
from kvbridge.node.room_book import RoomBook
from kvbridge.node.sender.offers import Asking, EarlyOffers, check_offer
from kvbridge.node.sender.room import FromDecode, SenderRoom, user_state
from kvbridge.node.sender.workers import SenderWorkers
from kvbridge.telemetry.context import parse_traceparent
from kvbridge.telemetry.events import RoomOffered, RoomRejected


@dataclass(frozen=True, slots=True)
class SenderPeers:
    """Called from the event loop's thread only."""

    rooms: RoomBook[SenderRoom]
    driver: RoomDriver[SenderRoom]
    hearing: RoomHearing[SenderRoom]
    workers: SenderWorkers
    nodes: DecodeNodes
    early: EarlyOffers
    geometry: ModelGeometry
    clock: Clock

    def hear(self, peer: str, message: FromDecode) -> None:
        """Take what a decode node says of a room as `SENDER_HEARS` has it, or refuse it."""
        room, meaning = self.hearing.look_up(peer, message, kind=message.type)
        match message:
            case Intend() | Offer() if meaning is Meaning.TURN_AWAY and room is not None:
                why = (
                    room.reason
                    or f"the room is already {user_state(room)} on the prefill side, for {named(room.peers)}"
                )
                self._refuse(peer, message, room.reason_code or ConflictError.code, why)
            case Intend() | Offer() if meaning is Meaning.TAKE and room is None:
                self._take_early(peer, message)
            case Intend() | Offer() if meaning is Meaning.TAKE and room is not None:
                self._take(room, peer, message)
            case Abort() if meaning is Meaning.TAKE and room is not None:
                self.driver.stop(room, f"by the decode side: {message.message}", message.code)
            case Abort() if meaning is Meaning.PROOF:
                # We do not write to this peer's pages of the room, and what it asked for, if anything, is withdrawn. An Abort
                # follows that on one ordered link, so a room that has taken nothing of this peer is not its to end.
                self.early.withdraw(peer, message.room, message.generation)
                self.nodes.send(peer, Drained(room=message.room, generation=message.generation))
            case Failed() if meaning is Meaning.TAKE and room is not None:
                # Everything of the room was sent, and the decode side could not use it: too late to fail, not to say why.
                room.blame(message.code, f"by the decode side: {message.message}")
                self.driver.facts.events.emit(RoomRejected(**room.identity, code=message.code, reason=room.reason))

    def _take_early(self, peer: str, message: Asking) -> None:
        """A decode node asks for a room that is not there: perhaps before it is admitted."""
        newest = self.rooms.newest_generation(message.room)
        if message.generation < newest:
            stale = f"generation {message.generation} of the room is older than {newest}, which prefill works on"
            self._refuse(peer, message, StaleError.code, stale)
            return
        if not self.early.put(peer, message):
            why = "the room is not admitted on the prefill side, and other offers have taken this one's place"
            self._refuse(peer, message, UnknownRoomError.code, why)

    def _take(self, room: SenderRoom, peer: str, message: Asking) -> None:
        """A decode node names the destination of a room, or says that it will."""
        try:
            check_offer(message, self.geometry, prompt_tokens=room.prompt_tokens, prompt_digest=room.prompt_digest)
        except KeyMismatchError as error:  # whoever it is for may still come
            self._refuse(peer, message, error.code, str(error))
            return
        except BridgeError as error:
            self._refuse(peer, message, error.code, str(error))
            self.driver.fail(room, error.code, str(error))
            return
        room.peer, room.peers = peer, (self.nodes.name(peer),)
        if isinstance(message, Offer):
            self._take_offer(room, message)
        else:
            self.driver.advance(room, SenderEvent.INTENT)

    def _take_offer(self, room: SenderRoom, offer: Offer) -> None:
        room.destination, room.offered_s, room.is_offered = offer.tables, self.clock(), True
        room.prefix_tokens, room.digest = offer.prefix_tokens, offer.digest
        trace = parse_traceparent(offer.traceparent)
        if room.trace is None and trace is not None:  # admitted by an engine, or by a caller that names no trace
            room.trace, room.ids = trace, {**room.ids, "trace_id": trace.trace_id}
        self.driver.facts.events.emit(RoomOffered(**room.identity, trace=trace))
        room.phases_s["admit_to_offer_received"] = room.offered_s - room.created_s
        self.driver.advance(room, SenderEvent.OFFER)
        self.workers.settle(room)

    def _refuse(self, peer: str, asking: Asking, code: str, message: str) -> None:
        """Turn a decode node away, with the proof that nothing will be written for its offer.

        A refused intent has no such proof. An offer may be on its way behind the intent, and the room may be admitted before that
        offer arrives. Decode sends an Abort behind the offer, and the answer to the Abort is the proof.
        """
        self.driver.facts.refuse_message(peer, asking, code)
        text = message[:REASON_CHARS]
        self.nodes.send(peer, Failed(room=asking.room, generation=asking.generation, code=code, message=text))
        if isinstance(asking, Offer):
            self.nodes.send(peer, Drained(room=asking.room, generation=asking.generation))

    def peer_gone(self, peer: str, reason: str) -> None:
        """A decode node's process has ended, or it is silent: its rooms fail."""
        self.early.forget_peer(peer)
        for room in self.rooms:
            if room.peer == peer:
                why = f"the decode node is gone: {reason}"
                self.driver.fail(room, PeerError.code, why)

    def admitted(self, room: SenderRoom) -> None:
        """A room is there: its offer may have come before."""
        early = self.early.take(room.room, room.generation)
        if early is not None:
            self.hear(early.peer, early.offer)

    def not_admitted(self, room: int, generation: int, error: BridgeError) -> None:
        """A room will not be there: whoever asked for it before need not wait."""
        early = self.early.take(room, generation)
        if early is not None:
            self._refuse(early.peer, early.offer, error.code, f"prefill did not admit the room: {error}")

    def tick(self) -> None:
        """Refuse offers whose rooms are not admitted in time."""
        for late in self.early.expired():
            why = "the room was never admitted on the prefill side (limit: timeouts.early_offer_s)"
            if late.offer.held:
                why = "prefill holds no such room (any more): it was never there, somebody else has had it, or it has ended"
            self._refuse(late.peer, late.offer, UnknownRoomError.code, why)
