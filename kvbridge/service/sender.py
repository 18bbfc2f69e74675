"""The prefill side at work: rooms whose pages an engine fills and rank workers send.

Owns: the rooms of a prefill node, what each rank has published and sent, offers that came before their room. Drives
`SENDER_TABLE`. Must not know: sockets, HTTP, addresses, how bytes move.

Source pages go back when two things are true: the table says that nothing of the room is in flight (FREE_SOURCE), and no engine
that has begun the room still writes it (it said finish or abort, or its process is gone).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import ConflictError, DeadlineError, InvalidInputError, NotReadyError, PeerError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import pages_needed, tables_cover
from kvbridge.core.ids import Rank, Role, Tables
from kvbridge.core.plan.operations import Amounts, add_amounts
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import (
    Abort,
    CloseRoom,
    Done,
    Drained,
    Failed,
    NodeToWorker,
    Offer,
    OpenRoom,
    PeerMessage,
    RoomClosed,
    Send,
    Sent,
    from_wire,
    to_wire,
)
from kvbridge.pool.book import PageBook, PageState
from kvbridge.service.observer import Observer
from kvbridge.service.ports import AdmissionRequest, RoomReport, RoomState
from kvbridge.service.rooms import Room, RoomBook, give_back
from kvbridge.service.tables import request_tables, same_tables

log = structlog.get_logger(__name__)

EARLY_OFFERS = 4_096
"""Offers kept for rooms that are not admitted yet; the oldest is answered as unknown when there are more."""


class SenderWorkers(Protocol):
    """The rank workers of the node."""

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""

    def missing(self) -> str:
        """Why not every rank can work now, or an empty text."""

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order; dropped when the worker is gone (its end is reported separately)."""


