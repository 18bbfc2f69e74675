"""Orders to the rank workers of a prefill node, from a publication to Done."""

from __future__ import annotations

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.pages import further_tables, joined_tables
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.plan.digests import DigestSums
from kvbridge.core.plan.operations import Section, add_amounts
from kvbridge.core.session.prefill import PrefillState
from kvbridge.core.session.tables import Meaning
from kvbridge.core.wire.messages import Digests, Done, PathLost, to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, Digested, OpenRoom, Rerouted, RoomClosed, Send, Sent
from kvbridge.node.prefill.decode_nodes import DecodeNodes
from kvbridge.node.prefill.room import FromRank, PrefillRoom, RankWork
from kvbridge.node.room import Quarantine
from kvbridge.node.rooms import WORKER_GONE, Rooms
from kvbridge.telemetry.facts import OrderBegan, OrderEnded, RoomRerouted
from kvbridge.tier.keys import NO_KEYS

NOT_FINISHED = "not_finished"
"""Code of orders that ended because their room or their worker did."""


class SendingRooms(Rooms[PrefillRoom]):
    """The part of a prefill node's rooms that gives orders to its rank workers, and tells decode what was sent."""

    nodes: DecodeNodes
    _last_order = 0

    def open_room(self, room: PrefillRoom) -> None:
        """Tell the workers both ends of the room, once both are known, and order the published tokens that have no order yet."""
        if room.state is not PrefillState.SENDING or not room.tables:
            return
        if self.settings.part_of_instance and not room.begun:
            return  # the engines of all nodes agree first how much of its prefix it keeps
        if not any(work.open for work in room.ranks.values()):
            opening = OpenRoom(
                **room.about,
                peer=room.peer,
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
                source=to_wire(room.tables),
                destination=room.destination,
                digest=room.digest,
            )
            self.pages.lease(room)
            for rank, work in room.ranks.items():
                self.workers.send(rank, opening)
                work.open, work.further = True, {}
        for rank, work in room.ranks.items():
            sections = work.progress.next_sections(room.prefix_tokens)
            after = tuple(work.after)
            if sections:  # else a later order waits for the points
                work.after.clear()
            for section in sections:
                further, work.further = work.further, {}
                self._last_order += 1
                transport = self.nodes.transport(room.peer, rank)
                work.order_began(self._last_order, transport, self.clock())
                work.phases_s.setdefault("offer_to_order", self.clock() - room.offered_s)
                order = Send(
                    **room.about, order=self._last_order, section=section, source=to_wire(further), after=after
                )
                self.events.emit(OrderBegan(**room.identity, rank=rank, order=self._last_order, transport=transport))
                self.workers.send(rank, order)

    def take_pages(self, room: PrefillRoom, tables: Tables, *, cached_tokens: int = 0) -> None:
        """Adopted pools: book the room's new pages, and tell its workers of them with their next order.

        Raises ConflictError when a page of the room changes, and as PageBook.adopt does.
        """
        further = further_tables(room.tables, tables)
        if further:
            self.pages.adopt(room, further, cached_tokens=cached_tokens, written_by_peers=False)
        for work in room.ranks.values():
            work.further = joined_tables(work.further, further)

    def close_room(self, room: PrefillRoom) -> None:
        """Tell the workers to stop, or that everything was sent."""
        all_sent = room.state is PrefillState.COMPLETED
        for rank in room.open_ranks:
            self.workers.send(rank, CloseRoom(**room.about, all_sent=all_sent))
            room.ranks[rank].open = not all_sent

    # ------------------------------------------------------------------ messages of rank workers

    def hear_rank(self, message: FromRank) -> None:
        """Take a rank worker's message about a room as `PREFILL_HEARS` lists it, or refuse it."""
        room, meaning = self.look_up("", message)
        if room is None or meaning is None:
            return
        work = room.ranks[message.rank]
        match message:
            case Digested():
                try:
                    if work.digests is None:
                        prompt, prefix = room.prompt_tokens, room.prefix_tokens
                        whole = Section(prompt_tokens=prompt, prefix_tokens=prefix, start_token=0, stop_token=prompt)
                        work.digests = DigestSums(self.geometry, whole)
                    work.digests.merge(message.digests)
                except BridgeError as error:
                    self.fail(room, error.code, f"rank {message.rank}: {error}")
            case Sent():
                self._sent(room, work, message)
            case Rerouted():
                self._rerouted(room, work, message, tell=meaning is Meaning.TAKE)
            case RoomClosed() if not message.quiet:
                self.pages.quarantine(room, Quarantine.NOT_QUIET, f"rank {message.rank}: {message.reason}")
            case RoomClosed():
                self._closed(room, message.rank)
                self.advance(room)

    def _sent(self, room: PrefillRoom, work: RankWork, message: Sent) -> None:
        self._ended(room, message.rank, message.order, message)
        room.in_transit = room.in_transit or message.in_transit
        if message.error_code or not message.quiet:
            code = message.error_code or TransportError.code
            self.fail(room, code, f"rank {message.rank}: {message.error}")
            return
        work.amounts = add_amounts(work.amounts, message.amounts)
        for phase, seconds in message.seconds.items():
            work.phases_s[phase] = work.phases_s.get(phase, 0.0) + seconds
        self.settle(room)

    def _rerouted(self, room: PrefillRoom, work: RankWork, message: Rerouted, *, tell: bool) -> None:
        """Note that a worker has lost a transport: it sends the unconfirmed rows again over another one."""
        room.in_transit = room.in_transit or message.in_transit
        work.transport = "+".join(sorted({message.over, *filter(None, work.transport.split("+"))}))
        self.events.emit(RoomRerouted(**room.identity, rank=message.rank, lost=message.lost, over=message.over))
        if message.in_transit and tell:
            lost = PathLost(**room.about, writer=message.rank, transport=message.lost, epoch=message.epoch)
            self.nodes.send(room.peer, lost)

    def _ended(self, room: PrefillRoom, rank: Rank, order: int, sent: Sent | None) -> None:
        """Note the end of an order: its worker says so, or its room or its worker has ended (None)."""
        transport = room.ranks[rank].order_ended(order, self.clock())
        if transport is not None:
            about = {**room.identity, "rank": rank, "order": order, "transport": transport}
            amounts, seconds, code = (
                ({}, {}, NOT_FINISHED) if sent is None else (sent.amounts, sent.seconds, sent.error_code)
            )
            self.events.emit(OrderEnded(**about, amounts=amounts, seconds=seconds, code=code))

    def _closed(self, room: PrefillRoom, rank: Rank) -> None:
        """Note that nothing of the room is in flight on a rank, by the proof of its worker or the end of that process."""
        work = room.ranks[rank]
        for order in tuple(work.outstanding):
            self._ended(room, rank, order, None)
        work.open = False

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Fail the rooms of a rank worker whose process has ended, and with it everything that it had in flight."""
        for room in self.book:
            work = room.ranks.get(rank)
            if work is None:
                continue
            room.in_transit = room.in_transit or bool(work.outstanding)
            self._closed(room, rank)
            room.keys = NO_KEYS  # the worker's memory may be gone: nothing of the room is cached
            self.fail(room, WORKER_GONE, f"rank worker {rank} of the prefill node died: {reason}")

    def settle(self, room: PrefillRoom) -> None:
        """Say Done for every rank that has nothing left to do; when all have, the room is complete."""
        if room.state is not PrefillState.SENDING or not room.open_ranks:
            return
        now_s = self.clock()
        for rank, work in room.ranks.items():
            if not work.finished or work.done or work.outstanding:
                continue
            work.done = True
            room.amounts = add_amounts(room.amounts, work.amounts)
            room.add_phases(work.phases_s)
            about = {**room.about, "writer": rank}
            parts = list(work.digests.parts()) if work.digests is not None else []
            for number, part in enumerate(parts):
                self.nodes.send(room.peer, Digests(**about, part=number, digests=part))
            done = Done(
                **about,
                amounts=work.amounts,
                phases_s=work.phases_s,
                metadata=work.metadata,
                digest_parts=len(parts),
                transport=work.transport,
                keys_digest=room.keys.digest,
                end_key=work.end_key if room.keys else b"",
                under_way_ago_s=tuple((now_s - began_s, now_s - ended_s) for began_s, ended_s in work.under_way_s),
            )
            self.nodes.send(room.peer, done)
        self.advance(room)
