"""The pages of a node's rooms: how many a room needs, which it shares, who may touch them, and when they go back.

A room with page keys reads cached pages that hold the beginning of its prompt, in front of pages of its own. Only those are leased
and quarantined; it lets go of what it reads when its own go back, on whatever way it ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from kvbridge.config.timeouts import DaemonTimeouts
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.checkpoints import needs_checkpoints
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.geometry.tables import GROWING_SPACES, check_demand, joined_tables, request_tables
from kvbridge.core.ids import TWINS, IndexSpace, PageIdArray, PageTable, Rank, Tables
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire.engine_messages import Loaded
from kvbridge.node.room import Load, Quarantine, Room
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import PageState
from kvbridge.telemetry.events import DisputedPagesDropped, PrefixMatched, RoomQuarantined
from kvbridge.telemetry.host_tier import CopyEnded
from kvbridge.telemetry.stream import EventStream
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.readers import Admitted
from kvbridge.tier.retention import Claim

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSettings:
    """What is the same for all rooms of a node."""

    geometry: ModelGeometry
    limits: DaemonTimeouts
    shares_prefixes: bool = False
    """Rooms keep the page keys that they were admitted with, which engines then have to state; pages stay under them where there is
    a cache."""
    keeps_answers: bool = True
    """Decode: so do pages of answers, not of prompts only (`tier.generated`)."""
    checkpoint_interval_tokens: int = 0
    """Prefill: checkpoints are wanted every so many tokens of a prompt, too (0: they are not)."""
    part_of_instance: bool = False
    """Prefill: other nodes have ranks of the same instance, which all start at the same token of a room."""
    adopted: bool = False
    """Engines bring the device memory and name its pages; otherwise pages are reserved at admission."""
    host: frozenset[ComponentKind] = frozenset()
    """Decode: the components that live in the host pool."""
    digest: DigestKind = DigestKind.NONE
    """Decode: what writers are asked to compute, our ranks compute once everything has arrived, and a room commits by."""

    @property
    def hands_over(self) -> bool:
        """Decode: whether no page of a room is this node's own, so that a committed room is the engine's without a claim."""
        return self.adopted and not self.host


@dataclass(frozen=True, slots=True)
class RoomPages:
    """Called from the event loop's thread only."""

    book: PageBook
    settings: RoomSettings
    events: EventStream
    prefixes: PrefixCache | None = None
    """None: nothing is shared here, and rooms have no keys."""
    computes: bool = False
    """Prefill: an engine computes on behind a prefix, so at least one token, and from the windows and states at its end."""
    always: frozenset[IndexSpace] = field(default_factory=frozenset)
    """Spaces of which every room takes a page, where this node gives them out."""

    def needed(self, tokens: int, prompt_tokens: int) -> dict[IndexSpace, int]:
        """Pages to give out for `tokens` tokens. Raises InvalidInputError when the pools are too small for them ever to be free."""
        settings = self.settings
        needed = pages_needed(settings.geometry, tokens=tokens, prompt_tokens=prompt_tokens, host=settings.host)
        check_demand(needed)
        self.book.require_possible(needed)
        if settings.adopted:
            needed = {space: count for space, count in needed.items() if space is IndexSpace.HOST}
        for space in self.always.intersection(self.book.owned_spaces()):
            needed.setdefault(space, 1)
        return needed

    def reserve(self, room: Room[Any], demand: Mapping[IndexSpace, int]) -> None:
        """Give a room the longest prefix of its prompt that is cached, and pages of its own for the rest; all or nothing.

        `demand`: the pages that it needs without a prefix. The room's tables have both, the prefix first. Raises CapacityError.
        """
        if self.prefixes is None or not room.keys:
            self._set_tables(room, self.book.reserve(room.owner, demand))
            return
        geometry = self.settings.geometry
        page = geometry.tokens_per_page
        names = room.keys.in_namespace(room.namespace)
        got = self.prefixes.admit(
            room.owner,
            names,
            lambda shared: {space: count - shared.get(space, 0) for space, count in demand.items()},
            at_most=len(self.shareable(names, room.prompt_tokens)),
            from_checkpoint=self.computes and needs_checkpoints(geometry),
        )
        if room.retention is not None:
            self.prefixes.retain(room.owner, Claim(room.namespace, room.retention))
        both = ((space, (got.prefix.get(space), own)) for space, own in got.own.items())
        self._set_tables(
            room, {space: np.concatenate([ids for ids in parts if ids is not None]) for space, parts in both}
        )
        self._set_prefix(room, got)
        hit_tokens = got.prefix_pages * page
        self.events.emit(
            PrefixMatched(
                **room.identity,
                hit_tokens=hit_tokens,
                miss_tokens=room.prompt_tokens - hit_tokens,
                from_checkpoint=bool(len(got.checkpoint) or len(got.checkpoint_twin)),
                host_tokens=room.host_tokens,
            )
        )

    def shareable(self, keys: Keys, prompt_tokens: int) -> Keys:
        """Those of a prompt's keys whose pages a room can share: one that computes has at least one token left to compute."""
        return keys[: (prompt_tokens - self.computes) // self.settings.geometry.tokens_per_page]

    def shorten(self, room: Room[Any], tokens: int) -> None:
        """Prefill, before anything of the room is leased: let it read only so many tokens of the prefix that it got.

        Raises CapacityError when there are no pages for the rest of it, and NotFoundError when it cannot go on from there.
        """
        if self.prefixes is None:
            return
        geometry = self.settings.geometry
        left = tokens // geometry.tokens_per_page
        got = self.prefixes.shorten(room.owner, left, from_checkpoint=needs_checkpoints(geometry))
        self._give_instead(room, left, got.own)
        self._set_prefix(room, got)

    def loaded(self, room: Room[Any], ranks: Iterable[Rank], said: Loaded, *, of: Collection[Rank]) -> bool:
        """An engine has loaded what a room is to load into the memory of these ranks; whether these make it all ranks `of` it."""
        load = room.load
        if load is None or load.ranks.issuperset(ranks):
            return False
        load.arrived(ranks, said.bytes, said.seconds)
        if not load.ranks.issuperset(of):
            return False
        pages = room.host_tokens // self.settings.geometry.tokens_per_page
        told = CopyEnded(
            direction="load_back", pages=pages, bytes=load.bytes, busy_s=load.seconds, seconds=load.seconds
        )
        self.events.emit(told)
        return True

    def load_failed(self, room: Room[Any], reason: str) -> None:
        """An engine gives a room up, since what it shares out of host memory cannot be loaded."""
        pages = room.host_tokens // self.settings.geometry.tokens_per_page
        told = CopyEnded(
            direction="load_back", pages=pages, bytes=0, busy_s=0, seconds=0, code=TransportError.code, reason=reason
        )
        self.events.emit(told)

    def restored(self, room: Room[Any]) -> int:
        """Let others read what a room has loaded back, by proof, into pages that it holds; return how many are new."""
        if self.prefixes is None or room.load is None:
            return 0
        load, room.load = room.load, None
        ids = {space: own for space, (own, _) in load.moves.items()}
        checkpoint = ids.pop(IndexSpace.SWA, None)
        new = self.prefixes.restored(room.owner, load.first_page, ids) if ids else 0
        if checkpoint is not None:
            page_count = room.computed_tokens // self.settings.geometry.tokens_per_page
            self.prefixes.keep_checkpoint(room.owner, page_count, checkpoint)
        return new

    def _give_instead(self, room: Room[Any], page_count: int, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Put pages of its own in a room's tables, for those that it read in place beyond so many."""
        for space, ids in pages.items():
            shared = room.shared_pages[space]
            parts = room.tables[space].ids[: min(page_count, shared)], ids, room.tables[space].ids[shared:]
            room.tables[space] = PageTable(space, np.concatenate(parts))

    def _set_prefix(self, room: Room[Any], got: Admitted) -> None:
        """Note what a room, whose tables are complete, has of the cache."""
        tokens = got.prefix_pages * self.settings.geometry.tokens_per_page
        if self.computes:
            room.computed_tokens = tokens
            room.checkpoint = got.checkpoint_own if len(got.checkpoint_own) else got.checkpoint
        else:
            room.prefix_tokens = tokens
        room.host_tokens = (got.prefix_pages - got.device_pages) * self.settings.geometry.tokens_per_page
        room.shared_pages = {space: len(ids) for space, ids in got.prefix.items()}
        moves = {
            space: (room.tables[space].ids[got.device_pages : got.prefix_pages], got.twins[twin])
            for space, twin in TWINS.items()
            if twin in got.twins
        }
        if len(got.checkpoint_twin):
            moves[IndexSpace.SWA] = got.checkpoint_own, got.checkpoint_twin
        room.load = Load(got.device_pages, moves) if moves else None

    def _set_tables(self, room: Room[Any], ids: Mapping[IndexSpace, PageIdArray]) -> None:
        room.tables = request_tables(self.settings.geometry, ids, prompt_tokens=room.prompt_tokens)

    def own_tables(self, room: Room[Any]) -> Tables:
        """Return the tables of a room without the `prefix_tokens` before them, which nobody may write."""
        prefix_pages = room.prefix_tokens // self.settings.geometry.tokens_per_page  # adopted ones, too
        return {
            space: PageTable(space, table.ids[prefix_pages - table.first_page :], prefix_pages)
            if space in GROWING_SPACES
            else table
            for space, table in room.tables.items()
        }

    def keep(self, room: Room[Any], keys: Keys) -> int:
        """Keep the whole pages of `keys` that the room does not share yet, and return how many are new.

        They are held, final, and nobody writes them any more; the room goes on reading them.
        """
        if self.prefixes is None or room.owner not in self.prefixes:
            return 0
        start = self.prefixes.reads(room.owner)
        if len(keys) <= start:
            return 0
        pages = {space: room.tables[space].ids[start : len(keys)] for space in self.prefixes.spaces}
        try:
            return self.prefixes.keep(room.owner, keys.in_namespace(room.namespace), start, pages)
        except BridgeError:  # a defect, but what only saves later requests time fails no room
            log.exception("prefix_not_kept", **room.identity)
            return 0

    def drop_kept(self, room: Room[Any], page: int) -> list[Link]:
        """Forget what a room has put into the cache from this page of its prompt on, with all that goes on from there.

        Returns the links of what is forgotten.
        """
        if self.prefixes is None or room.owner not in self.prefixes:
            return []
        dropped, links = self.prefixes.drop_kept(room.owner, page)
        if links:
            self.events.emit(DisputedPagesDropped(**room.identity, page=page, dropped=dropped.pages, read=dropped.read))
        return links

    def grow(self, room: Room[Any], tokens: int) -> None:
        """Give a room what it lacks for `tokens` tokens, all or nothing. Raises CapacityError."""
        held = {space: len(table) for space, table in room.tables.items()}
        demand = self.needed(tokens, room.prompt_tokens)
        lacking = {space: count - held.get(space, 0) for space, count in demand.items() if count > held.get(space, 0)}
        more = request_tables(
            self.settings.geometry, self.book.grow(room.owner, lacking), prompt_tokens=room.prompt_tokens
        )
        room.tables = joined_tables(room.tables, more)

    def adopt(self, room: Room[Any], tables: Tables, *, cached_tokens: int, written_by_peers: bool) -> None:
        """Book the pages that an engine names for a room.

        Those that hold none but the prompt's first `cached_tokens` tokens, which are in the engine's own prefix cache, the room
        only reads, and others may have them as well. `written_by_peers`: see PageBook.adopt.
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
        """Transfers touch the pages from now on."""
        self.book.move(room.owner, PageState.HELD, PageState.LEASED)

    def hold(self, room: Room[Any]) -> None:
        """The lease has ended by proof: the pages belong to the room alone."""
        self.book.move(room.owner, PageState.LEASED, PageState.HELD)

    def expect_free(self, room: Room[Any]) -> None:
        """The room is being stopped: its pages, if it has any, are coming back."""
        if room.owner in self.book:
            self.book.expect_free(room.owner)

    def give_back(self, room: Room[Any]) -> None:
        """Free the pages of a room and let go of those that it shares, given proof that nobody touches them for it any more.

        Harmless when it has none.
        """
        owner, room.quarantine = room.owner, None
        match self.book.state(owner):
            case PageState.LEASED:
                self.hold(room)
                self.book.free(owner)
            case PageState.HELD:
                self.book.free(owner)
            case PageState.QUARANTINED:
                self.book.release_quarantined(owner)
            case PageState.FREE:
                pass
        if self.prefixes is not None and owner in self.prefixes:
            self.prefixes.let_go(owner)

    def quarantine(self, room: Room[Any], cause: Quarantine, why: str) -> None:
        """Keep the pages of a room from everybody until `give_back`, and say why. Harmless when that was said before."""
        if room.owner not in self.book or room.quarantine is cause:
            return
        room.quarantine = cause
        self.book.quarantine(room.owner, f"{room.owner}: {why}")
        self.events.emit(RoomQuarantined(**room.identity, cause=cause, reason=why))

    def await_process(self, room: Room[Any], engine: str, *, followed: bool) -> None:
        """Note that only the end of an engine's process proves that it uses no page any more: its connection has ended.

        `followed`: that end will be seen. Otherwise the pages are quarantined at once, since nobody will say when they are free.
        """
        room.departed.add(engine)
        if not followed:
            why = (
                f"engine {engine} has left without letting go of it, and the end of its process cannot be seen from here (it is "
                "in another pid namespace); when you know that it has ended, restart this daemon to have the pages back"
            )
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)

    def quarantine_used(self, room: Room[Any], limit: str) -> None:
        """Keep pages that engines have not let go of in time from everybody, and say whether they could."""
        departed = sorted(room.users & room.departed)
        if departed:
            why = f"engines {', '.join(departed)} have left, and their processes have not ended (limit: {limit}); end them"
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)
        else:
            why = f"engines {', '.join(sorted(room.users))} have not let go of it (limit: {limit})"
            self.quarantine(room, Quarantine.NOT_RELEASED, why)
