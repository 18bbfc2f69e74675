"""The decode side at work: rooms whose pages prefill nodes write and an engine then reads.

Owns: what users, engines, peers and workers may say about the rooms of a decode node, and in which order it makes
sense. Must not know: sockets, HTTP, addresses, what a transition leads to (`driver`).
"""

from __future__ import annotations

from collections.abc import Collection

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    ConflictError,
    InvalidInputError,
    PeerError,
    ProtocolError,
    RoomFailedError,
)
from kvbridge.core.geometry.pages import tables_cover
from kvbridge.core.geometry.tables import joined_tables, request_tables
from kvbridge.core.ids import IndexSpace, Rank, Tables
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.receiver import ReceiverEvent, ReceiverState
from kvbridge.core.wire.engine_messages import RoomEvent, SparseRows
from kvbridge.core.wire.messages import MAX_ROOM_METADATA_BYTES, Done, Drained, Failed
from kvbridge.node.receiver.digests import ReceiverDigests
from kvbridge.node.receiver.driver import ReceiverDriver
from kvbridge.node.receiver.room import ReceiverPorts, ReceiverRoom, user_state
from kvbridge.node.room import slowest
from kvbridge.node.rooms import WORKER_GONE, RoomSettings
from kvbridge.pool.accounts.page_states import Owner
from kvbridge.telemetry.events import RankReceived, SparseDecoded

_BEFORE_COMMIT = frozenset(
    {ReceiverState.AWAITING_PAGES, ReceiverState.RESERVED, ReceiverState.OFFERED, ReceiverState.VERIFYING}
)
_ARRIVED = frozenset({ReceiverState.COMMITTED, ReceiverState.CLAIMED})


