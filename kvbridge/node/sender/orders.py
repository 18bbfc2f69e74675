"""What engines publish on a prefill node, and what rank workers are told to send of it."""

from __future__ import annotations

from kvbridge.core.clock import Clock
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.pages import tables_cover, tables_hold
from kvbridge.core.geometry.tables import further_tables, joined_tables, tables_from_wire
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.session.sender import SenderState
from kvbridge.core.wire.engine_messages import Publish
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, OpenRoom, Send, Sent
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.room import SenderPorts, SenderRoom
from kvbridge.telemetry.events import OrderBegan, OrderEnded

NOT_FINISHED = "not_finished"
"""Code of orders that ended because their room or their worker did."""


class Orders:
    """The orders of all rooms. Called from the event loop's thread only."""

    def __init__(self, ports: SenderPorts, rooms: RoomBook[SenderRoom], pages: RoomPages, clock: Clock) -> None:
        self._rooms = rooms
        self._ports = ports
        self._pages = pages
        self._clock = clock
        self._last = 0

    def open(self, room: SenderRoom) -> None:
        """Tell the workers both ends, once both are known, and order what has been published."""
        if room.state is not SenderState.SENDING or not room.tables:
            return
        if self._pages.settings.part_of_instance and not room.begun:
            return  # the engines of all nodes agree first how much of its prefix it keeps
        if not room.open_ranks:
            opening = OpenRoom(
                room=room.room,
                generation=room.generation,
                peer=room.peer,
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
                source=to_wire(room.tables),
                destination=room.destination,
                digest=room.digest,
            )
            self._pages.lease(room)
            for rank, work in room.ranks.items():
                self._ports.workers.send(rank, opening)
                work.open, work.further = True, {}
        self._flush(room)

    def publish(self, engine: AttachedEngine, message: Publish) -> None:
        """An engine has made tokens final on its ranks. See RankProgress.publish for what is refused."""
        room = self._rooms.used_by(engine.name, message.room)
        room.require_alive()
        room.require_begun(engine.name, engine.ranks)
        upto_token, layers = message.upto_token, message.layers
        chosen = {rank: room.ranks[rank].own_layers(layers) for rank in engine.ranks}
        unknown = sorted(set(layers or ()).difference(*(held or () for held in chosen.values())))
        if unknown:
            raise InvalidInputError(f"publish names layers {unknown}, which the ranks of this engine do not hold")
        for rank in engine.ranks:
            room.ranks[rank].progress.check(upto_token, chosen[rank])
        self._take_published(room, message)
        for rank in engine.ranks:
            room.ranks[rank].progress.publish(upto_token, chosen[rank])
            room.ranks[rank].note_point(message.after.get(str(rank)))
        self.open(room)

    def _take_published(self, room: SenderRoom, message: Publish) -> None:
        """Adopted pools: take further pages, and see that there is one for everything that is published."""
        geometry, tables = self._pages.settings.geometry, tables_from_wire(message.tables)
        if not self._pages.settings.adopted:
            if tables:
                raise InvalidInputError("this node owns its pools: `publish` takes no page tables")
            return
        together = joined_tables(room.tables, further_tables(room.tables, tables))
        if message.upto_token == room.prompt_tokens:
            tables_cover(together, geometry, tokens=room.prompt_tokens)
        else:
            tables_hold(together, geometry, tokens=message.upto_token)
        # What is final on all layers nobody writes any more: other rooms of the same prefix may name it as well.
        self.take_pages(room, tables, cached_tokens=message.upto_token if message.layers is None else 0)

    def take_pages(self, room: SenderRoom, tables: Tables, *, cached_tokens: int = 0) -> None:
        """Adopted pools: book the pages of a room that it has not yet, and let its workers know of them with their next order.

        Raises ConflictError for others than those that it has, and as PageBook.adopt does.
        """
        further = further_tables(room.tables, tables)
        if further:
            self._pages.adopt(room, further, cached_tokens=cached_tokens, written_by_peers=False)
        for work in room.ranks.values():
            work.further = joined_tables(work.further, further)

    def _flush(self, room: SenderRoom) -> None:
        """Order what has been published and not been ordered yet. The room is open at its workers."""
        for rank, work in room.ranks.items():
            sections = work.progress.next_sections(room.prefix_tokens)
            after = tuple(work.after)
            if sections:  # else a later order waits for them
                work.after.clear()
            for section in sections:
                further, work.further = work.further, {}
                self._last += 1
                transport = self._ports.nodes.transport(room.peer, rank)
                work.order_began(self._last, transport, self._clock())
                work.phases_s.setdefault("offer_to_order", self._clock() - room.offered_s)
                order = Send(
                    room=room.room,
                    generation=room.generation,
                    order=self._last,
                    section=section,
                    source=to_wire(further),
                    after=after,
                )
                self._ports.events.emit(OrderBegan(**room.identity, rank=rank, order=self._last, transport=transport))
                self._ports.workers.send(rank, order)

    def ended(self, room: SenderRoom, rank: Rank, order: int, sent: Sent | None) -> bool:
        """An order has ended as its worker says, or with its room or its worker (None); whether it was under way."""
        transport = room.ranks[rank].order_ended(order, self._clock())
        if transport is None:
            return False
        self._ports.events.emit(
            OrderEnded(
                **room.identity,
                rank=rank,
                order=order,
                transport=transport,
                amounts=sent.amounts if sent is not None else {},
                seconds=sent.seconds if sent is not None else {},
                code=sent.error_code if sent is not None else NOT_FINISHED,
            )
        )
        return True

    def close(self, room: SenderRoom) -> None:
        """Tell the workers to stop, or that everything was sent."""
        all_sent = room.state is SenderState.COMPLETED
        for rank in room.open_ranks:
            self._ports.workers.send(rank, CloseRoom(room=room.room, generation=room.generation, all_sent=all_sent))
            room.ranks[rank].open = not all_sent

    def closed(self, room: SenderRoom, rank: Rank) -> None:
        """Nothing of the room is in flight on a rank, whose worker has proved it or has ended."""
        work = room.ranks[rank]
        for order in tuple(work.outstanding):
            self.ended(room, rank, order, None)
        work.open = False
