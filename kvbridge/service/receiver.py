"""The decode side at work: rooms whose pages prefill nodes write and an engine then reads.

Owns: the rooms of a decode node, which writers have reported, the accounting that decides a commit. Drives
`RECEIVER_TABLE`. Must not know: sockets, HTTP, addresses.

From the offer on, pages are leased to the writers. They come back by proof only: Done from every writer with the right sums
(commit), Drained from every prefill node, or the end of a node's incarnation. A node that vanished without
proof leaves its pages quarantined, counted and shown, until its successor or its own return brings the proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ConflictError,
    DeadlineError,
    IntegrityError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    RoomFailedError,
)
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.geometry.pages import pages_needed, tables_cover
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.plan.accounting import expected_amounts, shortfall
from kvbridge.core.plan.operations import Amounts, add_amounts
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverAction, ReceiverEvent, ReceiverState
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import Abort, Done, Drained, Failed, Offer, PeerMessage, to_wire
from kvbridge.pool.book import PageBook, PageState
from kvbridge.service.observer import Observer
from kvbridge.service.ports import AdmissionRequest, PeerAddress, RoomReport, RoomState
from kvbridge.service.rooms import Room, RoomBook, give_back
from kvbridge.service.tables import request_tables

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MetNode:
    """A prefill node that has welcomed us."""

    peer: str
    """Its incarnation."""
    name: str
    """Instance and node, for people."""
    ranks: tuple[Rank, ...]


class PrefillNodes(Protocol):
    """The prefill nodes that this decode node knows."""

    def met(self, address: PeerAddress) -> MetNode | None:
        """Return the node behind an address if it has welcomed us, else say hello (once) and return None.

        Raises PeerError or FingerprintMismatchError when it has rejected us since the last attempt.
        """

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a reliable message."""

    def alive(self, peer: str) -> bool:
        """Whether that incarnation is still there, as far as we know."""


class DecodeRanks(Protocol):
    """The rank workers of this node."""

    def missing(self) -> str:
        """Why not every rank can receive now, or an empty text."""

    def manifests(self) -> tuple[RankManifest, ...]:
        """Of every rank, in the order in which they are introduced to peers."""


class EngineEvents(Protocol):
    """The engines attached to this node."""

    def push(self, event: RoomEvent) -> None:
        """Tell every attached engine."""

    def serving(self) -> frozenset[str]:
        """Names of the engines attached now."""


@dataclass(frozen=True)
class ReceiverLimits:
    """The deadlines of the receiving side, in seconds; each is a configuration key of the same name under `timeouts`."""

    pages_s: float
    """Adopted pools: the engine names its pages within this time."""
    meet_s: float
    """Every prefill node has welcomed us within this time."""
    room_s: float
    """From the offer to the commit."""
    claim_s: float
    """A committed room is claimed within this time, else its pages are given back."""


@dataclass
class WriterNode:
    """One prefill node of one room."""

    node: MetNode
    missing: set[Rank]
    drained: bool = False
    gone: str = ""
    """Why the node is gone, when it is."""


@dataclass
class ReceiverRoom(Room[ReceiverState]):
    """A room on the decode side."""

    addresses: tuple[PeerAddress, ...] = ()
    writers: dict[str, WriterNode] = field(default_factory=dict)
    metadata: dict[str, bytes] = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)
    released_by: set[str] = field(default_factory=set)
    offered_s: float = 0.0
    reserved_tokens: int = 0
    quarantined: bool = False


_USER_STATE = {
    ReceiverState.AWAITING_PAGES: RoomState.ADMITTED,
    ReceiverState.RESERVED: RoomState.ADMITTED,
    ReceiverState.FAILING: RoomState.FAILED,
}


def user_state(room: ReceiverRoom) -> RoomState:
    """What users see: a room that is failing has failed for them, whatever is still to be cleaned up."""
    if room.state is ReceiverState.OFFERED and any(room.amounts):
        return RoomState.TRANSFERRING
    return _USER_STATE.get(room.state) or RoomState(room.state.value)


