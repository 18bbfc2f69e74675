"""Whether cached pages of a decode node still hold what they held when they came (`integrity.verify_on_hit`).

Owns: which pages rank workers are looking at, and what was found. Must not know: how digests are computed, what becomes of a room.

A page gets its digests when it enters: those that its writers and our ranks have agreed upon, or what our ranks find then. A rank
looks at one thing after the other, so what a later look is compared with is known by then. Pages that are looked at are pinned,
so they are nobody else's meanwhile, and what was found counts also when the room has ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import PageTable, Rank
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.receiver.room import ReceiverRoom
from kvbridge.node.receiver.verification import Verification, growing_kinds
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.page_states import Owner
from kvbridge.telemetry.events import CachedPagesDiffer
from kvbridge.tier.keys import Keys
from kvbridge.tier.looks import PathPages

log = structlog.get_logger(__name__)

NAMED_PAGES = 4
"""So many pages that differ are named one by one."""


@dataclass(eq=False)
class Look:
    """Pages of one room that rank workers are looking at."""

    room: ReceiverRoom
    keys: Keys
    looking: PathPages
    start: int
    """The first of its pages that are looked at."""
    verification: Verification
    until_s: float
    on_hit: bool
    """The room waits for what is found, to share these pages; otherwise they have just come."""


@dataclass
class PrefixChecks:
    """Called from the event loop's thread only."""

    pages: RoomPages
    workers: WorkerSet
    clock: Clock
    _looks: dict[int, Look] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    # ------------------------------------------------------------------ pages that come

    def keep(self, room: ReceiverRoom, keys: Keys) -> None:
        """Keep the whole pages of `keys` that the room does not share yet, and see to it that their digests are known.

        Nothing, when a writer has not stated the keys of what it has computed.
        """
        if not room.is_same_prompt:
            return
        prefixes = self.pages.prefixes
        if prefixes is None or not self.pages.settings.verifies_hits or room.owner not in prefixes:
            self.pages.keep(room, keys)
            return
        start, sent = prefixes.reads(room.owner), room.verification
        digests = None
        if sent is not None and start * self._page == room.prefix_tokens and len(keys) <= len(room.keys):
            digests = sent.sent_pages(range(start, len(keys)))
        if self.pages.keep(room, keys, digests=digests) and digests is None:
            self._look(room, keys, start, on_hit=False)

    # ------------------------------------------------------------------ pages that a room is to share

    def begin(self, room: ReceiverRoom) -> bool:
        """Look at the cached pages that a room got, if that is wanted and there are any; whether it has to wait for it."""
        wanted = self.pages.settings.verifies_hits and bool(room.pages_in_place)
        room.unchecked = wanted and self._look(room, room.keys, 0, on_hit=True)
        return room.unchecked

    def _look(self, room: ReceiverRoom, keys: Keys, start: int, *, on_hit: bool) -> bool:
        """Have rank workers look at pages; whether they can."""
        prefixes, settings = self.pages.prefixes, self.pages.settings
        if prefixes is None or self.workers.missing():
            return False  # of pages that came nothing is known then; a room that is admitted has all its workers
        looking = prefixes.look(room.owner)
        verification = Verification(
            settings.geometry,
            self.workers.manifests(),
            prompt_tokens=len(looking.path) * self._page,
            prefix_tokens=start * self._page,
        )
        number = next(self._numbers)
        until_s = self.clock() + settings.limits.verify_s
        self._looks[number] = Look(room, keys, looking, start, verification, until_s, on_hit)
        tables = {space: PageTable(space, ids[start:], start) for space, ids in looking.pages.items()}
        for rank, order in verification.orders(room.room, room.generation, tables, order=number):
            self.workers.send(rank, order)
        return True

    # ------------------------------------------------------------------ what rank workers say

    def digested(self, message: Digested) -> None:
        """A rank has found this. What is not asked for (any more) is nobody's."""
        look = self._looks.get(message.order)
        if look is not None:
            look.verification.find(message)

    def verified(self, message: Verified) -> Look | None:
        """A rank has looked at everything, or could not. Returns the look when all have, or when it is over by that."""
        look = self._looks.get(message.order)
        if look is None or not (message.error_code or look.verification.answered(message.rank)):
            return None
        del self._looks[message.order]
        return look

    def judge(self, look: Look) -> int:
        """Compare what was found with what is known, and drop what differs.

        Returns how many pages, from the first, are as they were.
        """
        prefixes = self.pages.prefixes
        assert prefixes is not None, "nobody looks at pages otherwise"
        found = look.verification.found_pages(range(look.start, len(look.looking.path)))
        if not look.on_hit:
            prefixes.looks.set_digests(look.looking, look.start, found)
            return len(look.looking.path)
        changed = prefixes.looks.changed(look.looking, found)
        pages = np.flatnonzero(changed.any(axis=1)).tolist()
        whole = pages[0] if pages else len(found)
        prefixes.looks.set_digests(look.looking, 0, found)  # of pages that came while a rank worker was absent
        if pages:
            kinds = growing_kinds(self.pages.settings.geometry)
            wrong = {page: [kinds[word] for word in np.flatnonzero(changed[page]).tolist()] for page in pages}
            self._drop(look, wrong)
        return whole

    def _drop(self, look: Look, wrong: dict[int, list[ComponentKind]]) -> None:
        prefixes = self.pages.prefixes
        assert prefixes is not None, "see judge"
        first = min(wrong)
        readers: list[Owner] = prefixes.readers_of(look.looking, first)
        dropped = prefixes.drop_page(look.keys.in_namespace(look.room.namespace), first)
        self.pages.events.emit(
            CachedPagesDiffer(
                **look.room.identity,
                pages=Counter(kind for kinds in wrong.values() for kind in kinds),
                first=tuple(
                    f"page {page} of the prompt, key {look.keys[page].hex()}: {', '.join(kinds)} in "
                    + ", ".join(f"page {ids[page]} of '{space}'" for space, ids in look.looking.pages.items())
                    for page, kinds in list(wrong.items())[:NAMED_PAGES]
                ),
                dropped=dropped.pages,
                readers=tuple(owner.room for owner in readers if owner != look.room.owner),
            )
        )

    def end(self, look: Look) -> None:
        """The pages of a look are not needed any more."""
        assert self.pages.prefixes is not None, "nobody looks at pages otherwise"
        self.pages.prefixes.looks.end(look.looking)

    def gone(self, rank: Rank) -> None:
        """A rank worker has ended: nothing more comes of what it was looking at."""
        self._give_up(f"rank worker {rank} has ended")

    def tick(self) -> None:
        """Give up what takes too long. A room that waits for it fails by its own deadline."""
        if any(look.until_s <= self.clock() for look in self._looks.values()):
            self._give_up("limit: timeouts.verify_s", until_s=self.clock())

    def _give_up(self, why: str, *, until_s: float = float("inf")) -> None:
        for number, look in list(self._looks.items()):
            if look.until_s <= until_s:
                del self._looks[number]
                self.end(look)
                log.warning("cached_pages_not_verified", **look.room.identity, pages=len(look.looking.path), reason=why)

    @property
    def _page(self) -> int:
        return self.pages.settings.geometry.tokens_per_page
