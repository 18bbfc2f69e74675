"""Reliable delivery in order over a channel that loses, doubles and reorders: go-back-N.

An `Outbox` and an `Inbox` are the two ends of one direction of a link. Every posted message is delivered once and in order, or
reported undelivered together with all later ones. An undelivered message was not acknowledged in time, and may have arrived. The
channel is a TCP connection, which loses hardly anything unless it breaks. Hence an inbox keeps nothing that comes before its turn,
an acknowledgement is one number, and an outbox sends again everything from the first message that is not acknowledged.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from kvbridge.core.errors import CapacityError, ProtocolError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """The patience and the size of an outbox. Both ends of a link should use the same `window`."""

    resend_first_s: float = 0.05
    resend_most_s: float = 1.0
    """The wait before a resend doubles from `resend_first_s` up to this, until the peer acknowledges something."""
    give_up_s: float = 30.0
    window: int = 512
    """Messages that may be on their way at once; later ones wait in the outbox."""
    max_held: int = 8_192
    """Messages, on their way or waiting, that an outbox holds at most."""


class Outbox(Generic[T]):
    """The sending end: holds every message until the peer acknowledges it. Messages go out as (sequence, message)."""

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        self._held: deque[tuple[T, float]] = deque()
        """Messages and when they were posted; the first `_on_their_way` of them have been sent."""
        self._on_their_way = 0
        self._first = 1
        """The sequence number of the first held message."""
        self._interval_s = settings.resend_first_s
        self._resend_at_s = math.inf

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<Outbox {len(self._held)} held from {self._first} on, {self._on_their_way} on their way>"

    @property
    def gives_up_at_s(self) -> float:
        """When the peer has to have acknowledged the oldest message; infinity when nothing is held."""
        return self._held[0][1] + self._settings.give_up_s if self._held else math.inf

    @property
    def wake_at_s(self) -> float:
        """When there is something to send again or to give up; infinity when nothing is held."""
        return min(self._resend_at_s, self.gives_up_at_s)

    def post(self, message: T, *, now_s: float) -> None:
        """Accept a message for delivery. Raises CapacityError when full."""
        if len(self._held) >= self._settings.max_held:
            raise CapacityError(
                f"{len(self._held)} messages wait for a peer that acknowledges none of them: "
                "it hangs or cannot be reached"
            )
        self._held.append((message, now_s))

    def take_new(self, now_s: float) -> list[tuple[int, T]]:
        """Return the messages to send for the first time now, in order, as far as the window allows."""
        start, self._on_their_way = self._on_their_way, min(len(self._held), self._settings.window)
        if self._resend_at_s == math.inf:
            self._plan_resend(now_s)
        return self._numbered(start)

    def take_due(self, now_s: float) -> list[tuple[int, T]]:
        """Return the messages to send again now, in order: all that are on their way."""
        if now_s < self._resend_at_s:
            return []
        self._resend_at_s = now_s + self._interval_s
        self._interval_s = min(2 * self._interval_s, self._settings.resend_most_s)
        return self._numbered(0)

    def acknowledge(self, upto: int, *, now_s: float) -> None:
        """Forget the messages up to `upto`. Raises ProtocolError, and changes nothing, for a number that was never sent."""
        last_sent = self._first + self._on_their_way - 1
        if upto > last_sent:
            raise ProtocolError(f"message {upto} is acknowledged, but only {last_sent} were sent")
        if upto < self._first:
            return
        for _ in range(upto + 1 - self._first):
            self._held.popleft()
        self._on_their_way = last_sent - upto
        self._first = upto + 1
        self._interval_s = self._settings.resend_first_s
        self._plan_resend(now_s)

    def resend_now(self, now_s: float) -> None:
        """Make every message that is on its way due now, after a reconnect."""
        self._interval_s = self._settings.resend_first_s
        if self._on_their_way:
            self._resend_at_s = now_s

    def abandon(self, now_s: float) -> list[tuple[T, float]]:
        """Empty the outbox of a link that is over. Return each message, in order, with its age in seconds."""
        undelivered = [(message, now_s - posted_s) for message, posted_s in self._held]
        self._first += len(self._held)
        self._held.clear()
        self._on_their_way, self._resend_at_s = 0, math.inf
        return undelivered

    def _numbered(self, start: int) -> list[tuple[int, T]]:
        sent = islice(self._held, start, self._on_their_way)
        return [(self._first + place, message) for place, (message, _) in enumerate(sent, start)]

    def _plan_resend(self, now_s: float) -> None:
        self._resend_at_s = now_s + self._interval_s if self._on_their_way else math.inf


class Arrival(StrEnum):
    """The judgement of an arrival."""

    NEW = "new"
    """The message is next: hand it on, once."""
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out_of_order"
    """An earlier message is missing: this one is dropped, and its sender sends both again."""


class Inbox:
    """The receiving end: takes messages in order and drops all others."""

    def __init__(self) -> None:
        self.upto = 0
        """The number of the last message that has been taken, which is the acknowledgement."""
        self.owed = 0
        """Arrivals since the last acknowledgement; nonzero means that the peer waits for one."""

    def __repr__(self) -> str:
        return f"<Inbox waits for {self.upto + 1}, {self.owed} arrivals unacknowledged>"

    def accept(self, sequence: int) -> Arrival:
        """Judge an arrival by its number, from 1."""
        self.owed += 1
        if sequence == self.upto + 1:
            self.upto = sequence
            return Arrival.NEW
        return Arrival.DUPLICATE if sequence <= self.upto else Arrival.OUT_OF_ORDER

    def acknowledged(self) -> int:
        """Return the acknowledgement to send now; nothing is owed afterwards."""
        self.owed = 0
        return self.upto
