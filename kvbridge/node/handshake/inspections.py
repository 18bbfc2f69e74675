"""Checks of introductions that take too long for the event loop, and the order of what a peer says meanwhile.

A check runs elsewhere, and its end is heard on the loop. What its peer says until then waits, so that everything is dealt with in
the order in which it was said: an offer that follows changed memory is never checked against the old one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import CapacityError, DeadlineError, PeerError
from kvbridge.core.wire.messages import Hello, Offer, PeerMessage

MOST_MESSAGES = 1_024
MOST_PEER_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""What may wait for the inspection of one peer, and of all: messages, and the bytes that they take."""
MESSAGE_BYTES = 4_096
"""What a message takes beside its page tables or packed ranks."""

Work = Callable[[Callable[[], None]], None]
"""Is called off the loop, with a function to call now and then: it raises when nobody waits for the end of the work any more."""
Ended = Callable[[BaseException | None], None]
Executor = Callable[[Callable[[], None], Ended], None]
"""Calls the first off the loop, each after the one before it, and the second on the loop with what the first has raised."""


@dataclass(eq=False)
class _Inspection:
    work: Work | None
    """None once it is dropped: what is queued elsewhere then holds nothing."""
    ended: Ended
    expires_s: float
    bytes: int
    waiting: deque[PeerMessage] = field(default_factory=deque)


class Inspections:
    """At most one inspection of each peer. Called from the event loop's thread only."""

    def __init__(
        self,
        execute: Executor,
        *,
        limit_s: float,
        clock: Clock = monotonic,
    ) -> None:
        """`limit_s`: `timeouts.handshake_s`."""
        self._execute = execute
        self._deliver: Callable[[str, PeerMessage], None]
        self._limit_s = limit_s
        self._clock = clock
        self._running: dict[str, _Inspection] = {}

    def deliver_to(self, deliver: Callable[[str, PeerMessage], None]) -> None:
        """Say who takes what has waited, in its order, and never raises; before anything is inspected."""
        self._deliver = deliver

    def __contains__(self, peer: str) -> bool:
        return peer in self._running

    def begin(self, peer: str, hello: Hello, work: Work, ended: Ended) -> None:
        """Inspect what a peer says of itself. `ended` hears the end, unless the peer is dropped. Raises CapacityError."""
        inspection = _Inspection(work, ended, self._clock() + self._limit_s, 0)
        self._account(inspection, hello)
        self._running[peer] = inspection
        self._execute(partial(self._run, inspection), partial(self._ended, peer, inspection))

    def hold(self, peer: str, message: PeerMessage) -> None:
        """Let what a peer says while it is inspected wait. Raises CapacityError."""
        inspection = self._running[peer]
        self._account(inspection, message)
        inspection.waiting.append(message)

    def _account(self, inspection: _Inspection, message: PeerMessage) -> None:
        inspection.bytes += _size_bytes(message)
        of_others = sum(other.bytes for other in self._running.values() if other is not inspection)
        if (
            len(inspection.waiting) >= MOST_MESSAGES
            or inspection.bytes > MOST_PEER_BYTES
            or of_others + inspection.bytes > MOST_BYTES
        ):
            raise CapacityError("too much waits for introductions to be checked; try again shortly")

    def drop(self, peer: str) -> None:
        """Forget a peer, and what it has said since its inspection began."""
        inspection = self._running.pop(peer, None)
        if inspection is not None:
            inspection.work = None

    def close(self) -> None:
        """Forget every peer."""
        for peer in list(self._running):
            self.drop(peer)

    def _run(self, inspection: _Inspection) -> None:
        work = inspection.work
        if work is not None:
            work(partial(self._require_wanted, inspection))

    def _require_wanted(self, inspection: _Inspection) -> None:
        if inspection.work is None:
            raise PeerError("the peer was given up while its introduction was checked")
        if self._clock() > inspection.expires_s:
            raise DeadlineError(
                f"its introduction could not be checked within {self._limit_s:g} s (timeouts.handshake_s): this node is too "
                "busy, or it names too much memory"
            )

    def _ended(self, peer: str, inspection: _Inspection, error: BaseException | None) -> None:
        if self._running.get(peer) is not inspection:
            return
        del self._running[peer]
        inspection.ended(error)
        while inspection.waiting:
            again = self._running.get(peer)
            if again is not None:  # one of those that waited was another introduction: the rest waits for that
                again.waiting.extend(inspection.waiting)
                again.bytes += sum(map(_size_bytes, inspection.waiting))
                return
            self._deliver(peer, inspection.waiting.popleft())


def _size_bytes(message: PeerMessage) -> int:
    match message:
        case Offer():
            return MESSAGE_BYTES + sum(len(table.ids) for table in message.tables)
        case Hello():
            return MESSAGE_BYTES + sum(map(len, message.node.ranks))
        case _:
            return MESSAGE_BYTES
