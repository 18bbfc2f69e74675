"""One conversation between two incarnations, on either side: its delivery, acknowledgements and timers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvbridge.core.errors import BridgeError, ProtocolError
from kvbridge.core.process import monotonic
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.delivery import Arrival, DeliverySettings, Inbox, Outbox
from kvbridge.core.wire.messages import Heartbeat, PeerMessage

if TYPE_CHECKING:
    from kvbridge.control.peers import PeerEnd

_ACK_DELAY_S = 0.01
"""An acknowledgement waits at most so long for a message to ride on, and less than half a resend, or all would be sent twice."""
_ACK_AT_ONCE_PART = 4
"""An acknowledgement goes out at once when this part (1/n) of the window waits for one."""
_TIMER_SLACK_S = 0.001


class Refusal(StrEnum):
    """Why a frame was refused. `FrameFault`s and the codes of a message handler's errors are further reasons."""

    STALE = "stale"
    """It belongs to an earlier link or incarnation."""
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out_of_order"
    UNAUTHENTICATED = "unauthenticated"
    HANDSHAKE = "handshake"
    TOO_MANY_PEERS = "too_many_peers"
    TOO_MANY_CONNECTIONS = "too_many_connections"


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class PeerCallbacks:
    """The loop makes these calls one after another. None may block."""

    on_message: Callable[[str, PeerMessage], None]
    """(peer incarnation, message): each message once, in its sender's order. A BridgeError refuses the message for good."""
    on_undelivered: Callable[[str, PeerMessage, float], None] = _ignore
    """(peer incarnation, message, age in seconds): the conversation is over, and this message, which may have arrived, was not
    acknowledged."""
    on_refused: Callable[[str, str], None] = _ignore
    """(kind, detail): a frame or a connection was refused. `kind` is one of few words, and the label of a metric."""
    on_resent: Callable[[int], None] = _ignore
    """(count): messages were sent again."""
    on_reset: Callable[[str], None] = _ignore
    """(peer incarnation): the conversation begins anew, and earlier agreements are void. On a client: the server was restarted or
    has forgotten us, and we introduce ourselves again. On a server: a known client had given us up."""
    on_cut: Callable[[], None] = _ignore
    """On a client: the connection has ended, or none could be made. `Link.cut_s` counts from here."""
    on_met: Callable[[str], object] = _ignore
    """(incarnation of the server that answers): on a client, once, before the conversation begins. The call may close the
    client."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The configuration of links to peers."""

    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    max_connections: int = 1_024
    """The most connections of a server, and of all clients together, with those that have not proved their identity."""
    handshake_s: float = 10.0
    """The time within which a connection has to prove an identity, or it is closed."""


