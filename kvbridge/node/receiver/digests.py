"""What a decode node does with digests: takes what writers and its own ranks say, and decides whether a room may commit.

Owns: that decision. Must not know: memory, how digests are computed, what a transition leads to (`driver`).
"""

from __future__ import annotations

from kvbridge.core.errors import BridgeError, DigestMismatchError, ProtocolError
from kvbridge.core.session.receiver import ReceiverEvent, ReceiverState
from kvbridge.core.wire.messages import Digests, Done
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.receiver.driver import ReceiverDriver
from kvbridge.node.receiver.room import ReceiverRoom
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.room import slowest
from kvbridge.telemetry.events import EventStream, PagesDiffer


class ReceiverDigests:
    """The digests of all rooms of a decode node. Called from the event loop's thread only."""

    def __init__(self, driver: ReceiverDriver, events: EventStream) -> None:
        self._driver = driver
        self._events = events

    def expect(self, peer: str, message: Digests) -> None:
        """A writer says what it has sent. What cannot be right fails the room: nobody could say later what arrived."""
        room = self._driver.rooms.find(message.room, message.generation)
        writer = None if room is None else room.writers.get(peer)
        if room is None or room.over:
            self._driver.refuse_message(peer, message, "stale_digests")
            return
        if writer is None or message.writer not in writer.node.ranks or room.verification is None:
            self._driver.refuse_message(peer, message, "foreign_digests")
            return
        if room.state is not ReceiverState.OFFERED or message.writer not in writer.missing:
            return
        try:
            room.verification.expect(message)
        except BridgeError as error:
            self._driver.fail(room, ProtocolError.code, f"prefill node {writer.node.name}: {error}")

    def complete(self, room: ReceiverRoom, done: Done) -> bool:
        """Whether all that a writer says it has said about digests has come; if not, the room has failed."""
        if room.verification is None:
            return True
        try:
            room.verification.require_all(done)
        except ProtocolError as error:
            self._driver.fail(room, error.code, str(error))
            return False
        return True

    def find(self, message: Digested) -> None:
        """A rank of this node has found this in its memory."""
        room, verification = self._verifying(message)
        if room is None or verification is None:
            return
        try:
            verification.find(message)
        except BridgeError as error:
            why = f"rank worker {message.rank} reports what the room does not have: {error}"
            self._driver.fail(room, error.code, why)

    def verified(self, message: Verified) -> None:
        """A rank of this node has looked at everything, or could not. When all have, the room commits or fails."""
        room, verification = self._verifying(message)
        if room is None or verification is None:
            return
        if message.error_code:
            why = f"rank worker {message.rank} could not verify what has arrived: {message.error}"
            self._driver.fail(room, message.error_code, why)
            return
        slowest(room.phases_s, message.seconds)
        if not verification.answered(message.rank):
            return
        differing, why = verification.differences(room.tables)
        if not differing:
            self._driver.commit(room, ReceiverEvent.VERIFIED)
            return
        for kind, pages in differing.items():
            self._events.emit(PagesDiffer(**room.identity, component=kind, pages=pages))
        self._driver.fail(room, DigestMismatchError.code, why)

    def _verifying(self, message: Digested | Verified) -> tuple[ReceiverRoom | None, Verification | None]:
        """The room that a rank speaks of, unless it has ended meanwhile."""
        room = self._driver.rooms.find(message.room, message.generation)
        if room is None or room.state is not ReceiverState.VERIFYING:
            return None, None
        return room, room.verification
