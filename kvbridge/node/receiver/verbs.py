"""The verbs of decode engines: provide, claim, extend, release."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import ConflictError, InvalidInputError, RoomFailedError
from kvbridge.core.geometry.pages import tables_cover
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.receiver import ReceiverEvent, ReceiverState
from kvbridge.core.wire.engine_messages import Claim, Extend, Loaded, Pages, Provide, Release
from kvbridge.core.wire.messages import to_wire
from kvbridge.node.driver import RoomDriver
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.prompt_keys import Answer, answer_of, require_same_prompt
from kvbridge.node.receiver.peers import RoomWriters
from kvbridge.node.receiver.room import BEFORE_COMMIT, ReceiverRoom, user_state
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.telemetry.events import SparseDecoded


@dataclass(frozen=True, slots=True)
class ReceiverVerbs:
    """Called from the event loop's thread only."""

    rooms: RoomBook[ReceiverRoom]
    driver: RoomDriver[ReceiverRoom]
    pages: RoomPages
    writers: RoomWriters
    clock: Clock

    def provide(self, _engine: AttachedEngine, message: Provide) -> None:
        """Adopted pools: the engine names the device pages of a room that wanted them, and what they hold already."""
        room, tables = self.rooms.get(message.room), tables_from_wire(message.tables)
        if not self.pages.settings.adopted:
            raise ConflictError("this node owns its pools: pages are not provided by the engine")
        if room.state not in {ReceiverState.AWAITING_PAGES, ReceiverState.INTENDED}:
            raise ConflictError(f"room {room.room} does not wait for pages (state '{user_state(room)}')")
        if IndexSpace.HOST in tables:
            raise InvalidInputError("host pages belong to the daemon; provide device spaces only")
        self._check_prefix(message.prefix_tokens, room.prompt_tokens)
        settings = self.pages.settings
        tables_cover(
            room.tables | tables,
            settings.geometry,
            tokens=room.prompt_tokens,
            host=settings.host,
            prefix_tokens=message.prefix_tokens,
        )
        self.pages.adopt(room, tables, cached_tokens=message.prefix_tokens, written_by_peers=True)
        room.prefix_tokens = message.prefix_tokens
        self.driver.advance(room, ReceiverEvent.PAGES)
        self.writers.find(room)

    def _check_prefix(self, prefix_tokens: int, prompt_tokens: int) -> None:
        page = self.pages.settings.geometry.tokens_per_page
        if prefix_tokens > prompt_tokens or prefix_tokens % page:
            raise InvalidInputError(
                f"prefix_tokens must be a multiple of {page} and at most prompt_tokens ({prompt_tokens}), "
                f"got {prefix_tokens}"
            )
        if prefix_tokens and self.pages.settings.host:
            raise InvalidInputError(
                f"{', '.join(sorted(self.pages.settings.host))} of the room lies in this node's host pool, in pages that hold "
                f"nothing of the prompt yet: prefix_tokens must be 0 here, got {prefix_tokens}"
            )

    def claim(self, engine: AttachedEngine, message: Claim) -> Pages:
        """An engine takes a committed room. Raises RoomFailedError with the first cause when it will never be.

        Raises KeyMismatchError, and the room fails, when the engine has other tokens than the room's page keys name.
        """
        room_id = message.room
        room = self.rooms.get(room_id)
        if any(engine.name in earlier.users for earlier in self.rooms.attempts(room_id)[:-1]):
            raise ConflictError(
                f"an earlier attempt at room {room_id} is still claimed by this engine; release it first"
            )
        if room.state not in {ReceiverState.COMMITTED, ReceiverState.CLAIMED}:
            if room.state in BEFORE_COMMIT:
                raise ConflictError(f"room {room_id} is not committed yet (state '{user_state(room)}')")
            raise RoomFailedError(f"room {room_id} is over ({user_state(room)}): {room.reason or 'released'}")
        if engine.name in room.claimed_by:
            raise ConflictError(f"room {room_id} was already claimed by this engine")
        require_same_prompt(self.driver, room, message, self._tokens_per_page, end_keys=room.end_keys)
        room.end_keys.add(message.end_key)
        if room.state is ReceiverState.COMMITTED:
            serving = self.driver.facts.engines.serving()
            room.expected = {name: frozenset(ranks) for name, ranks in serving.items()}
            room.claimed_s = self.clock()
            room.phases_s["commit_to_claim"] = room.claimed_s - room.committed_s
            ended_s = {
                "commit_to_claim": room.claimed_s - room.committed_s,
                "admit_to_claim": room.claimed_s - room.created_s,
            }
            self.driver.facts.phases_ended(room, ended_s)
        room.claimed_by.add(engine.name)
        room.claimed_ranks.update(engine.ranks)
        self.driver.advance(room, ReceiverEvent.CLAIM)
        if not room.awaited:
            room.wait_until(None)  # nobody is waited for any more: the engines use it
        told = {"metadata": room.metadata, "amounts": room.amounts, "phases_s": room.phases_s}
        told["load"] = to_wire(room.load.twins if room.load else {})
        return self.driver.facts.pages(message.call, room).model_copy(update=told)

    def loaded(self, engine: AttachedEngine, message: Loaded) -> None:
        """What a claimed room shares out of host memory is in its own pages on the ranks of an engine. Harmless when it is over.

        When it is on all ranks, others share those pages, and the rest of the prompt behind them.
        """
        room = self.rooms.find(message.room, message.generation)
        if (
            room is None
            or room.load is None
            or room.state is not ReceiverState.CLAIMED
            or engine.name not in room.users
        ):
            return
        if self.pages.loaded(room, engine.ranks, message, of=self.writers.workers.layers):
            self.pages.restored(room)
            if room.is_same_prompt:
                self.pages.keep(room, room.keys)

    def _held(self, engine: AttachedEngine, room_id: int) -> ReceiverRoom:
        """Return the room that an engine has claimed and not released. Raises ConflictError when it has not."""
        room = self.rooms.used_by(engine.name, room_id)
        if engine.name not in room.users:
            raise ConflictError(f"room {room_id} is not claimed by this engine (state '{user_state(room)}')")
        return room

    def extend(self, engine: AttachedEngine, message: Extend) -> Pages:
        """Make room for so many tokens in all and return the tables for that length. Raises CapacityError."""
        room, tokens = self._held(engine, message.room), message.tokens
        if room.state is not ReceiverState.CLAIMED:
            raise ConflictError(f"room {room.room} is to end and cannot grow: {room.reason}; release it")
        if tokens < room.prompt_tokens:
            raise InvalidInputError(
                f"room {room.room} cannot shrink to {tokens} tokens, its prompt has {room.prompt_tokens}"
            )
        if tokens > room.reserved_tokens:
            self.pages.grow(room, tokens)
            room.reserved_tokens = tokens
        return self.driver.facts.pages(message.call, room)

    def release(self, engine: AttachedEngine, message: Release) -> None:
        """An engine is through with a room. The pages are free once every engine that claimed it, or is to, is.

        What it says of the answer counts once all say the same. Whatever is wrong with that, InvalidInputError, KeyMismatchError or
        ConflictError tells it, and it has let go of the pages all the same.
        """
        room = self._held(engine, message.room)
        if message.sparse is not None:
            self.driver.facts.events.emit(SparseDecoded(**room.identity, rows=message.sparse.model_dump()))
        try:
            said = answer_of(room, message.valid_tokens, message.page_hashes, self._tokens_per_page)
            self._check_answer(room, said)
            room.answers[engine.name] = said
            if said is not None:
                room.answered_by.update(engine.ranks)
        finally:
            self.driver.let_go(room, engine.name)

    def _check_answer(self, room: ReceiverRoom, said: Answer | None) -> None:
        if said is None:
            return
        if said.valid_tokens > room.reserved_tokens:
            raise InvalidInputError(
                f"valid_tokens is {said.valid_tokens}, but the pages of room {room.room} hold {room.reserved_tokens} tokens"
            )
        for other, heard in room.answers.items():
            if heard != said:
                raise ConflictError(
                    f"nothing of the answer of room {room.room} is kept: engine {other} has released it with valid_tokens="
                    f"{heard.valid_tokens if heard else 0}, this one with {said.valid_tokens}, or with other keys; all engines of "
                    "a node have to say the same"
                )

    @property
    def _tokens_per_page(self) -> int:
        return self.pages.settings.geometry.tokens_per_page
