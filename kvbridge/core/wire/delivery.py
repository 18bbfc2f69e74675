"""Reliable delivery over a channel that loses, doubles, delays and reorders.

One `Outbox` and one `Inbox` are one direction's two ends; both live as long as their link and are thrown away with
it. The promise: every posted message is delivered exactly once and in order, or reported undelivered. "Undelivered"
means that no acknowledgement came in time; the message may nevertheless have arrived. The sender gives up, not the
receiver: each frame carries the sender's *floor*, below which nothing will come any more, so a message that was given
up never blocks the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from kvbridge.core.errors import CapacityError, IntegrityError, ProtocolError
from kvbridge.core.wire.codec import MAX_SELECTIVE_ACKS, Acks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """How patiently and how much at once. Both ends of a link should use the same `window`."""

    resend_first_s: float = 0.05
    resend_most_s: float = 1.0
    """The wait before a resend doubles from `resend_first_s`, or from twice the usual wait for an acknowledgement if
    that is longer, up to this: a slow peer must not be made slower by resends.
    """
    give_up_s: float = 30.0
    window: int = 512
    """Messages that may be on their way at once; further ones wait in the outbox."""
    early_bytes: int = 16 << 20
    """Bytes of messages that came before their turn and are held for it; more of them are dropped, and sent again."""
    max_held: int = 8_192
    """Messages, on their way or waiting, that an outbox holds before `post` refuses."""


class Outgoing(NamedTuple, Generic[T]):
    """A message to send, with its sequence number."""

    sequence: int
    message: T


class Undelivered(NamedTuple, Generic[T]):
    """A message whose arrival was never acknowledged, and how long ago it was posted."""

    message: T
    age_s: float


@dataclass(slots=True, eq=False)
class _Held(Generic[T]):
    message: T
    posted_at_s: float
    give_up_at_s: float
    arrived: bool = False
    """Acknowledged out of order: not sent again, but not yet handed on either."""
    interval_s: float = 0.0
    resend_at_s: float = math.inf
    sent_at_s: float = math.inf


class Outbox(Generic[T]):
    """The sending end: holds every message until it is acknowledged or given up."""

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        self._held: dict[int, _Held[T]] = {}
        self._floor = 1
        self._next_unsent = 1
        self._next_sequence = 1
        self._round_trip_s = 0.0
        # Lower bounds, so that the common call looks at no message at all.
        self._resend_at_s = math.inf
        self._give_up_at_s = math.inf

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        sent = min(self._next_unsent, self._next_sequence) - self._floor
        return f"<Outbox {len(self._held)} held, floor {self._floor}, at most {sent} on their way>"

    @property
    def floor(self) -> int:
        """The lowest sequence number still offered; one more than the last posted when none is."""
        return self._floor

    @property
    def wake_at_s(self) -> float:
        """When `take_due` or `take_expired` may next have something, or infinity. Can be early, never late."""
        return min(self._resend_at_s, self._give_up_at_s)

    def post(self, message: T, *, now_s: float, give_up_s: float | None = None) -> None:
        """Accept a message for delivery within `give_up_s` (default: the settings'). Raises CapacityError when full."""
        if len(self._held) >= self._settings.max_held:
            raise CapacityError(
                f"{len(self._held)} messages wait for a peer that acknowledges none of them: "
                "it hangs or cannot be reached"
            )
        give_up_at_s = now_s + (self._settings.give_up_s if give_up_s is None else give_up_s)
        self._held[self._next_sequence] = _Held(message, now_s, give_up_at_s)
        self._next_sequence += 1
        self._give_up_at_s = min(self._give_up_at_s, give_up_at_s)

    def take_new(self, now_s: float) -> list[Outgoing[T]]:
        """Return what is to be sent for the first time now, in order: posted messages, as far as the window allows."""
        messages = []
        stop = min(self._next_sequence, self._floor + self._settings.window)
        while self._next_unsent < stop:
            held = self._held.get(self._next_unsent)
            if held is not None:
                held.sent_at_s = now_s
                self._schedule(held, now_s, self._longer(0.0))
                messages.append(Outgoing(self._next_unsent, held.message))
            self._next_unsent += 1
        return messages

    def take_due(self, now_s: float) -> list[Outgoing[T]]:
        """Return what is to be sent again now, in order."""
        if now_s < self._resend_at_s:
            return []
        self._resend_at_s = math.inf
        messages = []
        for sequence, held in self._held.items():
            if held.resend_at_s <= now_s:
                self._schedule(held, now_s, self._longer(held.interval_s))
                messages.append(Outgoing(sequence, held.message))
            self._resend_at_s = min(self._resend_at_s, held.resend_at_s)
        return messages

    def take_expired(self, now_s: float) -> list[Undelivered[T]]:
        """Give up what is past its deadline and return it. The floor moves on with the next frame."""
        if now_s < self._give_up_at_s:
            return []
        expired = [sequence for sequence, held in self._held.items() if held.give_up_at_s <= now_s]
        undelivered = [self._undelivered(self._held.pop(sequence), now_s) for sequence in expired]
        self._give_up_at_s = min((held.give_up_at_s for held in self._held.values()), default=math.inf)
        self._settle()
        lowest = self._held.get(self._floor)
        if expired and lowest is not None and lowest.arrived:
            # The peer has it but waits for what was given up: sent again, it carries the new floor.
            lowest.arrived = False
            self._schedule(lowest, now_s, 0.0)
        return undelivered

    def acknowledge(self, acks: Acks, *, now_s: float) -> None:
        """Forget what the peer has. Raises ProtocolError, changing nothing, when it claims what was never sent."""
        claimed = max((acks.upto, *acks.beyond))
        if claimed >= self._next_unsent:
            raise ProtocolError(f"message {claimed} is acknowledged, but only {self._next_unsent - 1} were sent")
        for sequence in range(self._floor, acks.upto + 1):
            last = self._held.pop(sequence, None)
            if last is not None and sequence == acks.upto:
                self._observe_round_trip(now_s - last.sent_at_s)
        for sequence in acks.beyond:
            held = self._held.get(sequence)
            if held is not None:
                held.arrived = True
                held.resend_at_s = math.inf
        self._settle()

    def resend_now(self, now_s: float) -> None:
        """Make every message that is sent and not acknowledged due now: the connection to the peer stands again."""
        for sequence, held in self._held.items():
            if sequence < self._next_unsent and not held.arrived:
                self._schedule(held, now_s, 0.0)

    def abandon(self, now_s: float) -> list[Undelivered[T]]:
        """The link is over: empty the outbox and return all that was in it, in order."""
        undelivered = [self._undelivered(held, now_s) for held in self._held.values()]
        self._held.clear()
        self._settle()
        return undelivered

    def check_integrity(self) -> None:
        """Raise IntegrityError when the outbox contradicts itself."""
        sequences = list(self._held)
        if sequences != sorted(sequences) or len(sequences) > self._settings.max_held:
            raise IntegrityError(f"{self!r}: messages are out of order or too many")
        if sequences and (sequences[0] != self._floor or sequences[-1] >= self._next_sequence):
            raise IntegrityError(f"{self!r}: the floor is not the lowest held message ({sequences[0]})")
        if not sequences and self._floor != self._next_sequence:
            raise IntegrityError(
                f"{self!r}: nothing is held, yet the floor is not the next message ({self._next_sequence})"
            )
        if any(
            held.resend_at_s < self._resend_at_s or held.give_up_at_s < self._give_up_at_s
            for held in self._held.values()
        ):
            raise IntegrityError(f"{self!r}: a timer would come too late")

    def _schedule(self, held: _Held[T], now_s: float, interval_s: float) -> None:
        held.interval_s = interval_s
        held.resend_at_s = now_s + interval_s
        self._resend_at_s = min(self._resend_at_s, held.resend_at_s)

    def _longer(self, interval_s: float) -> float:
        shortest_s = max(self._settings.resend_first_s, 2 * self._round_trip_s)
        return min(max(2 * interval_s, shortest_s), self._settings.resend_most_s)

    def _observe_round_trip(self, seconds: float) -> None:
        # From the first time that the message was sent: too long after a loss, but never too short.
        sample_s = min(seconds, self._settings.resend_most_s)
        self._round_trip_s += (sample_s - self._round_trip_s) / 8

    def _settle(self) -> None:
        while self._floor < self._next_sequence and self._floor not in self._held:
            self._floor += 1
        self._next_unsent = max(self._next_unsent, self._floor)
        if not self._held:
            self._resend_at_s = self._give_up_at_s = math.inf

    @staticmethod
    def _undelivered(held: _Held[T], now_s: float) -> Undelivered[T]:
        return Undelivered(held.message, now_s - held.posted_at_s)


class Receipt(NamedTuple, Generic[T]):
    """What came of one arrival. `ready` can also hold earlier arrivals that it, or its floor, set free."""

    verdict: Literal["new", "duplicate", "beyond_window"]
    ready: list[T]


class Inbox(Generic[T]):
    """The receiving end: puts arrivals in order, drops doubles, knows what to acknowledge."""

    def __init__(self, settings: DeliverySettings) -> None:
        self._window = settings.window
        self._early_limit_bytes = settings.early_bytes
        self._early: dict[int, tuple[T, int]] = {}
        """Messages that came before their turn, and their sizes."""
        self._early_bytes = 0
        self._next = 1
        self._owed = 0

    def __len__(self) -> int:
        return len(self._early)

    def __repr__(self) -> str:
        return f"<Inbox waits for {self._next}, {len(self._early)} came early, {self._owed} arrivals unacknowledged>"

    @property
    def owed(self) -> int:
        """Arrivals since the last `acks`; nonzero means that the peer waits for an acknowledgement."""
        return self._owed

    def accept(self, sequence: int, message: T, *, floor: int, size_bytes: int = 0) -> Receipt[T]:
        """Take an arrival; `ready` are the messages that can be handed on now, in order, each exactly once.

        What lies beyond the window, or came early when too much has, is dropped unacknowledged: the sender will come
        back with it. What is due is always taken, so that holds nothing up for ever.
        """
        ready = self._raise_floor(min(floor, sequence))
        if sequence < self._next or sequence in self._early:
            self._owed += 1
            return Receipt("duplicate", ready)
        too_much = sequence > self._next and self._early_bytes + size_bytes > self._early_limit_bytes
        if sequence >= self._next + self._window or too_much:
            return Receipt("beyond_window", ready)
        self._owed += 1
        if sequence == self._next and not self._early:
            self._next += 1
            ready.append(message)
            return Receipt("new", ready)
        self._early[sequence] = message, size_bytes
        self._early_bytes += size_bytes
        ready += self._take_consecutive()
        return Receipt("new", ready)

    def acks(self) -> Acks:
        """What to tell the sender; clears `owed`."""
        self._owed = 0
        if not self._early:
            return Acks(self._next - 1)
        return Acks(self._next - 1, tuple(sorted(self._early)[:MAX_SELECTIVE_ACKS]))

    def check_integrity(self) -> None:
        """Raise IntegrityError when the inbox contradicts itself."""
        if any(not self._next < sequence < self._next + self._window for sequence in self._early):
            raise IntegrityError(f"{self!r}: holds a message outside of its window")
        if self._early_bytes != sum(size for _, size in self._early.values()):
            raise IntegrityError(f"{self!r}: has lost count of the bytes that it holds")

    def _raise_floor(self, floor: int) -> list[T]:
        if floor <= self._next:
            return []
        # What came early and lies below was given up, and reported so, by its sender: too late to hand it on.
        for sequence in [sequence for sequence in self._early if sequence < floor]:
            self._early_bytes -= self._early.pop(sequence)[1]
        self._next = floor
        return self._take_consecutive()

    def _take_consecutive(self) -> list[T]:
        ready = []
        while self._next in self._early:
            message, size_bytes = self._early.pop(self._next)
            self._early_bytes -= size_bytes
            ready.append(message)
            self._next += 1
        return ready