class PeerChannel(Protocol):
    """Reliable messages to peer nodes."""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message; what cannot be delivered in time is reported as the loss of the peer."""


class EngineEvents(Protocol):
    """The engines attached to this node."""

    def push(self, event: RoomEvent) -> None:
        """Tell every attached engine."""


@dataclass(frozen=True)
class SenderLimits:
    """The deadlines of the sending side, in seconds; each is a configuration key of the same name."""

    offer_s: float
    """`timeouts.offer_s`: an admitted room waits so long for the decode side."""
    room_s: float
    """`timeouts.room_s`: an offered room is sent completely within this time."""
    early_offer_s: float
    """`timeouts.early_offer_s`: an offer waits so long for its room to be admitted."""


@dataclass
class RankWork:
    """What one rank has done for one room."""

    progress: RankProgress
    engine: str = ""
    """The engine that began the room on this rank; empty before."""
    finished: bool = False
    metadata: bytes = b""
    outstanding: set[int] = field(default_factory=set)
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    done: bool = False
    open: bool = False
    """The worker has the room, and has not yet proved that it let it go."""


@dataclass
class SenderRoom(Room[SenderState]):
    """A room on the prefill side."""

    ranks: dict[Rank, RankWork] = field(default_factory=dict)
    peer: str = ""
    offer: Offer | None = None
    offered_s: float = 0.0
    writing: set[str] = field(default_factory=set)
    """Engines that may still write source pages."""
    free_wanted: bool = False
    freed: bool = False


_USER_STATE = {
    SenderState.SENDING: RoomState.TRANSFERRING,
    SenderState.FAILING: RoomState.FAILED,
}


def user_state(room: SenderRoom) -> RoomState:
    """What users see: a room that is failing has failed for them, whatever is still to be cleaned up."""
    return _USER_STATE.get(room.state) or RoomState(room.state.value)


class SenderService:
    """All rooms of a prefill node. Implements RoomsPort; called from the event loop's thread only."""

    def __init__(
        self,
        *,
        geometry: ModelGeometry,
        book: PageBook,
        workers: SenderWorkers,
        peers: PeerChannel,
        engines: EngineEvents,
        observer: Observer,
        limits: SenderLimits,
        keep_s: float,
        adopted: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        """`adopted`: the engine names its own pages in `begin`; otherwise pages are reserved at admission."""
        self._geometry = geometry
        self._book = book
        self._workers = workers
        self._peers = peers
        self._engines = engines
        self._observer = observer
        self._limits = limits
        self._adopted = adopted
        self._clock = clock
        self._orders = 0
        self._early: OrderedDict[tuple[int, int], tuple[float, str, Offer]] = OrderedDict()
        self.rooms: RoomBook[SenderRoom] = RoomBook(Role.PREFILL, user_state, clock=clock, keep_s=keep_s)

    # ------------------------------------------------------------------ admission (RoomsPort)

    async def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve source pages for a request. Raises CapacityError, ConflictError, InvalidInputError, NotReadyError."""
        return self.admit_now(request)

    def admit_now(self, request: AdmissionRequest) -> RoomReport:
        """`admit` without a loop: nothing in it waits."""
        missing = self._workers.missing()
        if missing:
            raise NotReadyError(f"this prefill daemon cannot admit a room now: {missing}")
        room_id = self.rooms.draw() if request.room is None else int(request.room)
        self.rooms.check_free(room_id, request.generation)
        if request.prefill:
            raise InvalidInputError("`prefill` is for the decode daemon; a prefill daemon sends to whoever offers the room")
        now_s = self._clock()
        room = SenderRoom(
            room=room_id,
            generation=request.generation,
            prompt_tokens=request.prompt_tokens,
            prefix_tokens=0,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            state=SENDER_TABLE.start,
            created_s=now_s,
            ranks={
                rank: RankWork(RankProgress(layers, prompt_tokens=request.prompt_tokens))
                for rank, layers in self._workers.layers.items()
            },
        )
        if not self._adopted:
            tokens = request.prompt_tokens
            demand = pages_needed(self._geometry, tokens=tokens, prompt_tokens=tokens)
            ids = self._book.reserve(room.owner, demand, state=PageState.HELD)
            room.tables = request_tables(self._geometry, ids, prompt_tokens=tokens)
        room.wait_until(now_s + self._limits.offer_s, "timeouts.offer_s")
        self.rooms.add(room)
        early = self._early.pop(room.owner, None)
        if early is not None:
            self._take_offer(room, early[1], early[2])
        return self.rooms.report(room)

    def report(self, room: int) -> RoomReport:
        """Raises UnknownRoomError."""
        return self.rooms.report(self.rooms.get(room))

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """See RoomsPort."""
        return await self.rooms.wait(room, timeout_s, until)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """See RoomsPort."""
        found = self.rooms.get(room)
        self._raise(found, SenderEvent.ABORT, "aborted", reason)
        return self.rooms.report(found)

    # ------------------------------------------------------------------ the engine's verbs

    def begin(self, engine: str, ranks: tuple[Rank, ...], room_id: int, *, prompt_tokens: int, tables: Tables) -> SenderRoom:
        """An engine starts to compute a room on its ranks. Raises ConflictError on a second begin."""
        room = self._alive(room_id)
        if prompt_tokens != room.prompt_tokens:
            raise InvalidInputError(
                f"room {room_id} was admitted with {room.prompt_tokens} prompt tokens, the engine begins it with {prompt_tokens}"
            )
        for rank in ranks:
            if room.ranks[rank].engine:
                raise ConflictError(f"room {room_id} was already begun on rank {rank} by engine {room.ranks[rank].engine}")
        self._take_tables(room, tables)
        for rank in ranks:
            room.ranks[rank].engine = engine
        room.writing.add(engine)
        room.phases_s.setdefault("admit_to_begin", self._clock() - room.created_s)
        self._open(room)
        return room

    def _take_tables(self, room: SenderRoom, tables: Tables) -> None:
        if not self._adopted:
            if tables:
                raise InvalidInputError("this node owns its pools: `begin` takes no page tables, it returns them")
            return
        if room.tables:
            if not same_tables(room.tables, tables):
                raise ConflictError(f"room {room.room} was begun with other page tables on another rank")
            return
        tables_cover(tables, self._geometry, tokens=room.prompt_tokens)
        self._book.adopt(room.owner, {space: table.ids for space, table in tables.items()})
        room.tables = tables

    def publish(
        self, engine: str, ranks: tuple[Rank, ...], room_id: int, *, upto_token: int, layers: tuple[int, ...] | None
    ) -> None:
        """An engine has made tokens final on its ranks. See RankProgress.publish for what is refused."""
        room = self._alive(room_id)
        mine = self._begun(room, engine, ranks)
        if layers is not None:
            held = {layer for rank in mine for layer in room.ranks[rank].progress.layers}
            unknown = sorted(set(layers) - held)
            if unknown:
                raise InvalidInputError(f"publish names layers {unknown}, which the ranks of this engine do not hold")
        for rank in mine:
            progress = room.ranks[rank].progress
            chosen = None if layers is None else tuple(layer for layer in layers if layer in progress.layers)
            progress.publish(upto_token, chosen)
        self._flush(room)

    def finish(self, engine: str, ranks: tuple[Rank, ...], room_id: int, *, metadata: bytes) -> None:
        """An engine has published everything; it does not write the room's pages any more."""
        room = self.rooms.get(room_id)
        if room.state in SENDER_TABLE.final or room.state in {SenderState.ABORTING, SenderState.FAILING}:
            self._let_go(room, engine)
            raise ConflictError(f"room {room_id} is over: {room.reason or room.state}")
        mine = self._begun(room, engine, ranks)
        for rank in mine:
            progress = room.ranks[rank].progress
            if not progress.complete:
                raise ConflictError(
                    f"room {room_id} cannot finish: rank {rank} has published {progress.published_tokens} of {room.prompt_tokens} tokens"
                )
        for rank in mine:
            room.ranks[rank].finished = True
            room.ranks[rank].metadata = metadata
        self._let_go(room, engine)
        self._settle(room)

    def abort(self, engine: str, room_id: int, reason: str) -> None:
        """An engine gives a room up; it does not write the room's pages any more. Harmless on an ended room."""
        room = self.rooms.get(room_id)
        self._raise(room, SenderEvent.ABORT, "aborted", f"by the prefill engine: {reason}")
        self._let_go(room, engine)

    def engine_gone(self, engine: str, reason: str) -> None:
        """An engine's process ended: what it had begun and not finished fails, and its pages are nobody's."""
        for room in self.rooms:
            unfinished = any(work.engine == engine and not work.finished for work in room.ranks.values())
            if unfinished and room.state not in SENDER_TABLE.final:
                self._raise(room, SenderEvent.FAULT, PeerError.code, f"the prefill engine {engine} is gone: {reason}")
            self._let_go(room, engine)

    def _alive(self, room_id: int) -> SenderRoom:
        room = self.rooms.get(room_id)
        if room.state not in {SenderState.ADMITTED, SenderState.SENDING}:
            raise ConflictError(f"room {room_id} is over: {room.reason or room.state}")
        return room

    @staticmethod
    def _begun(room: SenderRoom, engine: str, ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        mine = tuple(rank for rank in ranks if room.ranks[rank].engine == engine)
        if len(mine) != len(ranks):
            missing = next(rank for rank in ranks if rank not in mine)
            raise ConflictError(f"room {room.room} was not begun on rank {missing} by this engine")
        return mine

    def _let_go(self, room: SenderRoom, engine: str) -> None:
        room.writing.discard(engine)
        self._free_if_possible(room)

    # ------------------------------------------------------------------ peers

    def offer(self, peer: str, offer: Offer) -> None:
        """A decode node names the destination of a room, perhaps before the room is admitted here."""
        newest = self.rooms.newest_generation(offer.room)
        if offer.generation < newest:
            self._observer.refused("stale_offer")
            self._refuse_offer(peer, offer, "stale", f"generation {offer.generation} is older than {newest}")
            return
        room = self.rooms.find(offer.room, offer.generation)
        if room is None:
            self._early[offer.room, offer.generation] = (self._clock() + self._limits.early_offer_s, peer, offer)
            if len(self._early) > EARLY_OFFERS:
                _, (_, old_peer, old) = self._early.popitem(last=False)
                self._refuse_offer(old_peer, old, "unknown_room", "too many offers wait for rooms that are not admitted")
            return
        self._take_offer(room, peer, offer)

    def _take_offer(self, room: SenderRoom, peer: str, offer: Offer) -> None:
        if room.offer is not None and room.peer == peer and room.offer == offer:
            return  # sent again
        if room.state is not SenderState.ADMITTED:
            self._refuse_offer(peer, offer, room.reason_code or "conflict", room.reason or f"the room is already {room.state} on the prefill side")
            return
        if offer.prompt_tokens != room.prompt_tokens:
            reason = f"decode offers {offer.prompt_tokens} prompt tokens, prefill admitted {room.prompt_tokens}"
            self._refuse_offer(peer, offer, InvalidInputError.code, reason)
            self._raise(room, SenderEvent.FAULT, InvalidInputError.code, reason)
            return
        room.peer, room.offer, room.offered_s = peer, offer, self._clock()
        room.prefix_tokens = offer.prefix_tokens
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        room.wait_until(room.offered_s + self._limits.room_s, "timeouts.room_s")
        self._raise(room, SenderEvent.OFFER, "", "")

    def _refuse_offer(self, peer: str, offer: Offer, code: str, message: str) -> None:
        self._observer.refused(code)
        self._peers.send(peer, Failed(room=offer.room, generation=offer.generation, code=code, message=message))
        self._peers.send(peer, Drained(room=offer.room, generation=offer.generation))

    def peer_abort(self, peer: str, message: Abort) -> None:
        """The decode side wants a room stopped. Always answered with Drained, at once or when it is quiet."""
        self._early.pop((message.room, message.generation), None)
        room = self.rooms.find(message.room, message.generation)
        if room is None or (room.offer is not None and room.peer != peer):
            self._peers.send(peer, Drained(room=message.room, generation=message.generation))
            return
        if room.offer is None:
            # The offer itself never came: nothing can be in flight.
            self._peers.send(peer, Drained(room=message.room, generation=message.generation))
        self._raise(room, SenderEvent.ABORT, message.code, f"by the decode side: {message.message}")

    def peer_gone(self, peer: str, reason: str) -> None:
        """A decode node's life ended: its rooms fail."""
        for room in self.rooms:
            if room.peer == peer and room.state not in SENDER_TABLE.final:
                self._raise(room, SenderEvent.FAULT, PeerError.code, f"the decode node is gone: {reason}")

    # ------------------------------------------------------------------ workers

    def sent(self, message: Sent) -> None:
        """A worker ended an order."""
        room = self.rooms.find(message.room, message.generation)
        if room is None:
            return
        work = room.ranks[message.rank]
        work.outstanding.discard(message.order)
        if message.error_code:
            self._raise(room, SenderEvent.FAULT, message.error_code, f"rank {message.rank}: {message.error}")
            return
        work.amounts = add_amounts(work.amounts, message.amounts)
        for phase, seconds in message.seconds.items():
            work.phases_s[phase] = work.phases_s.get(phase, 0.0) + seconds
        self._settle(room)

    def room_closed(self, message: RoomClosed) -> None:
        """A worker proved that nothing of a room is in flight."""
        room = self.rooms.find(message.room, message.generation)
        if room is not None and message.quiet:
            room.ranks[message.rank].open = False
            self._drained_if_possible(room)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """A rank worker's process ended, and with it everything it had in flight."""
        for room in self.rooms:
            work = room.ranks.get(rank)
            if work is None or room.state in SENDER_TABLE.final:
                continue
            work.outstanding.clear()
            work.open = False
            self._raise(room, SenderEvent.FAULT, "worker_gone", f"rank worker {rank} of the prefill node died: {reason}", dead=rank)
            self._drained_if_possible(room)

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Fail what has waited too long, forget what has been kept long enough."""
        now_s = self._clock()
        for room in self.rooms:
            if room.deadline_s is not None and now_s >= room.deadline_s and room.state not in SENDER_TABLE.final:
                room.wait_until(None)
                reason = f"nothing happened in time in state '{room.state}' (limit: {room.deadline_name})"
                self._raise(room, SenderEvent.FAULT, DeadlineError.code, reason)
        while self._early:
            key, (expires_s, peer, offer) = next(iter(self._early.items()))
            if expires_s > now_s:
                break
            del self._early[key]
            self._refuse_offer(peer, offer, "unknown_room", "the room was never admitted on the prefill side (limit: timeouts.early_offer_s)")
        self.rooms.sweep()

    # ------------------------------------------------------------------ the table and its actions

    def _raise(self, room: SenderRoom, event: SenderEvent, code: str, reason: str, *, dead: Rank | None = None) -> None:
        """Feed the table. `dead` is a rank whose worker cannot answer any more."""
        state, actions = SENDER_TABLE.step(room.state, event)
        if event in {SenderEvent.ABORT, SenderEvent.FAULT} and state is not room.state:
            room.blame(code, reason)
            log.warning("room_ends", room=room.room, peer=room.peer, state=state, code=code, reason=reason)
        room.state = state
        for action in actions:
            self._act(room, action, dead)
        if state in SENDER_TABLE.final and event is not SenderEvent.ABORT:
            room.wait_until(None)
        self._observer.room(Role.PREFILL, user_state(room))
        self.rooms.changed(room)
        self._drained_if_possible(room)

    def _act(self, room: SenderRoom, action: SenderAction, dead: Rank | None) -> None:
        match action:
            case SenderAction.OPEN_ROOM:
                self._open(room)
            case SenderAction.CLOSE_ROOM:
                self._close(room, dead)
            case SenderAction.TELL_FAILED:
                self._tell(room, Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason))
            case SenderAction.TELL_DRAINED:
                self._tell(room, Drained(room=room.room, generation=room.generation))
            case SenderAction.TELL_ENGINE:
                self._tell_engine(room)
            case SenderAction.FREE_SOURCE:
                room.free_wanted = True
                self._free_if_possible(room)
            case SenderAction.FORGET_LATER:
                room.wait_until(None)
                self.rooms.ended(room)

    def _tell(self, room: SenderRoom, message: PeerMessage) -> None:
        if room.peer:
            self._peers.send(room.peer, message)

    def _tell_engine(self, room: SenderRoom) -> None:
        kinds = {SenderState.COMPLETED: "completed", SenderState.ABORTED: "aborted", SenderState.FAILED: "failed"}
        event = RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=kinds[room.state],  # type: ignore[arg-type]
            prompt_tokens=room.prompt_tokens,
            code=room.reason_code,
            reason=room.reason,
        )
        self._engines.push(event)

    def _free_if_possible(self, room: SenderRoom) -> None:
        if room.free_wanted and not room.freed and not room.writing:
            room.freed = True
            give_back(self._book, room.owner)

    def _open(self, room: SenderRoom) -> None:
        """Tell the workers both ends, once both are known."""
        if room.state is not SenderState.SENDING or room.offer is None or not room.tables:
            return
        if not any(work.open for work in room.ranks.values()):
            opening = OpenRoom(
                room=room.room,
                generation=room.generation,
                peer=room.peer,
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
                source=to_wire(room.tables),
                destination=room.offer.tables,
            )
            self._book.move(room.owner, PageState.HELD, PageState.LEASED)
            for rank, work in room.ranks.items():
                self._workers.send(rank, opening)
                work.open = True
        self._flush(room)

    def _close(self, room: SenderRoom, dead: Rank | None) -> None:
        for rank, work in room.ranks.items():
            if rank == dead:
                work.open = False
            if work.open:
                self._workers.send(rank, CloseRoom(room=room.room, generation=room.generation))

    def _drained_if_possible(self, room: SenderRoom) -> None:
        stopping = room.state in {SenderState.ABORTING, SenderState.FAILING}
        if stopping and not any(work.open for work in room.ranks.values()):
            self._raise(room, SenderEvent.DRAINED, "", "")

    def _flush(self, room: SenderRoom) -> None:
        """Order what has been published and not been ordered yet."""
        if room.state is not SenderState.SENDING or not all(work.open for work in room.ranks.values()):
            return
        for rank, work in room.ranks.items():
            for section in work.progress.next_sections(room.prefix_tokens):
                self._orders += 1
                work.outstanding.add(self._orders)
                work.phases_s.setdefault("offer_to_order", self._clock() - room.offered_s)
                self._workers.send(
                    rank, Send(room=room.room, generation=room.generation, order=self._orders, section=section)
                )

    def _settle(self, room: SenderRoom) -> None:
        """Say Done for every rank that has nothing left to do, and end the room when all have."""
        if room.state is not SenderState.SENDING:
            return
        self._flush(room)
        for rank, work in room.ranks.items():
            if work.finished and not work.done and not work.outstanding:
                work.done = True
                room.amounts = add_amounts(room.amounts, work.amounts)
                self._observer.sent(work.amounts, work.phases_s)
                done = Done(
                    room=room.room,
                    generation=room.generation,
                    writer=rank,
                    amounts=work.amounts,
                    phases_s=work.phases_s,
                    metadata=work.metadata,
                )
                self._peers.send(room.peer, done)
        if all(work.done for work in room.ranks.values()):
            room.phases_s["offer_to_sent"] = self._clock() - room.offered_s
            self._raise(room, SenderEvent.ALL_SENT, "", "")

    def __repr__(self) -> str:
        return f"<SenderService {self.rooms.states()} early offers: {len(self._early)}>"
