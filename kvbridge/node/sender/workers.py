"""What the rank workers of a prefill node say about its rooms."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import Rank
from kvbridge.core.plan.digest_sums import DigestSums
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.hearing import Meaning
from kvbridge.core.session.sender import SenderState
from kvbridge.core.wire.messages import Digests, Done, PathLost
from kvbridge.core.wire.worker_messages import Digested, Rerouted, RoomClosed, Sent
from kvbridge.node.driver import WORKER_GONE, RoomDriver
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.room import Quarantine, slowest
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.orders import Orders
from kvbridge.node.sender.room import FromRank, RankWork, SenderRoom
from kvbridge.telemetry.path_events import RoomRerouted
from kvbridge.tier.keys import Keys


@dataclass(frozen=True, slots=True)
class SenderWorkers:
    """Called from the event loop's thread only."""

    rooms: RoomBook[SenderRoom]
    driver: RoomDriver[SenderRoom]
    hearing: RoomHearing[SenderRoom]
    pages: RoomPages
    orders: Orders
    nodes: DecodeNodes
    clock: Clock

    def settle(self, room: SenderRoom) -> None:
        """Say Done for every rank that has nothing left to do; when all have, the room is complete."""
        if room.state is not SenderState.SENDING or not room.open_ranks:
            return
        for rank, work in room.ranks.items():
            if not work.finished or work.done or work.outstanding:
                continue
            work.done = True
            room.amounts = add_amounts(room.amounts, work.amounts)
            slowest(room.phases_s, work.phases_s)
            done = Done(
                room=room.room,
                generation=room.generation,
                writer=rank,
                amounts=work.amounts,
                phases_s=work.phases_s,
                metadata=work.metadata,
                digest_parts=self._tell_digests(room, rank, work),
                transport=work.transport,
                keys_digest=room.keys.digest,
                end_key=work.end_key if room.keys else b"",
                under_way_ago_s=work.under_way_ago_s(self.clock()),
            )
            self.nodes.send(room.peer, done)
        self.driver.advance(room)

    def _tell_digests(self, room: SenderRoom, rank: Rank, work: RankWork) -> int:
        """Say what a rank has sent, ahead of its Done; returns in how many parts."""
        parts = list(work.digests.parts()) if work.digests is not None else []
        for number, part in enumerate(parts):
            message = Digests(room=room.room, generation=room.generation, writer=rank, part=number, digests=part)
            self.nodes.send(room.peer, message)
        return len(parts)

    def hear(self, message: FromRank) -> None:
        """Take what a rank worker says of a room as `SENDER_HEARS` has it, or refuse it."""
        room, meaning = self.hearing.look_up("", message, kind=message.type)
        if room is None or meaning is None:
            return
        work = room.ranks[message.rank]
        match message:
            case Digested():
                self._digested(room, work, message)
            case Sent():
                self._sent(room, work, message)
            case Rerouted():
                self._rerouted(room, work, message, tell=meaning is Meaning.TAKE)
            case RoomClosed() if not message.quiet:
                self.pages.quarantine(room, Quarantine.NOT_QUIET, f"rank {message.rank}: {message.reason}")
            case RoomClosed():
                self.orders.closed(room, message.rank)
                self.driver.advance(room)

    def _digested(self, room: SenderRoom, work: RankWork, message: Digested) -> None:
        """A worker has computed digests over what an order sends."""
        if work.digests is None:
            prompt, prefix = room.prompt_tokens, room.prefix_tokens
            work.digests = DigestSums.of_room(self.pages.settings.geometry, prompt_tokens=prompt, prefix_tokens=prefix)
        try:
            work.digests.merge(message.digests)
        except BridgeError as error:
            self.driver.fail(room, error.code, f"rank {message.rank}: {error}")

    def _sent(self, room: SenderRoom, work: RankWork, message: Sent) -> None:
        """A worker ended an order."""
        self.orders.ended(room, message.rank, message.order, message)
        room.in_transit = room.in_transit or message.in_transit
        if message.error_code or not message.quiet:
            code = message.error_code or TransportError.code
            self.driver.fail(room, code, f"rank {message.rank}: {message.error}")
            return
        work.amounts = add_amounts(work.amounts, message.amounts)
        for phase, seconds in message.seconds.items():
            work.phases_s[phase] = work.phases_s.get(phase, 0.0) + seconds
        self.settle(room)

    def _rerouted(self, room: SenderRoom, work: RankWork, message: Rerouted, *, tell: bool) -> None:
        """A worker has lost a transport, and sends again over another one what that has not confirmed."""
        room.in_transit = room.in_transit or message.in_transit
        work.transport = "+".join(sorted({message.over, *filter(None, work.transport.split("+"))}))
        self.driver.facts.events.emit(
            RoomRerouted(**room.identity, rank=message.rank, lost=message.lost, over=message.over)
        )
        if message.in_transit and tell:
            lost = PathLost(
                room=room.room,
                generation=room.generation,
                writer=message.rank,
                transport=message.lost,
                epoch=message.epoch,
            )
            self.nodes.send(room.peer, lost)

    def gone(self, rank: Rank, reason: str) -> None:
        """A rank worker's process ended, and with it everything that it had in flight."""
        for room in self.rooms:
            work = room.ranks.get(rank)
            if work is None:
                continue
            room.in_transit = room.in_transit or bool(work.outstanding)
            self.orders.closed(room, rank)
            room.keys = Keys()  # what it has written may be gone with the worker: nothing of it stays
            why = f"rank worker {rank} of the prefill node died: {reason}"
            self.driver.fail(room, WORKER_GONE, why)