class ReceiverRooms(ReceiverDriver):
    """All rooms of a decode node."""

    def __init__(self, ports: ReceiverPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(ports, settings, clock=clock)
        self.digests = ReceiverDigests(self, ports.events)
        """What writers and our own ranks say about digests goes there."""

    # ------------------------------------------------------------------ admission

    def _demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        if not request.prefill:
            raise InvalidInputError(
                "a decode daemon needs `prefill`: the control addresses of the prefill nodes that will write"
            )
        return self._pages_needed(request.prompt_tokens + request.max_new_tokens, request.prompt_tokens)

    def _pages_needed(self, tokens: int, prompt_tokens: int) -> dict[IndexSpace, int]:
        needed = super()._pages_needed(tokens, prompt_tokens)
        if IndexSpace.REQUEST in self._ports.book.owned_spaces():
            needed.setdefault(IndexSpace.REQUEST, 1)  # of the hot buffer, where the model's own state needs none
        return needed

    def _admitted(self, room: ReceiverRoom, request: AdmissionRequest) -> None:
        room.peers = tuple(address.endpoint for address in request.prefill)
        room.addresses, room.reserved_tokens = request.prefill, request.prompt_tokens + request.max_new_tokens
        room.begin_within(request.begin_within_s)
        if self._settings.adopted:
            room.wait_until(room.created_s + self._limits.pages_s, "timeouts.pages_s")
            self.tell_engine(room)
        else:
            self._begin(room)

    # ------------------------------------------------------------------ the engine's verbs

    def provide(self, room_id: int, tables: Tables, *, prefix_tokens: int = 0) -> None:
        """Adopted pools: the engine names the device pages of a room that wanted them, and what they hold already."""
        room = self.rooms.get(room_id)
        if not self._settings.adopted:
            raise ConflictError("this node owns its pools: pages are not provided by the engine")
        if room.state is not ReceiverState.AWAITING_PAGES:
            raise ConflictError(f"room {room_id} does not wait for pages (state '{user_state(room)}')")
        if IndexSpace.HOST in tables:
            raise InvalidInputError("host pages belong to the daemon; provide device spaces only")
        self._check_prefix(prefix_tokens, room.prompt_tokens)
        together = room.tables | tables
        tables_cover(together, self._geometry, tokens=room.prompt_tokens, host=self._settings.host)
        self._ports.book.adopt(room.owner, {space: table.ids for space, table in tables.items()})
        room.tables, room.prefix_tokens = together, prefix_tokens
        self._begin(room)

    def _begin(self, room: ReceiverRoom) -> None:
        """Every page is there: find who writes them."""
        self.advance(room, ReceiverEvent.PAGES)
        self.find_writers(room)

    def _check_prefix(self, prefix_tokens: int, prompt_tokens: int) -> None:
        page = self._geometry.tokens_per_page
        if prefix_tokens > prompt_tokens or prefix_tokens % page:
            raise InvalidInputError(
                f"prefix_tokens must be a multiple of {page} and at most prompt_tokens ({prompt_tokens}), "
                f"got {prefix_tokens}"
            )
        if prefix_tokens and self._settings.host:
            raise InvalidInputError(
                f"{', '.join(sorted(self._settings.host))} of the room lies in this node's host pool, in pages that hold nothing "
                f"of the prompt yet: prefix_tokens must be 0 here, got {prefix_tokens}"
            )

    def claim(self, engine: str, room_id: int) -> ReceiverRoom:
        """An engine takes a committed room. Raises RoomFailedError with the first cause when it will never be."""
        room = self.rooms.get(room_id)
        if any(engine in earlier.users for earlier in self.rooms.attempts(room_id)[:-1]):
            raise ConflictError(
                f"an earlier attempt at room {room_id} is still claimed by this engine; release it first"
            )
        if room.state not in {ReceiverState.COMMITTED, ReceiverState.CLAIMED}:
            if room.state in _BEFORE_COMMIT:
                raise ConflictError(f"room {room_id} is not committed yet (state '{user_state(room)}')")
            raise RoomFailedError(f"room {room_id} is over ({user_state(room)}): {room.reason or 'released'}")
        if engine in room.claimed_by:
            raise ConflictError(f"room {room_id} was already claimed by this engine")
        if room.state is ReceiverState.COMMITTED:
            room.expected_by = set(self._ports.engines.serving())
            room.claimed_s = self._clock()
            room.phases_s["commit_to_claim"] = room.claimed_s - room.committed_s
            ended_s = {
                "commit_to_claim": room.claimed_s - room.committed_s,
                "admit_to_claim": room.claimed_s - room.created_s,
            }
            self.phases_ended(room, ended_s)
        room.claimed_by.add(engine)
        self.advance(room, ReceiverEvent.CLAIM)
        if room.expected_by <= room.claimed_by:
            room.wait_until(None)  # nobody is waited for any more: the engines use it
        return room

    def held(self, engine: str, room_id: int) -> ReceiverRoom:
        """Return the room that an engine has claimed and not released. Raises ConflictError when it has not."""
        room = self.rooms.used_by(engine, room_id)
        if engine not in room.users:
            raise ConflictError(f"room {room_id} is not claimed by this engine (state '{user_state(room)}')")
        return room

    def extend(self, engine: str, room_id: int, tokens: int) -> Tables:
        """Make room for `tokens` tokens in all and return the tables for that length. Raises CapacityError."""
        room = self.held(engine, room_id)
        if room.state is not ReceiverState.CLAIMED:
            raise ConflictError(f"room {room_id} is to end and cannot grow: {room.reason}; release it")
        if tokens < room.prompt_tokens:
            raise InvalidInputError(
                f"room {room_id} cannot shrink to {tokens} tokens, its prompt has {room.prompt_tokens}"
            )
        if tokens > room.reserved_tokens:
            more = self._ports.book.grow(room.owner, self._missing_pages(room, tokens))
            room.tables = joined_tables(
                room.tables, request_tables(self._geometry, more, prompt_tokens=room.prompt_tokens)
            )
            room.reserved_tokens = tokens
        return room.tables

    def _missing_pages(self, room: ReceiverRoom, tokens: int) -> dict[IndexSpace, int]:
        demand = self._pages_needed(tokens, room.prompt_tokens)
        held = {space: len(table) for space, table in room.tables.items()}
        return {space: count - held.get(space, 0) for space, count in demand.items() if count > held.get(space, 0)}

    def release(self, engine: str, room_id: int, sparse: SparseRows | None = None) -> None:
        """An engine is through with a room. The pages are free once every engine that claimed it, or is to, is."""
        room = self.held(engine, room_id)
        if sparse is not None:
            self._ports.events.emit(SparseDecoded(**room.identity, rows=sparse.model_dump()))
        self._let_go(room, engine)

    def open_events(self) -> list[RoomEvent]:
        """What waits for an engine: rooms that want pages (adopted pools), rooms that can be claimed."""
        waiting = {ReceiverState.COMMITTED} | ({ReceiverState.AWAITING_PAGES} if self._settings.adopted else set())
        return [self.event(room) for room in self.rooms if room.state in waiting]

    # ------------------------------------------------------------------ peers

    def nodes_changed(self) -> None:
        """A prefill node welcomed or rejected us, or vanished: look at every room that still waits for one."""
        for room in self.rooms:
            self.find_writers(room)

    def open_offers(self) -> set[Owner]:
        """Rooms that are being written to."""
        return {room.owner for room in self.rooms if room.state is ReceiverState.OFFERED}

    def shut(self, owners: Collection[Owner]) -> None:
        """Whoever wrote to these rooms cannot reach this node any more, nor can anything arrive that was on its way."""
        for owner in owners:
            room = self.rooms.find(owner.room, owner.generation)
            if room is not None and room.awaits_writers:
                room.shut = True
                self.advance(room)

    def done(self, peer: str, message: Done) -> None:
        """A writer has sent everything that was its to send."""
        room = self.rooms.find(message.room, message.generation)
        writer = None if room is None else room.writers.get(peer)
        if room is None or room.over:
            self.refuse_message(peer, message, "stale_done")
            return
        if writer is None or message.writer not in writer.node.ranks:
            self.refuse_message(peer, message, "foreign_done")
            return
        if message.writer not in writer.missing:
            return  # sent again
        writer.missing.discard(message.writer)
        if room.state is not ReceiverState.OFFERED:
            self.advance(room)  # it crossed our abort; that the writer is quiet counts all the same
            return
        room.begin_by_s = None
        room.amounts = add_amounts(room.amounts, message.amounts)
        room.metadata[str(message.writer)] = message.metadata
        metadata_bytes = sum(map(len, room.metadata.values()))
        if metadata_bytes > MAX_ROOM_METADATA_BYTES:
            why = (
                f"the prefill engines have given {metadata_bytes} bytes of metadata to `finish` on {len(room.metadata)} ranks, a "
                f"room carries at most {MAX_ROOM_METADATA_BYTES}; give it on fewer ranks, or less of it"
            )
            self.fail(room, InvalidInputError.code, why)
            return
        slowest(room.phases_s, message.phases_s)
        self._ports.events.emit(
            RankReceived(
                room=room.room,
                generation=room.generation,
                peer=peer,
                rank=message.writer,
                amounts=message.amounts,
                transport=message.transport,
                under_way_ago_s=message.under_way_ago_s,
            )
        )
        self.show(room)
        if self.digests.complete(room, message):
            self.account(room, writer, message)

    def failed(self, peer: str, message: Failed) -> None:
        """A prefill node will not complete a room. Means nothing once the room is committed."""
        room = self.rooms.find(message.room, message.generation)
        if room is not None and room.state is ReceiverState.OFFERED and peer in room.writers:
            why = f"prefill node {room.writers[peer].node.name}: {message.message}"
            self.fail(room, message.code, why)

    def drained(self, peer: str, message: Drained) -> None:
        """A prefill node proved that it does not write to a room."""
        room = self.rooms.find(message.room, message.generation)
        writer = None if room is None else room.writers.get(peer)
        if room is None or writer is None:
            return
        writer.drained = True
        writer.in_transit = writer.in_transit or message.in_transit
        if room.state is ReceiverState.OFFERED and writer.missing:
            why = f"prefill node {writer.node.name} stopped without having sent everything"
            self.fail(room, ProtocolError.code, why)
        self.advance(room)

    def peer_gone(self, peer: str, reason: str) -> None:
        """A prefill node vanished. Whether its process has ended or not, it may have sent what has not arrived yet."""
        for room in self.rooms:
            writer = room.writers.get(peer)
            if writer is None:
                continue
            writer.gone = reason
            if room.state is ReceiverState.OFFERED and writer.missing:
                why = f"prefill node {writer.node.name} is gone: {reason}"
                self.fail(room, PeerError.code, why)
            self.advance(room)

    def worker_gone(self, rank: Rank, reason: str, *, memory_lost: bool = False) -> None:
        """A rank worker of this node died: nothing can arrive through it, so rooms under way fail.

        `memory_lost`: the device memory was its own, so rooms that have arrived fail as well.
        """
        failing = _BEFORE_COMMIT | _ARRIVED if memory_lost else _BEFORE_COMMIT
        for room in self.rooms:
            if room.state in failing:
                why = f"rank worker {rank} of the decode node died: {reason}"
                self.fail(room, WORKER_GONE, why)
