"""The prefill side at work: rooms whose pages an engine fills and rank workers send.

Owns: what users, engines, peers and workers may say about the rooms of a prefill node, and in which order it makes
sense. Must not know: sockets, HTTP, addresses, how bytes move, what a transition leads to (`driver`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    BridgeError,
    ConflictError,
    InvalidInputError,
    PeerError,
    StaleError,
    TransportError,
    UnknownRoomError,
)
from kvbridge.core.geometry.pages import tables_cover
from kvbridge.core.geometry.tables import same_tables
from kvbridge.core.ids import IndexSpace, Rank, Tables
from kvbridge.core.plan.digest_sums import DigestSums
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.session.sender import SenderEvent, SenderState
from kvbridge.core.wire.messages import REASON_CHARS, Abort, Drained, Failed, Offer
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.core.wire.worker_messages import Digested, RoomClosed, Sent
from kvbridge.node.room import Quarantine
from kvbridge.node.rooms import WORKER_GONE, RoomSettings
from kvbridge.node.sender.driver import SenderDriver
from kvbridge.node.sender.offers import EarlyOffers, check_offer
from kvbridge.node.sender.room import RankWork, SenderPorts, SenderRoom, user_state
from kvbridge.telemetry.context import parse_traceparent
from kvbridge.telemetry.events import RoomBegun, RoomFinished, RoomOffered


class SenderRooms(SenderDriver):
    """All rooms of a prefill node."""

    def __init__(self, ports: SenderPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(ports, settings, clock=clock)
        self._early = EarlyOffers(wait_s=settings.limits.early_offer_s, clock=clock)

    # ------------------------------------------------------------------ admission

    def _demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        if request.prefill:
            raise InvalidInputError("`prefill` is for the decode daemon; a prefill daemon sends to whoever offers it")
        return self._pages_needed(request.prompt_tokens, request.prompt_tokens)

    def _admitted(self, room: SenderRoom, request: AdmissionRequest) -> None:
        for rank, layers in self._ports.workers.layers.items():
            room.ranks[rank] = RankWork(RankProgress(layers, prompt_tokens=room.prompt_tokens))
        room.wait_until(room.created_s + self._limits.offer_s, "timeouts.offer_s")
        room.begin_within(request.begin_within_s, or_else=(self._limits.begin_s, "timeouts.begin_s"))
        early = self._early.take(room.room, room.generation)
        if early is not None:
            self._take_offer(room, early.peer, early.offer)

    # ------------------------------------------------------------------ the engine's verbs

    def begin(
        self,
        engine: str,
        ranks: tuple[Rank, ...],
        room_id: int,
        *,
        prompt_tokens: int,
        tables: Tables,
        by_gpu: bool = False,
    ) -> SenderRoom:
        """An engine starts to compute a room on its ranks. Raises ConflictError on a second begin.

        With that it has let go of every earlier attempt at the room, unless a GPU writes for it (`by_gpu`): then it is refused
        with a ConflictError until it has aborted that.
        """
        room = self.rooms.get(room_id)
        self._require_alive(room)
        if prompt_tokens != room.prompt_tokens:
            raise InvalidInputError(
                f"room {room_id} was admitted with {room.prompt_tokens} prompt tokens, "
                f"the engine begins it with {prompt_tokens}"
            )
        for rank in ranks:
            if room.ranks[rank].engine:
                raise ConflictError(
                    f"room {room_id} was already begun on rank {rank} by engine {room.ranks[rank].engine}"
                )
        earlier = [attempt for attempt in self.rooms.attempts(room_id)[:-1] if engine in attempt.writing]
        if earlier and by_gpu:
            raise ConflictError(
                f"an earlier attempt at room {room_id} (generation {earlier[0].generation}) may still be written by this engine's "
                "GPU; abort it first"
            )
        self._take_tables(room, tables)
        for attempt in earlier:
            self._let_go(attempt, engine)
        for rank in ranks:
            room.ranks[rank].engine = engine
        if not self._settings.adopted:
            room.writing.add(engine)
        room.phases_s.setdefault("admit_to_begin", self._clock() - room.created_s)
        room.begin_by_s = None
        self._ports.events.emit(RoomBegun(**room.identity, engine=engine))
        self.show(room)
        self._open_room(room)
        return room

    def _take_tables(self, room: SenderRoom, tables: Tables) -> None:
        if not self._settings.adopted:
            if tables:
                raise InvalidInputError("this node owns its pools: `begin` takes no page tables, it returns them")
            return
        if room.tables:
            if not same_tables(room.tables, tables):
                raise ConflictError(
                    f"room {room.room} was begun with other page tables on another rank; all ranks name the same pages"
                )
            return
        tables_cover(tables, self._geometry, tokens=room.prompt_tokens)
        self._ports.book.adopt(room.owner, {space: table.ids for space, table in tables.items()})
        room.tables = tables

    def publish(
        self,
        engine: str,
        ranks: tuple[Rank, ...],
        room_id: int,
        *,
        upto_token: int,
        layers: tuple[int, ...] | None,
        after: Mapping[str, StreamPoint] | None = None,
    ) -> None:
        """An engine has made tokens final on its ranks. See RankProgress.publish for what is refused.

        `after`: the point at which they are, for each rank (by name) whose pages a GPU writes.
        """
        room = self.rooms.used_by(engine, room_id)
        self._require_alive(room)
        self._require_begun(room, engine, ranks)
        chosen = {rank: room.ranks[rank].own_layers(layers) for rank in ranks}
        unknown = sorted(set(layers or ()).difference(*(held or () for held in chosen.values())))
        if unknown:
            raise InvalidInputError(f"publish names layers {unknown}, which the ranks of this engine do not hold")
        for rank in ranks:
            room.ranks[rank].progress.check(upto_token, chosen[rank])
        for rank in ranks:
            room.ranks[rank].progress.publish(upto_token, chosen[rank])
            room.ranks[rank].note_point((after or {}).get(str(rank)))
        self.flush(room)

    def finish(
        self, engine: str, ranks: tuple[Rank, ...], room_id: int, *, metadata: bytes, by_gpu: bool = False
    ) -> None:
        """An engine has published everything; it does not write the room's pages any more.

        `by_gpu`: its GPU may still, until everything that was published has been sent, or until `release`.
        Raises ConflictError when it has not published everything, or when the room is over (the pages are let go of
        all the same).
        """
        room = self.rooms.used_by(engine, room_id)
        if room.over or room.stopping:
            if not by_gpu:
                self._let_go(room, engine)
            self._require_alive(room)
        self._require_begun(room, engine, ranks)
        for rank in ranks:
            work = room.ranks[rank]
            if work.finished:
                raise ConflictError(f"room {room_id} was already finished on rank {rank}")
            if not work.progress.complete:
                raise ConflictError(
                    f"room {room_id} cannot finish: rank {rank} has published {work.progress.published_tokens} "
                    f"of {room.prompt_tokens} tokens"
                )
        for rank in ranks:
            room.ranks[rank].finished = True
            room.ranks[rank].metadata = metadata
        self._ports.events.emit(RoomFinished(**room.identity, engine=engine))
        if not by_gpu:
            self._let_go(room, engine)
        self.settle(room)

    def release(self, engine: str, room_id: int, generation: int) -> None:
        """The GPU of an engine is through with an attempt that it has finished. Harmless when that is over and forgotten.

        Raises ConflictError for one that it has yet to finish.
        """
        room = self.rooms.find(room_id, generation)
        if room is None:
            return
        unfinished = any(work.engine == engine and not work.finished for work in room.ranks.values())
        if unfinished and not (room.over or room.stopping):
            raise ConflictError(f"room {room_id} is not finished by this engine; finish or abort it")
        self._let_go(room, engine)

    @staticmethod
    def _require_alive(room: SenderRoom) -> None:
        if room.over or room.stopping:
            raise ConflictError(f"room {room.room} is over: {room.reason or user_state(room)}")

    @staticmethod
    def _require_begun(room: SenderRoom, engine: str, ranks: tuple[Rank, ...]) -> None:
        for rank in ranks:
            if room.ranks[rank].engine != engine:
                raise ConflictError(f"room {room.room} was not begun on rank {rank} by this engine")

    # ------------------------------------------------------------------ peers

    def offer(self, peer: str, offer: Offer) -> None:
        """A decode node names the destination of a room, perhaps before the room is admitted here."""
        room = self.rooms.find(offer.room, offer.generation)
        if room is not None:
            self._take_offer(room, peer, offer)
            return
        newest = self.rooms.newest_generation(offer.room)
        if offer.generation < newest:
            stale = f"generation {offer.generation} of the room is older than {newest}, which prefill works on"
            self._refuse_offer(peer, offer, StaleError.code, stale)
            return
        turned_away = self._early.put(peer, offer)
        if turned_away is not None:
            self._refuse_offer(
                turned_away.peer,
                turned_away.offer,
                UnknownRoomError.code,
                "the room is not admitted on the prefill side, and another offer has taken this one's place",
            )

    def _take_offer(self, room: SenderRoom, peer: str, offer: Offer) -> None:
        if room.peer == peer:
            # Sent again, or a second thought: neither may end what the first offer began.
            self.refuse_message(peer, offer, "duplicate_offer")
            return
        if room.state is not SenderState.ADMITTED:
            why = room.reason or f"the room is already {user_state(room)} on the prefill side"
            self._refuse_offer(peer, offer, room.reason_code or ConflictError.code, why)
            return
        try:
            check_offer(offer, self._geometry, prompt_tokens=room.prompt_tokens)
        except BridgeError as error:
            self._refuse_offer(peer, offer, error.code, str(error))
            self.fail(room, error.code, str(error))
            return
        room.peer, room.destination, room.offered_s = peer, offer.tables, self._clock()
        room.peers = (self._ports.nodes.name(peer),)
        room.prefix_tokens, room.digest = offer.prefix_tokens, offer.digest
        trace = parse_traceparent(offer.traceparent)
        if room.trace is None and trace is not None:  # admitted by an engine, or by a caller that names no trace
            room.trace, room.ids = trace, {**room.ids, "trace_id": trace.trace_id}
        self._ports.events.emit(RoomOffered(**room.identity, trace=trace))
        room.phases_s["admit_to_offer_received"] = room.offered_s - room.created_s
        self.advance(room, SenderEvent.OFFER)
        self.settle(room)

    def _refuse_offer(self, peer: str, offer: Offer, code: str, message: str) -> None:
        """Nothing was ever written for this offer, nor will be: saying so at once is the truth."""
        self.refuse_message(peer, offer, code)
        text = message[:REASON_CHARS]
        self._ports.nodes.send(peer, Failed(room=offer.room, generation=offer.generation, code=code, message=text))
        self._ports.nodes.send(peer, Drained(room=offer.room, generation=offer.generation))

    def peer_abort(self, peer: str, message: Abort) -> None:
        """The decode side wants a room stopped. Always answered with Drained, at once or when it is quiet."""
        self._early.withdraw(peer, message.room, message.generation)
        room = self.rooms.find(message.room, message.generation)
        if room is None or room.peer != peer:
            # We do not write to this peer's pages of the room, and its offer, if any, is withdrawn. An Abort follows
            # its Offer on one ordered link, so a room that has taken no offer of this peer is not its to end.
            self._ports.nodes.send(peer, Drained(room=message.room, generation=message.generation))
            return
        self.stop(room, f"by the decode side: {message.message}", message.code)

    def peer_failed(self, peer: str, message: Failed) -> None:
        """Everything of a room was sent, and the decode side could not use it: too late to fail, not to say why."""
        room = self.rooms.find(message.room, message.generation)
        if room is not None and room.peer == peer and room.state is SenderState.COMPLETED:
            self.rejected(room, message.code, f"by the decode side: {message.message}")

    def peer_gone(self, peer: str, reason: str) -> None:
        """A decode node's process has ended, or it is silent: its rooms fail."""
        self._early.forget_peer(peer)
        for room in self.rooms:
            if room.peer == peer:
                why = f"the decode node is gone: {reason}"
                self.fail(room, PeerError.code, why)

    # ------------------------------------------------------------------ workers

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
            work.digests = DigestSums.of_room(self._geometry, prompt_tokens=prompt, prefix_tokens=prefix)
        try:
            work.digests.merge(message.digests)
        except BridgeError as error:
            self.fail(room, error.code, f"rank {message.rank}: {error}")

    def sent(self, message: Sent) -> None:
        """A worker ended an order."""
        room, work = self._rank_work(message)
        if room is None or work is None:
            return
        if not self.order_ended(room, message.rank, message.order, message):
            return
        room.in_transit = room.in_transit or message.in_transit
        if message.error_code or not message.quiet:
            code = message.error_code or TransportError.code
            self.fail(room, code, f"rank {message.rank}: {message.error}")
            return
        work.amounts = add_amounts(work.amounts, message.amounts)
        for phase, seconds in message.seconds.items():
            work.phases_s[phase] = work.phases_s.get(phase, 0.0) + seconds
        self.settle(room)

    def room_closed(self, message: RoomClosed) -> None:
        """A worker proved that nothing of a room is in flight."""
        room, work = self._rank_work(message)
        if room is None or work is None:
            return
        if not message.quiet:
            self.quarantine(room, Quarantine.NOT_QUIET, f"rank {message.rank}: {message.reason}")
            return
        self.closed(room, message.rank)
        self.advance(room)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """A rank worker's process ended, and with it everything that it had in flight."""
        for room in self.rooms:
            work = room.ranks.get(rank)
            if work is None:
                continue
            room.in_transit = room.in_transit or bool(work.outstanding)
            self.closed(room, rank)
            why = f"rank worker {rank} of the prefill node died: {reason}"
            self.fail(room, WORKER_GONE, why)

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """See Rooms; and refuse offers whose rooms are not admitted in time."""
        super().tick()
        for late in self._early.expired():
            why = "the room was never admitted on the prefill side (limit: timeouts.early_offer_s)"
            self._refuse_offer(late.peer, late.offer, UnknownRoomError.code, why)

    def __repr__(self) -> str:
        return f"<SenderRooms {self.rooms.states()} early offers: {len(self._early)}>"
