"""The pages of a prefill node's rooms: where an engine starts, which checkpoints it writes, and what stays in the cache.

A checkpoint serves later requests only: one that does not fit is left out, and the room goes on without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvbridge.core.errors import CapacityError, ConflictError, InvalidInputError
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.geometry.tiers import most_reusable_tokens, needs_checkpoints, wanted_checkpoints
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.wire.engine_messages import Checkpoint
from kvbridge.core.wire.messages import MAX_CHECKPOINTS, to_wire
from kvbridge.node.prefill.room import PrefillRoom
from kvbridge.node.room_pages import RoomPages
from kvbridge.pool.accounts.book import PageState


@dataclass(frozen=True, slots=True)
class PrefillPages(RoomPages):
    """The pages of all rooms of a prefill node. Called from the event loop's thread only."""

    computes: ClassVar[bool] = True

    def reserve_checkpoints(self, room: PrefillRoom) -> None:
        """Give a room pages for the checkpoints that its engine is to write, before its pages are leased."""
        if self.prefixes is None or not room.keys:
            return
        geometry, page = self.settings.geometry, self.settings.geometry.tokens_per_page
        reusable = most_reusable_tokens(geometry, room.prompt_tokens)
        room.checkpoint_causes = wanted_checkpoints(
            geometry,
            room.prompt_tokens,
            computed_tokens=room.computed_tokens,
            known_tokens=min(reusable, self.prefixes.known(room.keys.in_namespace(room.namespace)) * page),
            interval_tokens=self.settings.checkpoint_interval_tokens,
        )
        for tokens in reversed(tuple(room.checkpoint_causes)[-MAX_CHECKPOINTS:]):
            if tokens == room.prompt_tokens:  # the engine leaves the room's own windows exactly there
                room.checkpoints[tokens] = room.tables[IndexSpace.SWA]
                continue
            live = window_pages(geometry, tokens)
            try:
                ids = self.book.grow(room.owner, {IndexSpace.SWA: len(live)})[IndexSpace.SWA]
            except (CapacityError, InvalidInputError):  # not now, or never in a pool of this size
                return
            room.checkpoints[tokens] = PageTable(IndexSpace.SWA, ids, live.start)

    def restorable(self, room: PrefillRoom) -> tuple[int, ...]:
        """Return the tokens at which the engine of a room can start: 0, and where all that it needs is cached."""
        geometry, ends = self.settings.geometry, range(1, 1)
        page = geometry.tokens_per_page
        if self.prefixes is not None and room.computed_tokens:
            if needs_checkpoints(geometry):
                return (0, *(whole * page for whole in self.prefixes.checkpoints(room.owner)))
            ends = range(1, room.computed_tokens // page + 1)
        return (0, *(whole * page for whole in ends))

    def start_at_most(self, room: PrefillRoom, tokens: int) -> None:
        """Let the engine of a room start at no more than so many tokens.

        Raises ConflictError when the room was begun with more or its prefix is being sent, CapacityError when there are no pages
        for the further tokens that the engine computes.
        """
        if room.computed_tokens <= tokens or self.prefixes is None:
            return
        if room.begun or room.open_ranks:
            raise ConflictError(
                f"room {room.room} starts at {room.computed_tokens} tokens, not at {tokens} or less: "
                + ("it was begun so on another rank" if room.begun else "these are being sent already")
            )
        geometry = self.settings.geometry
        left = max(end for end in self.restorable(room) if end <= tokens) // geometry.tokens_per_page
        got = self.prefixes.shorten(room.owner, left, from_checkpoint=needs_checkpoints(geometry))
        for space, ids in got.own.items():  # pages of its own, in the place of those that it read
            both, shared = room.tables[space].ids, room.shared_pages[space]
            room.tables[space] = PageTable(space, np.concatenate((both[: min(left, shared)], ids, both[shared:])))
        self.set_prefix(room, got)
        room.start_work({rank: work.progress.layers for rank, work in room.ranks.items()})

    def told(self, room: PrefillRoom) -> dict[str, Any]:
        """Return the fields of the answer to `begin`: where the engine starts, and which checkpoints it writes."""
        restore = None
        if room.checkpoint is not None and len(room.checkpoint):
            first_page = window_pages(self.settings.geometry, room.computed_tokens).start
            restore = _on_wire(room.computed_tokens, PageTable(IndexSpace.SWA, room.checkpoint, first_page))
        checkpoints = tuple(_on_wire(tokens, room.checkpoints[tokens]) for tokens in room.asked_checkpoints)
        load = to_wire(room.load.host_copies if room.load else {})
        return {"restore": restore, "checkpoints": checkpoints, "load": load}

    def keep_written(self, room: PrefillRoom) -> None:
        """Cache the whole pages and the checkpoints of a room that is over, if every engine has written all of them.

        Nothing of the room is in flight, and no engine uses its pages any more. A disputed prompt is not cached.
        """
        if self.prefixes is None or not room.keys or not all(work.written for work in room.ranks.values()):
            return
        if room.disputed_page is not None:
            return
        if self.book.state(room.owner) is PageState.LEASED:
            self.hold(room)
        if self.book.state(room.owner) is not PageState.HELD:
            return
        self.restored(room)  # later pages stay only if the loaded ones do
        self.keep(room, room.keys)
        written = frozenset.intersection(*(work.checkpoints for work in room.ranks.values())) | {room.prompt_tokens}
        for tokens in sorted(written & room.checkpoints.keys()):
            whole = tokens // self.settings.geometry.tokens_per_page
            if whole <= self.prefixes.reads(room.owner):  # else the pages before it have been dropped meanwhile
                self.prefixes.keep_checkpoint(room.owner, whole, room.checkpoints[tokens].ids)


def _on_wire(tokens: int, table: PageTable) -> Checkpoint:
    return Checkpoint(tokens=tokens, table=to_wire({table.space: table})[0])
