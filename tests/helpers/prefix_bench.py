"""A sending service that keeps prefixes, and all that surrounds it, faked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank
from kvbridge.core.wire.engine_messages import AskRestorable, Pages
from kvbridge.core.wire.messages import Offer, to_wire
from kvbridge.core.wire.worker_messages import RoomClosed, Send, Sent
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.room_pages import RoomSettings
from kvbridge.node.sender.room import SenderPorts, SenderRoom
from kvbridge.node.sender.rooms import sender_rooms
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import PrefixIdentity, page_keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import (
    DECODE,
    R0,
    SENDER_LIMITS,
    EngineVerbs,
    FakeEngines,
    FakePeers,
    FakeWorkers,
    RecordedEvents,
    pick,
)

V4, GQA = preset("tiny-v4"), preset("tiny-gqa")
PAGE = V4.tokens_per_page
IDENTITY = PrefixIdentity(model="tiny", revision="1", fingerprint="0" * 64, tokens_per_page=PAGE)
HISTORY = list(range(1_000, 1_000 + 20 * PAGE))
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA


def hashes(tokens: list[int]) -> bytes:
    return page_keys(IDENTITY, tokens).data


@dataclass
class PrefixBench:
    """The service. `windows`: pages of `swa`; `interval`: of checkpoints, in tokens; `twins`: pages and checkpoints of the host."""

    geometry: ModelGeometry = V4
    pages: int = 64
    windows: int = 16
    ranks: tuple[Rank, ...] = (R0,)
    interval: int = 0
    part_of_instance: bool = False
    twins: tuple[int, int] = (0, 0)
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        spaces = {FULL: self.pages}
        if self.geometry is V4:
            spaces |= {SWA: self.windows, IndexSpace.REQUEST: 8}
        if self.twins[0]:
            spaces |= {IndexSpace.FULL_TWIN: self.twins[0], IndexSpace.SWA_TWIN: self.twins[1]}
        self.book = PageBook(spaces)
        index = PrefixIndex((FULL,), self.pages + self.twins[0], has_twins=bool(self.twins[0]))
        self.cache = PrefixCache(self.book, index, clock=self.clock, restores=True)
        self.workers, self.peers = FakeWorkers(*self.ranks, geometry=self.geometry), FakePeers()
        self.engines, self.events = FakeEngines("engine"), RecordedEvents()
        self.service = sender_rooms(
            SenderPorts(
                book=self.book,
                workers=self.workers,
                nodes=self.peers,
                engines=self.engines,
                events=self.events,
                prefixes=self.cache,
            ),
            RoomSettings(
                geometry=self.geometry,
                shares_prefixes=True,
                limits=SENDER_LIMITS,
                checkpoint_interval_tokens=self.interval,
                part_of_instance=self.part_of_instance,
            ),
            clock=self.clock,
        )
        self.verbs = EngineVerbs(self.service)

    def admit(self, room: int, tokens: list[int], *, keyed: bool = True, namespace: str = "") -> SenderRoom:
        found = hashes(tokens) if keyed else b""
        request = AdmissionRequest(room=room, prompt_tokens=len(tokens), page_hashes=found, namespace=namespace)
        self.service.requests.admit(request)
        return self.service.book.get(room)

    def begin(self, room: int, tokens: list[int], ranks=None, **more) -> Pages:
        found = self.verbs.begin(
            "engine",
            ranks or self.ranks,
            room,
            prompt_tokens=len(tokens),
            tables={},
            page_hashes=hashes(tokens),
            **more,
        )
        assert isinstance(found, Pages)
        return found

    def restorable(self, room: int) -> tuple[int, ...]:
        call = AskRestorable(call=1, room=room)
        return self.service.calls[AskRestorable](AttachedEngine("engine", 0, self.ranks), call).tokens

    def offer(self, room: int, tokens: list[int], held: int = 0) -> None:
        ids = np.arange(-(-len(tokens) // PAGE) - held // PAGE, dtype=np.int32)
        table = PageTable(FULL, ids, held // PAGE)
        self.service.peers.hear(
            DECODE,
            Offer(
                room=room, generation=1, prompt_tokens=len(tokens), prefix_tokens=held, tables=to_wire({FULL: table})
            ),
        )

    def orders(self, room: int) -> list[Send]:
        return [order for order in pick(self.workers.messages, Send) if order.room == room]

    def sent(self, room: int, **more) -> None:
        """Every order of a room has ended."""
        for rank in self.ranks:
            for order in pick(self.workers.messages, Send, rank):
                if order.room == room:
                    ended = Sent(room=room, generation=1, rank=rank, order=order.order, **more)
                    self.service.workers.hear(ended)

    def closed(self, room: int, *, quiet: bool = True) -> None:
        for rank in self.ranks:
            self.service.workers.hear(RoomClosed(room=room, generation=1, rank=rank, quiet=quiet))

    def publish(self, room: int, tokens: list[int], **more) -> None:
        self.verbs.publish("engine", self.ranks, room, upto_token=len(tokens), layers=None, **more)

    def finish(self, room: int, written: tuple[int, ...] = (), **more) -> None:
        self.verbs.finish("engine", self.ranks, room, metadata=b"", checkpoints=written, **more)

    def compute(self, room: int, tokens: list[int], *, skip: bool = False) -> Pages:
        """The engine's part, with every checkpoint that is asked for unless it skips them."""
        begun = self.begin(room, tokens)
        self.publish(room, tokens)
        self.finish(room, () if skip else tuple(one.tokens for one in begun.checkpoints))
        return begun

    def cross(self, room: int, tokens: list[int], *, held: int = 0, skip: bool = False) -> Pages:
        """A whole room."""
        self.admit(room, tokens)
        self.offer(room, tokens, held)
        begun = self.compute(room, tokens, skip=skip)
        self.sent(room)
        self.check()
        return begun

    def check(self) -> None:
        self.cache.check_integrity()

    def quiet(self) -> None:
        """Nothing but the cache has pages, and nobody reads those."""
        self.check()
        assert not self.cache.readers, self.cache
        assert self.book.available_pages() == {
            space: sum(counts.values()) for space, counts in self.book.counts().items()
        }
        for counts in self.book.counts().values():
            used = {state for state, count in counts.items() if count}
            assert used <= {PageState.FREE, PageState.CACHED}


def ids(pages: Pages, space: IndexSpace = FULL) -> list[int]:
    table = next(table for table in pages.tables if table.space is space)
    return np.frombuffer(table.ids, "<i4").tolist()
