"""The pages of a node's rooms: how many a room needs, which ones are cached, who may touch them, and when they go back.

A room with page keys reads cached pages of the beginning of its prompt, in front of pages of its own. Only its own pages are leased
and quarantined. The room lets go of the cached ones when its own go back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from kvbridge.config.limits import DaemonTimeouts
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.pages import (
    GROWING_SPACES,
    check_demand,
    joined_tables,
    pages_needed,
    request_tables,
    window_pages,
)
from kvbridge.core.geometry.tiers import most_reusable_tokens, needs_checkpoints, wanted_checkpoints
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire.engine_messages import Checkpoint, Loaded
from kvbridge.core.wire.messages import MAX_CHECKPOINTS, to_wire
from kvbridge.node.room import Load, Quarantine, Room
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.pool.accounts.book import PageBook, PageState
from kvbridge.telemetry.facts import CopyEnded, DisputedPagesDropped, EventStream, PrefixMatched, RoomQuarantined
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import Admitted, PrefixCache
from kvbridge.tier.retention import Claim

if TYPE_CHECKING:
    from kvbridge.node.prefill.room import PrefillRoom

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSettings:
    """The settings of all rooms of a node."""

    geometry: ModelGeometry
    limits: DaemonTimeouts
    shares_prefixes: bool = False
    """Rooms keep the page keys of their admission. Engines have to state the same, and a cache keeps pages under them."""
    keeps_answers: bool = True
    """Decode: the cache keeps pages of generated answers, too (`tier.generated`)."""
    computes: bool = False
    """Prefill: an engine continues after a prefix, from the checkpoint there, and computes at least one token."""
    checkpoint_interval_tokens: int = 0
    """Prefill: engines write a checkpoint every so many tokens of a prompt, too (0: they do not)."""
    part_of_instance: bool = False
    """Prefill: other nodes have ranks of the same instance, and all ranks start at the same token of a room."""
    adopted: bool = False
    """Engines bring the device memory and name its pages; otherwise pages are reserved at admission."""
    host: frozenset[ComponentKind] = frozenset()
    """Decode: the components that live in host memory."""
    digest: DigestKind = DigestKind.NONE
    """Decode: writers and the ranks of this node compute it, and a room commits when both are equal."""


@dataclass(frozen=True, slots=True)
class RoomPages:
    """The pages of all rooms. Called from the event loop's thread only."""

    book: PageBook
    settings: RoomSettings
    events: EventStream
    prefixes: PrefixCache | None = None
    """None: nothing is shared here, and rooms have no keys."""
    store: StoredPrefixes | None = None
    """None: the node has no store below host memory."""

    @property
    def hands_over(self) -> bool:
        """Decode: whether no page of a room is this node's own: a committed room is then the engine's without a claim."""
        return not self.book.owned_spaces

    def needed(self, tokens: int, prompt_tokens: int) -> dict[IndexSpace, int]:
        """Return the pages to give out for `tokens` tokens. Raises InvalidInputError when the pools are too small for them."""
        settings = self.settings
        needed = pages_needed(settings.geometry, tokens=tokens, prompt_tokens=prompt_tokens, host=settings.host)
        check_demand(needed)
        self.book.require_possible(needed)
        owned = self.book.owned_spaces
        needed = {space: count for space, count in needed.items() if space in owned}
        if not self.settings.computes and IndexSpace.REQUEST in owned:
            needed.setdefault(IndexSpace.REQUEST, 1)  # a slot of the hot buffer, where the model's own state needs none
        return needed

    def reserve(self, room: Room[Any], demand: Mapping[IndexSpace, int]) -> None:
        """Give a room the longest cached prefix of its prompt, and pages of its own for the rest; all or nothing.

        `demand`: the pages that the room needs without a prefix. Its tables have both, the prefix first. Raises CapacityError.
        """
        geometry, prompt_tokens = self.settings.geometry, room.prompt_tokens
        if self.prefixes is None or not room.keys:
            room.tables = request_tables(geometry, self.book.reserve(room.owner, demand), prompt_tokens=prompt_tokens)
            return
        names = room.keys.in_namespace(room.namespace)
        got = self.prefixes.admit(
            room.owner,
            names,
            lambda shared: {space: count - shared.get(space, 0) for space, count in demand.items()},
            at_most=len(self.shareable(names, prompt_tokens)),
            from_checkpoint=self.settings.computes and needs_checkpoints(geometry),
        )
        if room.retention is not None:
            self.prefixes.retain(room.owner, Claim(room.namespace, room.retention))
        both = {
            space: np.concatenate([got.prefix[space], own]) if space in got.prefix else own
            for space, own in got.own.items()
        }
        room.tables = request_tables(geometry, both, prompt_tokens=prompt_tokens)
        self.set_prefix(room, got)
        hit_tokens = got.prefix_pages * geometry.tokens_per_page
        self.events.emit(
            PrefixMatched(
                **room.identity,
                hit_tokens=hit_tokens,
                miss_tokens=prompt_tokens - hit_tokens,
                from_checkpoint=bool(len(got.checkpoint) or len(got.checkpoint_copy)),
                host_tokens=room.host_tokens,
            )
        )

    def shareable(self, keys: Keys, prompt_tokens: int) -> Keys:
        """Return the keys whose pages a room can share. On prefill at least one token is left to compute."""
        return keys[: (prompt_tokens - self.settings.computes) // self.settings.geometry.tokens_per_page]

    def loaded(self, room: Room[Any], ranks: Iterable[Rank], said: Loaded, *, of: Collection[Rank]) -> bool:
        """Note that an engine has loaded a room's host pages on these ranks; return whether all ranks `of` the room have now."""
        load = room.load
        if load is None or load.ranks.issuperset(ranks):
            return False
        load.ranks.update(ranks)
        load.bytes += said.bytes
        load.seconds = max(load.seconds, said.seconds)
        if not load.ranks.issuperset(of):
            return False
        self.load_ended(room, load.bytes, load.seconds)
        return True

    def load_ended(
        self, room: Room[Any], size_bytes: int = 0, seconds: float = 0.0, *, code: str = "", reason: str = ""
    ) -> None:
        """Tell that engines have loaded a room's pages from host memory, or why one cannot and gives the room up."""
        pages = room.host_tokens // self.settings.geometry.tokens_per_page
        about = {"direction": "load_back", "code": code, "reason": reason}
        self.events.emit(CopyEnded(**about, pages=pages, bytes=size_bytes, busy_s=seconds, seconds=seconds))

    def restored(self, room: Room[Any]) -> None:
        """Cache the pages that a room has loaded from host memory, by its engines' proof."""
        if self.prefixes is None or room.load is None:
            return
        load, room.load = room.load, None
        ids = {space: own for space, (own, _) in load.moves.items()}
        checkpoint = ids.pop(IndexSpace.SWA, None)
        if ids:
            self.prefixes.restored(room.owner, load.first_page, ids)
        if checkpoint is not None:
            page_count = room.computed_tokens // self.settings.geometry.tokens_per_page
            self.prefixes.keep_checkpoint(room.owner, page_count, checkpoint)

    def set_prefix(self, room: Room[Any], got: Admitted) -> None:
        """Note the cached pages of a room whose tables are complete."""
        page = self.settings.geometry.tokens_per_page
        if self.settings.computes:
            room.computed_tokens = got.prefix_pages * page
            room.checkpoint = got.checkpoint_own if len(got.checkpoint_own) else got.checkpoint
        else:
            room.prefix_tokens = got.prefix_pages * page
        room.host_tokens = (got.prefix_pages - got.device_pages) * page
        room.shared_pages = {space: len(ids) for space, ids in got.prefix.items()}
        moves = {
            space: (room.tables[space].ids[got.device_pages : got.prefix_pages], got.copies[twin])
            for space, twin in HOST_COPIES.items()
            if twin in got.copies
        }
        if len(got.checkpoint_copy):
            moves[IndexSpace.SWA] = got.checkpoint_own, got.checkpoint_copy
        room.load = Load(got.device_pages, moves) if moves else None

    def own_tables(self, room: Room[Any]) -> Tables:
        """Return the tables of a room behind its `prefix_tokens`, which nobody may write."""
        prefix_pages = room.prefix_tokens // self.settings.geometry.tokens_per_page  # adopted ones, too
        return {
            space: PageTable(space, table.ids[prefix_pages - table.first_page :], prefix_pages)
            if space in GROWING_SPACES
            else table
            for space, table in room.tables.items()
        }

    def keep(self, room: Room[Any], keys: Keys) -> None:
        """Cache the whole pages of `keys` that the room does not share yet.

        The pages are held and final: nobody writes them any more. The room goes on reading them.
        """
        if self.prefixes is None or room.owner not in self.prefixes:
            return
        start = self.prefixes.reads(room.owner)
        if len(keys) <= start:
            return
        pages = {space: room.tables[space].ids[start : len(keys)] for space in self.prefixes.index.spaces}
        try:
            self.prefixes.keep(room.owner, keys.in_namespace(room.namespace), start, pages)
        except BridgeError:  # a defect, but the cache only saves later requests time, so no room fails
            log.exception("prefix_not_kept", **room.identity)

    def drop_disputed(self, room: Room[Any]) -> None:
        """Take the room's pages out of cache and store, from the disputed page on, with all prompts that continue there."""
        page = room.disputed_page
        if self.prefixes is None or page is None or room.owner not in self.prefixes:
            return
        dropped, links = self.prefixes.drop_kept(room.owner, page)
        if links:
            self.events.emit(DisputedPagesDropped(**room.identity, page=page, dropped=dropped.pages, read=dropped.read))
            if self.store is not None:
                self.store.forget(links)

    def grow(self, room: Room[Any], tokens: int) -> None:
        """Give a room the pages that it lacks for `tokens` tokens, all or nothing. Raises CapacityError."""
        held = {space: len(table) for space, table in room.tables.items()}
        demand = self.needed(tokens, room.prompt_tokens)
        lacking = {space: count - held.get(space, 0) for space, count in demand.items() if count > held.get(space, 0)}
        more = self.book.grow(room.owner, lacking)
        tables = request_tables(self.settings.geometry, more, prompt_tokens=room.prompt_tokens)
        room.tables = joined_tables(room.tables, tables)

    def adopt(self, room: Room[Any], tables: Tables, *, cached_tokens: int, written_by_peers: bool) -> None:
        """Book the pages that an engine names for a room.

        The prompt's first `cached_tokens` tokens are in the engine's own prefix cache: the room only reads their whole pages, which
        other rooms may have as well. `written_by_peers`: see PageBook.adopt.
        """
        whole = cached_tokens // self.settings.geometry.tokens_per_page
        shared = {
            space: table.ids[: max(0, whole - table.first_page)]
            for space, table in tables.items()
            if space in GROWING_SPACES
        }
        own = {space: table.ids[len(shared.get(space, ())) :] for space, table in tables.items()}
        self.book.adopt(room.owner, own, shared=shared, written_by_peers=written_by_peers)
        room.tables = joined_tables(room.tables, tables)

    def lease(self, room: Room[Any]) -> None:
        """Let transfers touch the pages from now on."""
        self.book.move(room.owner, PageState.HELD, PageState.LEASED)

    def hold(self, room: Room[Any]) -> None:
        """End the lease, by proof that no transfer touches the pages."""
        self.book.move(room.owner, PageState.LEASED, PageState.HELD)

    def expect_free(self, room: Room[Any]) -> None:
        """Count the pages of a room that is being stopped as coming back soon."""
        if room.owner in self.book:
            self.book.expect_free(room.owner)

    def give_back(self, room: Room[Any]) -> None:
        """Free a room's pages and let go of cached ones, by proof that nobody touches them. Harmless when it has none."""
        owner, room.quarantine = room.owner, None
        state = self.book.state(owner)
        if state is PageState.LEASED:
            self.hold(room)
        if state is PageState.QUARANTINED:
            self.book.release_quarantined(owner)
        elif state is not PageState.FREE:
            self.book.free(owner)
        if self.prefixes is not None and owner in self.prefixes:
            self.prefixes.let_go(owner)

    def quarantine(self, room: Room[Any], cause: Quarantine, why: str) -> None:
        """Keep the pages of a room from everybody until `give_back`, and say why. Harmless when it was done before."""
        if room.owner not in self.book or room.quarantine is cause:
            return
        room.quarantine = cause
        self.book.quarantine(room.owner, f"{room.owner}: {why}")
        self.events.emit(RoomQuarantined(**room.identity, cause=cause, reason=why))

    def await_process(self, room: Room[Any], engine: str, *, followed: bool) -> None:
        """Wait for the end of the process of an engine whose connection has ended: only that proves that it uses no page.

        `followed`: the end will be seen. Otherwise the pages are quarantined at once, since nobody will say when they are free.
        """
        room.departed.add(engine)
        if not followed:
            why = (
                f"engine {engine} has left without letting go of it, and the end of its process cannot be seen from here (it is "
                "in another pid namespace); when you know that it has ended, restart this daemon to have the pages back"
            )
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)

    def quarantine_used(self, room: Room[Any], limit: str) -> None:
        """Quarantine the pages of a room that engines have not let go of in time."""
        cause, left = Quarantine.NOT_RELEASED, f"have not let go of it (limit: {limit})"
        engines = room.users
        if departed := engines & room.departed:
            cause, engines = Quarantine.ENGINE_ALIVE, departed
            left = f"have left, and their processes have not ended (limit: {limit}); end them"
        self.quarantine(room, cause, f"engines {', '.join(sorted(engines))} {left}")

    # ------------------------------------------------------------------ prefill: where engines start, and what they leave

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