class Link:
    """A numbered conversation with one peer. `peer` is its incarnation, empty before its first frame on this link."""

    def __init__(self, owner: PeerEnd, number: int, peer: str = "", user: str = "") -> None:
        self.number = number
        self.peer = peer
        self.user = user
        """The CURVE public key that the peer proved to own, empty without keys."""
        self.route = b""
        self.heard_at_s = -math.inf
        self.cut_at_s = math.inf
        """Monotonic time at which the connection to the peer ended; infinity while none is known to have ended."""
        self.closed = False
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox[tuple[PeerMessage, bytes]] = Outbox(owner.settings.delivery)
        """Messages, each with the body of its frame."""
        self._inbox = Inbox()
        self._timer: asyncio.TimerHandle | None = None
        self._ack_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Link {self.number} with {self.peer or 'nobody yet'}: {self._outbox!r}, {self._inbox!r}>"

    @property
    def silent_s(self) -> float:
        """Seconds since the last valid frame of the peer; infinity before the first."""
        return monotonic() - self.heard_at_s

    @property
    def cut_s(self) -> float:
        """Seconds without a connection to the peer; 0 while there is one."""
        return max(0.0, monotonic() - self.cut_at_s)

    @property
    def unacknowledged(self) -> int:
        """Messages that the peer has not acknowledged, sent or waiting."""
        return len(self._outbox)

    def send(self, message: PeerMessage) -> None:
        """Deliver reliably; a Heartbeat goes out once and is forgotten. Raises CapacityError, InvalidInputError."""
        body = PEER.encode_body(message)
        if isinstance(message, Heartbeat):
            self._transmit(0, body)
            return
        self._outbox.post((message, body), now_s=monotonic())
        self._send_new()

    def take(self, envelope: Envelope[PeerMessage]) -> None:
        """Handle an envelope of this link. Raises ProtocolError for an envelope that no correct peer sends."""
        self.heard_at_s = monotonic()
        self.cut_at_s = math.inf
        self._outbox.acknowledge(envelope.acknowledged, now_s=self.heard_at_s)
        message, sequence = envelope.body, envelope.sequence
        if message is not None and sequence == 0 and not isinstance(message, Heartbeat):
            raise ProtocolError(f"a {type(message).__name__} came without a sequence number")
        is_new = message is not None and (sequence == 0 or self._is_next(sequence))
        self._send_new()
        if is_new and message is not None:
            try:
                self._owner.callbacks.on_message(self.peer, message)
            except BridgeError as error:
                self._owner.callbacks.on_refused(error.code, f"{type(message).__name__} of {self.peer}: {error}")
        self._owe()

    def cut(self) -> None:
        """Note that there is no connection to the peer."""
        if self.cut_at_s == math.inf and not self.closed:
            self.cut_at_s = monotonic()
            self._owner.callbacks.on_cut()

    def retry(self) -> None:
        """Tell the peer of a new connection, and send all unacknowledged messages again at once."""
        if self.peer:
            self._transmit(0, b"")
        self._outbox.resend_now(monotonic())
        self._work()

    def close(self, *, report: bool = True) -> None:
        """Acknowledge a last time, end the conversation, and report undelivered messages. Harmless when closed."""
        self._acknowledge()
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for (message, _), age_s in self._outbox.abandon(monotonic()):
            if report:
                self._owner.callbacks.on_undelivered(self.peer, message, age_s)

    def _is_next(self, sequence: int) -> bool:
        arrival = self._inbox.accept(sequence)
        if arrival is not Arrival.NEW:
            text = f"message {sequence} of {self.peer} ({self._inbox!r}); harmless unless it goes on"
            self._owner.callbacks.on_refused(Refusal(arrival), text)
        return arrival is Arrival.NEW

    def _send_new(self) -> None:
        for sequence, (_, body) in self._outbox.take_new(monotonic()):
            self._transmit(sequence, body)
        wake_at_s = self._outbox.wake_at_s
        if self._timer is None and wake_at_s < math.inf and not self.closed:
            delay_s = max(0.0, wake_at_s - monotonic()) + _TIMER_SLACK_S
            self._timer = self._loop.call_later(delay_s, self._work, context=Context())  # on nobody's behalf

    def _transmit(self, sequence: int, body: bytes) -> None:
        envelope: Envelope[PeerMessage] = Envelope(
            self._owner.identity.incarnation, self.peer, self.number, sequence, self._inbox.acknowledged()
        )
        if self._owner.put(self, PEER.encode(envelope, body)):
            self.cut_at_s = math.inf
        elif self.peer:  # else the first connection is still being made
            self.cut()

    def _owe(self) -> None:
        """Acknowledge soon, unless a message that goes out before carries the acknowledgement."""
        if not self._inbox.owed or self.closed:
            return
        delivery = self._owner.settings.delivery
        if self._inbox.owed >= delivery.window // _ACK_AT_ONCE_PART:
            self._acknowledge()
        elif self._ack_timer is None:
            delay_s = min(_ACK_DELAY_S, delivery.resend_first_s / 2)
            self._ack_timer = self._loop.call_later(delay_s, self._acknowledge, context=Context())

    def _acknowledge(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._inbox.owed and not self.closed:
            self._transmit(0, b"")

    def _work(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = monotonic()
        if now_s >= self._outbox.gives_up_at_s:
            self._owner.on_over(self)
            return
        due = self._outbox.take_due(now_s)
        for sequence, (_, body) in due:
            self._transmit(sequence, body)
        if due:
            self._owner.callbacks.on_resent(len(due))
        self._send_new()
