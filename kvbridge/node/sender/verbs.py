"""The verbs of prefill engines: begin, finish, release (`orders` has publish)."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.pages import tables_hold
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import Tables
from kvbridge.core.wire.engine_messages import AskRestorable, Begin, Finish, Loaded, Pages, Release, Restorable
from kvbridge.node.driver import RoomDriver
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.prompt_keys import require_same_prompt
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.checkpoints import RoomCheckpoints
from kvbridge.node.sender.orders import Orders
from kvbridge.node.sender.room import SenderRoom
from kvbridge.node.sender.workers import SenderWorkers
from kvbridge.telemetry.events import RoomBegun, RoomFinished


@dataclass(frozen=True, slots=True)
class SenderVerbs:
    """Called from the event loop's thread only."""

    rooms: RoomBook[SenderRoom]
    driver: RoomDriver[SenderRoom]
    pages: RoomPages
    orders: Orders
    workers: SenderWorkers
    checkpoints: RoomCheckpoints
    clock: Clock

    def restorable(self, _: AttachedEngine, message: AskRestorable) -> Restorable:
        """An engine asks where it could start, before it begins."""
        room = self.rooms.get(message.room)
        room.require_alive()
        return Restorable(call=message.call, tokens=self.checkpoints.restorable(room))

    def begin(self, engine: AttachedEngine, message: Begin) -> Pages:
        """An engine starts to compute a room on its ranks. Raises ConflictError on a second begin.

        Raises KeyMismatchError, and the room fails, when the engine has other tokens than the room's page keys name.

        With that it has let go of every earlier attempt at the room, unless a GPU writes for it (`by_gpu`): then it is refused
        with a ConflictError until it has aborted that.
        """
        room = self.rooms.get(message.room)
        tables = tables_from_wire(message.tables)
        room.require_alive()
        if message.prompt_tokens != room.prompt_tokens:
            raise InvalidInputError(
                f"room {room.room} was admitted with {room.prompt_tokens} prompt tokens, "
                f"the engine begins it with {message.prompt_tokens}"
            )
        page, end_keys = self.pages.settings.geometry.tokens_per_page, [work.end_key for work in room.ranks.values()]
        require_same_prompt(self.driver, room, message, page, end_keys=end_keys)
        for rank in engine.ranks:
            if room.ranks[rank].engine:
                raise ConflictError(
                    f"room {room.room} was already begun on rank {rank} by engine {room.ranks[rank].engine}"
                )
        earlier = [attempt for attempt in self.rooms.attempts(room.room)[:-1] if engine.name in attempt.writing]
        if earlier and message.by_gpu:
            raise ConflictError(
                f"an earlier attempt at room {room.room} (generation {earlier[0].generation}) may still be written by this "
                "engine's GPU; abort it first"
            )
        self._take_tables(room, tables, message.computed_tokens)
        if message.at_most is not None:
            self.checkpoints.start_at_most(room, message.at_most)
        for attempt in earlier:
            self.driver.let_go(attempt, engine.name)
        for rank in engine.ranks:
            room.ranks[rank].engine, room.ranks[rank].end_key = engine.name, message.end_key
        if not self.pages.settings.adopted:
            room.writing.add(engine.name)
        room.phases_s.setdefault("admit_to_begin", self.clock() - room.created_s)
        room.begin_by_s = None
        self.driver.facts.events.emit(RoomBegun(**room.identity, engine=engine.name))
        self.driver.facts.show(room)
        self.orders.open(room)
        return self.checkpoints.tell(room, self.driver.facts.pages(message.call, room))

    def loaded(self, engine: AttachedEngine, message: Loaded) -> None:
        """What a room shares out of host memory is in its own pages on the ranks of an engine. Harmless when it is over.

        It is told for the figures: others share those pages when the room is over, as they do all that its engines have written.
        """
        room = self.rooms.find(message.room, message.generation)
        if room is not None and room.load is not None:
            self.pages.loaded(room, engine.ranks, message, of=room.ranks)

    def _take_tables(self, room: SenderRoom, tables: Tables, computed_tokens: int) -> None:
        if not self.pages.settings.adopted:
            if tables or computed_tokens:
                raise InvalidInputError(
                    "this node owns its pools: `begin` takes no page tables, and no computed_tokens; it returns them"
                )
            return
        if computed_tokens > room.prompt_tokens:
            raise InvalidInputError(
                f"computed_tokens must be at most the {room.prompt_tokens} tokens of the prompt, got {computed_tokens}"
            )
        if room.begun and room.computed_tokens != computed_tokens:
            raise ConflictError(
                f"room {room.room} was begun with {room.computed_tokens} computed_tokens on another rank, not {computed_tokens}; "
                "all ranks read and write the same pages"
            )
        tables_hold(tables, self.pages.settings.geometry, tokens=computed_tokens)
        self.orders.take_pages(room, tables, cached_tokens=computed_tokens)
        room.computed_tokens = computed_tokens

    def finish(self, engine: AttachedEngine, message: Finish) -> None:
        """An engine has published everything; it does not write the room's pages any more.

        `by_gpu`: its GPU may still, until everything that was published has been sent, or until `release`.
        Raises ConflictError when it has not published everything, or when the room is over (the pages are let go of
        all the same).
        """
        room = self.rooms.used_by(engine.name, message.room)
        if room.over or room.stopping:
            if not message.by_gpu:
                self.driver.let_go(room, engine.name)
            room.require_alive()
        room.require_begun(engine.name, engine.ranks)
        for rank in engine.ranks:
            work = room.ranks[rank]
            if work.finished:
                raise ConflictError(f"room {room.room} was already finished on rank {rank}")
            if not work.progress.complete:
                raise ConflictError(
                    f"room {room.room} cannot finish: rank {rank} has published {work.progress.published_tokens} "
                    f"of {room.prompt_tokens} tokens"
                )
        self.checkpoints.check(room, message.checkpoints)
        for rank in engine.ranks:
            work = room.ranks[rank]
            work.finished, work.written = True, not message.by_gpu
            work.metadata, work.checkpoints = message.metadata, frozenset(message.checkpoints)
        self.driver.facts.events.emit(RoomFinished(**room.identity, engine=engine.name))
        if not message.by_gpu:
            self.driver.let_go(room, engine.name)
        self.workers.settle(room)

    def release(self, engine: AttachedEngine, message: Release) -> None:
        """The GPU of an engine is through with an attempt that it has finished. Harmless when that is over and forgotten.

        Raises ConflictError for one that it has yet to finish.
        """
        room = self.rooms.find(message.room, message.generation)
        if room is None:
            return
        unfinished = any(work.engine == engine.name and not work.finished for work in room.ranks.values())
        if unfinished and not (room.over or room.stopping):
            raise ConflictError(f"room {room.room} is not finished by this engine; finish or abort it")
        for work in room.ranks.values():
            work.written = work.written or (work.finished and work.engine == engine.name)
        self.driver.let_go(room, engine.name)
