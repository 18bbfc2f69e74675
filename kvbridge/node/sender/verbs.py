"""The verbs of prefill engines: begin, publish, finish, release.

Owns: what an engine may say about a room of a prefill node, and in which order it makes sense. Must not know: sockets, how bytes
move, what a transition leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.pages import tables_cover
from kvbridge.core.geometry.tables import same_tables
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.node.driver import RoomDriver
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.orders import Completion, Orders
from kvbridge.node.sender.room import SenderRoom, user_state


@dataclass(frozen=True, slots=True)
class SenderVerbs:
    """Called from the event loop's thread only."""

    rooms: RoomBook[SenderRoom]
    driver: RoomDriver[SenderRoom]
    pages: RoomPages
    orders: Orders
    completion: Completion
    clock: Clock

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
            self.driver.let_go(attempt, engine)
        for rank in ranks:
            room.ranks[rank].engine = engine
        if not self.pages.settings.adopted:
            room.writing.add(engine)
        room.phases_s.setdefault("admit_to_begin", self.clock() - room.created_s)
        room.begin_by_s = None
        self.driver.facts.show(room)
        self.orders.open(room)
        return room

    def _take_tables(self, room: SenderRoom, tables: Tables) -> None:
        if not self.pages.settings.adopted:
            if tables:
                raise InvalidInputError("this node owns its pools: `begin` takes no page tables, it returns them")
            return
        if room.tables:
            if not same_tables(room.tables, tables):
                raise ConflictError(
                    f"room {room.room} was begun with other page tables on another rank; all ranks name the same pages"
                )
            return
        tables_cover(tables, self.pages.settings.geometry, tokens=room.prompt_tokens)
        self.pages.adopt(room, tables)

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
        self.orders.flush(room)

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
                self.driver.let_go(room, engine)
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
        if not by_gpu:
            self.driver.let_go(room, engine)
        self.completion.settle(room)

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
        self.driver.let_go(room, engine)

    @staticmethod
    def _require_alive(room: SenderRoom) -> None:
        if room.over or room.stopping:
            raise ConflictError(f"room {room.room} is over: {room.reason or user_state(room)}")

    @staticmethod
    def _require_begun(room: SenderRoom, engine: str, ranks: tuple[Rank, ...]) -> None:
        for rank in ranks:
            if room.ranks[rank].engine != engine:
                raise ConflictError(f"room {room.room} was not begun on rank {rank} by this engine")
