"""Checkpoints of rooms on a prefill node: which one the engine starts from, which ones it writes, and which ones stay in the cache.

A checkpoint serves later requests only: one that does not fit is left out, and the room goes on without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import CapacityError, ConflictError, InvalidInputError
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.geometry.tiers import most_reusable_tokens, needs_checkpoints, wanted_checkpoints
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.wire.engine_messages import Checkpoint
from kvbridge.core.wire.messages import MAX_CHECKPOINTS, to_wire
from kvbridge.node.prefill.room import PrefillRoom
from kvbridge.node.room_pages import RoomPages
from kvbridge.pool.accounts.pages import PageState


@dataclass(frozen=True, slots=True)
class RoomCheckpoints:
    """The checkpoints of all rooms. Called from the event loop's thread only."""

    pages: RoomPages

    def admitted(self, room: PrefillRoom) -> None:
        """Give a room pages for the checkpoints that its engine is to write, before its pages are leased."""
        prefixes, settings = self.pages.prefixes, self.pages.settings
        if prefixes is None:
            return
        geometry, page = settings.geometry, settings.geometry.tokens_per_page
        reusable = most_reusable_tokens(geometry, room.prompt_tokens)
        ends = wanted_checkpoints(
            geometry,
            room.prompt_tokens,
            computed_tokens=room.computed_tokens,
            known_tokens=min(reusable, prefixes.known(room.keys.in_namespace(room.namespace)) * page),
            interval_tokens=settings.checkpoint_interval_tokens,
        )
        room.checkpoint_causes = ends
        for tokens in reversed(tuple(ends)[-MAX_CHECKPOINTS:]):
            if tokens == room.prompt_tokens:  # the engine leaves the room's own windows exactly there
                room.checkpoints[tokens] = room.tables[IndexSpace.SWA]
                continue
            live = window_pages(geometry, tokens)
            try:
                ids = self.pages.book.grow(room.owner, {IndexSpace.SWA: len(live)})[IndexSpace.SWA]
            except (CapacityError, InvalidInputError):  # not now, or never in a pool of this size
                return
            room.checkpoints[tokens] = PageTable(IndexSpace.SWA, ids, live.start)

    def restorable(self, room: PrefillRoom) -> tuple[int, ...]:
        """Return the tokens at which the engine of a room can start: 0, and where all that it needs is cached."""
        page, ends = self.pages.settings.geometry.tokens_per_page, range(1, 1)
        if (prefixes := self.pages.prefixes) is not None and room.computed_tokens:
            if needs_checkpoints(self.pages.settings.geometry):
                return (0, *(whole * page for whole in prefixes.checkpoints(room.owner)))
            ends = range(1, room.computed_tokens // page + 1)
        return (0, *(whole * page for whole in ends))

    def start_at_most(self, room: PrefillRoom, tokens: int) -> None:
        """Let the engine of a room start at no more than so many tokens.

        Raises ConflictError when the room was begun with more or its prefix is being sent, CapacityError when there are no pages
        for the further tokens that the engine computes.
        """
        if room.computed_tokens <= tokens:
            return
        if room.begun or room.open_ranks:
            raise ConflictError(
                f"room {room.room} starts at {room.computed_tokens} tokens, not at {tokens} or less: "
                + ("it was begun so on another rank" if room.begun else "these are being sent already")
            )
        self.pages.shorten(room, max(end for end in self.restorable(room) if end <= tokens))
        for work in room.ranks.values():
            layers = work.progress.layers
            work.progress = RankProgress(
                layers, prompt_tokens=room.prompt_tokens, computed_tokens=room.published_tokens
            )

    def told(self, room: PrefillRoom) -> dict[str, Any]:
        """Return the fields of the answer to `begin`: where the engine starts, and which checkpoints it writes."""
        wanted = [(tokens, table) for tokens, table in sorted(room.checkpoints.items()) if tokens < room.prompt_tokens]
        restore = None
        if room.checkpoint is not None and len(room.checkpoint):
            first_page = window_pages(self.pages.settings.geometry, room.computed_tokens).start
            restore = _on_wire(room.computed_tokens, PageTable(IndexSpace.SWA, room.checkpoint, first_page))
        checkpoints = tuple(_on_wire(tokens, table) for tokens, table in wanted)
        return {
            "restore": restore,
            "checkpoints": checkpoints,
            "load": to_wire(room.load.host_copies if room.load else {}),
        }

    @staticmethod
    def check(room: PrefillRoom, written: tuple[int, ...]) -> None:
        """Raise InvalidInputError for a checkpoint that was not asked for: the engine has written to pages that nobody gave it."""
        asked = {tokens for tokens in room.checkpoints if tokens < room.prompt_tokens}
        unknown = sorted(set(written) - asked)
        if unknown:
            raise InvalidInputError(
                f"finish names checkpoints at {unknown} tokens of room {room.room} that `begin` did not ask for; it asked for "
                f"{sorted(asked)}"
            )

    def keep(self, room: PrefillRoom) -> None:
        """Cache the whole pages and the checkpoints of a room that is over, if every engine has written all of them.

        Nothing of the room is in flight, and no engine uses its pages any more. A disputed prompt is not cached.
        """
        prefixes, book = self.pages.prefixes, self.pages.book
        if prefixes is None or not room.keys or not all(work.written for work in room.ranks.values()):
            return
        if room.disputed_page is not None:
            return
        if book.state(room.owner) is PageState.LEASED:
            self.pages.hold(room)
        if book.state(room.owner) is not PageState.HELD:
            return
        self.pages.restored(room)  # later pages stay only if the loaded ones do
        self.pages.keep(room, room.keys)
        written = frozenset.intersection(*(work.checkpoints for work in room.ranks.values())) | {room.prompt_tokens}
        for tokens in sorted(written & room.checkpoints.keys()):
            whole = tokens // self.pages.settings.geometry.tokens_per_page
            if whole > prefixes.reads(room.owner):
                continue  # the pages before it have been dropped meanwhile
            prefixes.keep_checkpoint(room.owner, whole, room.checkpoints[tokens].ids)


def _on_wire(tokens: int, table: PageTable) -> Checkpoint:
    return Checkpoint(tokens=tokens, table=to_wire({table.space: table})[0])
