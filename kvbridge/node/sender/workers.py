"""What the rank workers of a prefill node say about its rooms.

Owns: what it means for a room. Must not know: processes, what workers are told (`orders`), what a transition leads to.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import Rank
from kvbridge.core.plan.digest_sums import DigestSums
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.wire.worker_messages import Digested, RoomClosed, Sent
from kvbridge.node.driver import WORKER_GONE, RoomDriver
from kvbridge.node.room import Quarantine
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.orders import Completion, Orders
from kvbridge.node.sender.room import RankWork, SenderRoom


@dataclass(frozen=True, slots=True)
class SenderWorkers:
    """Called from the event loop's thread only."""

    rooms: RoomBook[SenderRoom]
    driver: RoomDriver[SenderRoom]
    pages: RoomPages
    orders: Orders
    completion: Completion

    def _rank_work(self, message: Digested | Sent | RoomClosed) -> tuple[SenderRoom | None, RankWork | None]:
        """What a worker speaks of, unless that is forgotten."""
        room = self.rooms.find(message.room, message.generation)
        return room, None if room is None else room.ranks.get(message.rank)

    def digested(self, message: Digested) -> None:
        """A worker has computed digests over what an order sends."""
        room, work = self._rank_work(message)
        if room is None or work is None or message.order not in work.outstanding:
            return
        if work.digests is None:
            prompt, prefix = room.prompt_tokens, room.prefix_tokens
            work.digests = DigestSums.of_room(self.pages.settings.geometry, prompt_tokens=prompt, prefix_tokens=prefix)
        try:
            work.digests.merge(message.digests)
        except BridgeError as error:
            self.driver.fail(room, error.code, f"rank {message.rank}: {error}")

    def sent(self, message: Sent) -> None:
        """A worker ended an order."""
        room, work = self._rank_work(message)
        if room is None or work is None:
            return
        if not self.orders.ended(room, message.rank, message.order, message.amounts):
            return
        room.in_transit = room.in_transit or message.in_transit
        if message.error_code or not message.quiet:
            code = message.error_code or TransportError.code
            self.driver.fail(room, code, f"rank {message.rank}: {message.error}")
            return
        work.amounts = add_amounts(work.amounts, message.amounts)
        for phase, seconds in message.seconds.items():
            work.phases_s[phase] = work.phases_s.get(phase, 0.0) + seconds
        self.completion.settle(room)

    def room_closed(self, message: RoomClosed) -> None:
        """A worker proved that nothing of a room is in flight."""
        room, work = self._rank_work(message)
        if room is None or work is None:
            return
        if not message.quiet:
            self.pages.quarantine(room, Quarantine.NOT_QUIET, f"rank {message.rank}: {message.reason}")
            return
        self.orders.closed(room, message.rank)
        self.driver.advance(room)

    def gone(self, rank: Rank, reason: str) -> None:
        """A rank worker's process ended, and with it everything that it had in flight."""
        for room in self.rooms:
            work = room.ranks.get(rank)
            if work is None:
                continue
            room.in_transit = room.in_transit or bool(work.outstanding)
            self.orders.closed(room, rank)
            why = f"rank worker {rank} of the prefill node died: {reason}"
            self.driver.fail(room, WORKER_GONE, why)