class ReceiverService:
    """All rooms of a decode node. Implements RoomsPort; called from the event loop's thread only."""

    def __init__(
        self,
        *,
        geometry: ModelGeometry,
        host: frozenset[ComponentKind],
        book: PageBook,
        ranks: DecodeRanks,
        nodes: PrefillNodes,
        engines: EngineEvents,
        observer: Observer,
        limits: ReceiverLimits,
        keep_s: float,
        adopted: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        """`host`: the components that live in the host pool. `adopted`: device pages are named by the engine."""
        self._geometry = geometry
        self._host = host
        self._book = book
        self._ranks = ranks
        self._nodes = nodes
        self._engines = engines
        self._observer = observer
        self._limits = limits
        self._adopted = adopted
        self._clock = clock
        self.rooms: RoomBook[ReceiverRoom] = RoomBook(Role.DECODE, user_state, clock=clock, keep_s=keep_s)

    # ------------------------------------------------------------------ admission (RoomsPort)

    async def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve everything the request can need, or nothing. Raises CapacityError, ConflictError, InvalidInputError."""
        return self.admit_now(request)

    def admit_now(self, request: AdmissionRequest) -> RoomReport:
        """`admit` without a loop: nothing in it waits."""
        missing = self._ranks.missing()
        if missing:
            raise NotReadyError(f"this decode daemon cannot admit a room now: {missing}")
        self._check(request)
        room_id = self.rooms.draw() if request.room is None else int(request.room)
        self.rooms.check_free(room_id, request.generation)
        room = ReceiverRoom(
            room=room_id,
            generation=request.generation,
            prompt_tokens=request.prompt_tokens,
            prefix_tokens=request.prefix_tokens,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            state=RECEIVER_TABLE.start,
            created_s=self._clock(),
            addresses=request.prefill,
            reserved_tokens=request.prompt_tokens + request.max_new_tokens,
        )
        room.tables = self._reserve(room)
        self.rooms.add(room)
        if self._adopted:
            room.wait_until(room.created_s + self._limits.pages_s, "timeouts.pages_s")
            self._tell_engine(room, "wanted")
        else:
            self._raise(room, ReceiverEvent.PAGES)
        return self.rooms.report(room)

    def _check(self, request: AdmissionRequest) -> None:
        if not request.prefill:
            raise InvalidInputError("a decode daemon needs `prefill`: the control addresses of the prefill nodes that will write")
        page = self._geometry.tokens_per_page
        if request.prefix_tokens > request.prompt_tokens or request.prefix_tokens % page:
            raise InvalidInputError(
                f"prefix_tokens must be a multiple of {page} and at most prompt_tokens ({request.prompt_tokens}), got {request.prefix_tokens}"
            )

    def _demand(self, room: ReceiverRoom, tokens: int) -> dict[IndexSpace, int]:
        needed = pages_needed(self._geometry, tokens=tokens, prompt_tokens=room.prompt_tokens, host=self._host)
        if self._adopted:
            return {space: count for space, count in needed.items() if space is IndexSpace.HOST}
        return needed

    def _reserve(self, room: ReceiverRoom) -> Tables:
        try:
            ids = self._book.reserve(room.owner, self._demand(room, room.reserved_tokens), state=PageState.HELD)
        except CapacityError:
            self._observer.refused("capacity")
            raise
        return request_tables(self._geometry, ids, prompt_tokens=room.prompt_tokens)

    def report(self, room: int) -> RoomReport:
        """Raises UnknownRoomError."""
        return self.rooms.report(self.rooms.get(room))

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """See RoomsPort."""
        return await self.rooms.wait(room, timeout_s, until)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """See RoomsPort."""
        found = self.rooms.get(room)
        self._raise(found, ReceiverEvent.ABORT, "aborted", reason)
        return self.rooms.report(found)

    # ------------------------------------------------------------------ the engine's verbs

    def provide(self, room_id: int, tables: Tables) -> None:
        """Adopted pools: the engine names the device pages of a room that wanted them."""
        room = self.rooms.get(room_id)
        if not self._adopted:
            raise ConflictError("this node owns its pools: pages are not provided by the engine")
        if room.state is not ReceiverState.AWAITING_PAGES:
            raise ConflictError(f"room {room_id} does not wait for pages (state '{room.state}')")
        if IndexSpace.HOST in tables:
            raise InvalidInputError("host pages belong to the daemon; provide device spaces only")
        together = room.tables | tables
        tables_cover(together, self._geometry, tokens=room.prompt_tokens, host=self._host)
        self._book.adopt(room.owner, {space: table.ids for space, table in tables.items()})
        room.tables = together
        self._raise(room, ReceiverEvent.PAGES)

    def claim(self, engine: str, room_id: int) -> ReceiverRoom:
        """An engine takes a committed room. Raises RoomFailedError with the first cause when it will never be."""
        room = self.rooms.get(room_id)
        if user_state(room).final or room.state is ReceiverState.ABORTING:
            raise RoomFailedError(f"room {room_id} is over ({user_state(room)}): {room.reason or 'released'}")
        if room.state not in {ReceiverState.COMMITTED, ReceiverState.CLAIMED}:
            raise ConflictError(f"room {room_id} is not committed yet (state '{room.state}')")
        if engine in room.claimed_by:
            raise ConflictError(f"room {room_id} was already claimed by this engine")
        room.claimed_by.add(engine)
        room.phases_s.setdefault("commit_to_claim", self._clock() - room.created_s - room.phases_s.get("admit_to_commit", 0.0))
        self._raise(room, ReceiverEvent.CLAIM)
        return room

    def extend(self, engine: str, room_id: int, tokens: int) -> Tables:
        """Make room for `tokens` tokens in all and return the tables for that length. Raises CapacityError."""
        room = self._claimed(engine, room_id)
        if tokens < room.prompt_tokens:
            raise InvalidInputError(f"room {room_id} cannot shrink to {tokens} tokens, its prompt has {room.prompt_tokens}")
        if tokens > room.reserved_tokens:
            more = self._book.grow(room.owner, self._missing(room, tokens))
            for space, ids in request_tables(self._geometry, more, prompt_tokens=room.prompt_tokens).items():
                room.tables[space] = _joined(room.tables.get(space), ids)
            room.reserved_tokens = tokens
        return room.tables

    def _missing(self, room: ReceiverRoom, tokens: int) -> dict[IndexSpace, int]:
        demand = self._demand(room, tokens)
        held = {space: len(table) for space, table in room.tables.items()}
        return {space: count - held.get(space, 0) for space, count in demand.items() if count > held.get(space, 0)}

    def release(self, engine: str, room_id: int) -> None:
        """An engine is through with a room; the pages are free once every engine that serves this node is."""
        room = self._claimed(engine, room_id)
        room.released_by.add(engine)
        if (self._engines.serving() | room.claimed_by) <= room.released_by:
            self._raise(room, ReceiverEvent.RELEASE)

    def abort(self, engine: str, room_id: int, reason: str) -> None:
        """An engine gives a room up, claimed or not."""
        room = self.rooms.get(room_id)
        if room.state is ReceiverState.CLAIMED and engine in room.claimed_by:
            room.blame("aborted", f"by the decode engine: {reason}")
            self.release(engine, room_id)
            return
        self._raise(room, ReceiverEvent.ABORT, "aborted", f"by the decode engine: {reason}")

    def engine_gone(self, engine: str, reason: str) -> None:
        """An engine's process ended: what it had claimed is over."""
        for room in self.rooms:
            if room.state is ReceiverState.CLAIMED and engine in room.claimed_by - room.released_by:
                self._raise(room, ReceiverEvent.FAULT, PeerError.code, f"the decode engine {engine} is gone: {reason}")

    def _claimed(self, engine: str, room_id: int) -> ReceiverRoom:
        room = self.rooms.get(room_id)
        if room.state is not ReceiverState.CLAIMED or engine not in room.claimed_by - room.released_by:
            raise ConflictError(f"room {room_id} is not claimed by this engine (state '{room.state}')")
        return room

    # ------------------------------------------------------------------ peers

    def nodes_changed(self) -> None:
        """A prefill node welcomed or rejected us, or vanished: look at every room that still waits for one."""
        for room in self.rooms:
            if room.state is ReceiverState.RESERVED:
                self._meet(room)

    def done(self, peer: str, message: Done) -> None:
        """A writer has sent everything that was its to send."""
        room = self.rooms.find(message.room, message.generation)
        if room is None or room.state is not ReceiverState.OFFERED:
            self._observer.refused("stale_done")
            return
        writer = room.writers.get(peer)
        if writer is None or message.writer not in writer.node.ranks:
            self._observer.refused("foreign_done")
            log.error("done_from_stranger", room=room.room, peer=peer, rank=str(message.writer))
            return
        if message.writer not in writer.missing:
            return  # sent again
        writer.missing.discard(message.writer)
        room.amounts = add_amounts(room.amounts, message.amounts)
        room.metadata[str(message.writer)] = message.metadata
        for phase, seconds in message.phases_s.items():
            room.phases_s[phase] = max(room.phases_s.get(phase, 0.0), seconds)
        if not any(writer.missing for writer in room.writers.values()):
            self._account(room)
        self.rooms.changed(room)

    def _account(self, room: ReceiverRoom) -> None:
        """Commit if every row of every component has been accounted for, else fail closed."""
        expected = expected_amounts(
            self._geometry, self._ranks.manifests(), prompt_tokens=room.prompt_tokens, prefix_tokens=room.prefix_tokens
        )
        wrong = shortfall(expected, room.amounts)
        if wrong:
            self._raise(room, ReceiverEvent.FAULT, IntegrityError.code, f"every writer is done, but {wrong}")
            return
        now_s = self._clock()
        room.phases_s["offer_to_commit"] = now_s - room.offered_s
        room.phases_s["admit_to_commit"] = now_s - room.created_s
        self._observer.received(room.amounts, room.phases_s)
        self._raise(room, ReceiverEvent.ALL_DONE)

    def failed(self, peer: str, message: Failed) -> None:
        """A prefill node will not complete a room."""
        room = self.rooms.find(message.room, message.generation)
        if room is None or peer not in room.writers:
            return
        name = room.writers[peer].node.name
        self._raise(room, ReceiverEvent.FAULT, message.code, f"prefill node {name}: {message.message}")

    def drained(self, peer: str, message: Drained) -> None:
        """A prefill node proved that it does not write to a room."""
        room = self.rooms.find(message.room, message.generation)
        if room is None or peer not in room.writers:
            return
        room.writers[peer].drained = True
        self._drained_if_possible(room)

    def peer_gone(self, peer: str, reason: str, *, proof: bool) -> None:
        """A prefill node vanished. `proof`: its incarnation has ended, so it does not write any more."""
        for room in self.rooms:
            writer = room.writers.get(peer)
            if writer is None or room.state in RECEIVER_TABLE.final:
                continue
            writer.gone = reason
            writer.drained = writer.drained or proof
            if room.state is ReceiverState.OFFERED:
                self._raise(room, ReceiverEvent.FAULT, PeerError.code, f"prefill node {writer.node.name} is gone: {reason}")
            self._drained_if_possible(room)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """A rank worker of this node died: nothing can arrive through it, so rooms under way fail."""
        for room in self.rooms:
            if room.state in {ReceiverState.RESERVED, ReceiverState.OFFERED}:
                self._raise(room, ReceiverEvent.FAULT, "worker_gone", f"rank worker {rank} of the decode node died: {reason}")

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Fail what has waited too long, forget what has been kept long enough."""
        now_s = self._clock()
        for room in self.rooms:
            if room.deadline_s is not None and now_s >= room.deadline_s and room.state not in RECEIVER_TABLE.final:
                reason = f"nothing happened in time in state '{room.state}' (limit: {room.deadline_name})"
                room.wait_until(None)
                self._raise(room, ReceiverEvent.FAULT, DeadlineError.code, reason)
        self.rooms.sweep()

    # ------------------------------------------------------------------ the table and its actions

    def _raise(self, room: ReceiverRoom, event: ReceiverEvent, code: str = "", reason: str = "") -> None:
        state, actions = RECEIVER_TABLE.step(room.state, event)
        if event in {ReceiverEvent.ABORT, ReceiverEvent.FAULT} and (state is not room.state or actions):
            room.blame(code, reason)
            log.warning("room_ends", room=room.room, state=state, code=code, reason=reason)
        room.state = state
        for action in actions:
            self._act(room, action)
        self._observer.room(Role.DECODE, user_state(room))
        self.rooms.changed(room)

    def _act(self, room: ReceiverRoom, action: ReceiverAction) -> None:
        match action:
            case ReceiverAction.ASK_ENGINE:
                self._tell_engine(room, "wanted")
            case ReceiverAction.MEET:
                room.wait_until(self._clock() + self._limits.meet_s, "timeouts.meet_s")
                self._meet(room)
            case ReceiverAction.OFFER:
                self._offer(room)
            case ReceiverAction.TELL_ABORT:
                self._tell_abort(room)
            case ReceiverAction.HOLD:
                self._book.move(room.owner, PageState.LEASED, PageState.HELD)
                room.wait_until(self._clock() + self._limits.claim_s, "timeouts.claim_s")
            case ReceiverAction.FREE:
                give_back(self._book, room.owner)
            case ReceiverAction.TELL_ENGINE:
                self._tell_engine(room, _EVENT_KINDS[room.state])
            case ReceiverAction.FORGET_LATER:
                room.wait_until(None)
                self.rooms.ended(room)
        if room.state is ReceiverState.CLAIMED:
            room.wait_until(None)

    def _meet(self, room: ReceiverRoom) -> None:
        try:
            met = [self._nodes.met(address) for address in room.addresses]
        except BridgeError as error:
            self._raise(room, ReceiverEvent.FAULT, error.code, str(error))
            return
        nodes = [node for node in met if node is not None]
        if len(nodes) == len(met):
            room.writers = {node.peer: WriterNode(node, set(node.ranks)) for node in nodes}
            self._raise(room, ReceiverEvent.MET)

    def _offer(self, room: ReceiverRoom) -> None:
        self._book.move(room.owner, PageState.HELD, PageState.LEASED)
        room.offered_s = self._clock()
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        room.wait_until(room.offered_s + self._limits.room_s, "timeouts.room_s")
        offer = Offer(
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            tables=to_wire(room.tables),
        )
        for peer in room.writers:
            self._nodes.send(peer, offer)

    def _tell_abort(self, room: ReceiverRoom) -> None:
        room.wait_until(None)
        abort = Abort(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for peer, writer in room.writers.items():
            if not writer.drained and not writer.gone:
                self._nodes.send(peer, abort)
        self._drained_if_possible(room)

    def _drained_if_possible(self, room: ReceiverRoom) -> None:
        if room.state not in {ReceiverState.ABORTING, ReceiverState.FAILING}:
            return
        if all(writer.drained for writer in room.writers.values()):
            self._raise(room, ReceiverEvent.DRAINED)
            return
        lost = [writer for writer in room.writers.values() if writer.gone and not writer.drained]
        if lost and not room.quarantined:
            room.quarantined = True
            self._book.quarantine(room.owner, f"{room.owner}: prefill node {lost[0].node.name} vanished ({lost[0].gone})")

    def _tell_engine(self, room: ReceiverRoom, kind: str) -> None:
        event = RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=kind,  # type: ignore[arg-type]
            prompt_tokens=room.prompt_tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )
        self._engines.push(event)

    def __repr__(self) -> str:
        return f"<ReceiverService {self.rooms.states()}>"


_EVENT_KINDS = {
    ReceiverState.COMMITTED: "committed",
    ReceiverState.CLAIMED: "cancel",
    ReceiverState.COMPLETED: "completed",
    ReceiverState.ABORTED: "aborted",
    ReceiverState.FAILED: "failed",
}


def _joined(held: PageTable | None, more: PageTable) -> PageTable:
    if held is None:
        return more
    return PageTable(held.space, np.concatenate([held.ids, more.ids]), held.first_page)
