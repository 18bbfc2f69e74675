"""A room, as both sides keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

from kvbridge.core.errors import RoomFailedError
from kvbridge.core.ids import TWINS, IndexSpace, PageIdArray, PageMoves, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import Retention
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.pool.accounts.pages import Owner
from kvbridge.telemetry.context import TraceContext
from kvbridge.tier.keys import Keys

StateT = TypeVar("StateT", bound=StrEnum)


class Quarantine(StrEnum):
    """Why a room's pages stay away from everybody, in one word."""

    NOT_QUIET = "transport_not_quiet"
    """Prefill: a transport of ours may still read them."""
    WRITER_SHUT_OUT = "writer_being_shut_out"
    """Decode: a writer gives no proof that it has stopped, or something that it has sent may still arrive."""
    NOT_RELEASED = "engine_not_released"
    """An engine has not let go of them."""
    ENGINE_ALIVE = "engine_process_alive"
    """An engine has left without letting go of them, and its process has not ended, as far as can be seen."""


NAMED = 8
"""Ranks, nodes or engines that are named in a text; the others are counted."""


def named(whom: Iterable[object]) -> str:
    """Return the names of some ranks, nodes or engines, for people."""
    names = sorted(map(str, whom))
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


class AdmittingEngine(NamedTuple):
    """An engine that admits a room itself, and what it says the room is of."""

    name: str
    prompt_digest: bytes = b""
    held: bool = False
    """On decode: it was told that prefill holds the room already."""


class RoomIdentity(TypedDict):
    """Which attempt at which room, and with whom."""

    room: int
    generation: int
    peer: str


@dataclass(slots=True, eq=False)
class Load:
    """What is cached on the host only, and engines copy into pages of a room before they read them."""

    first_page: int
    """Of the prompt: the first of those in the spaces that grow with the tokens."""
    moves: PageMoves
    """The room's own pages and the twins that belong into them, which stay until it lets go; of `swa`, a checkpoint."""
    ranks: set[Rank] = field(default_factory=set)
    """Where it is there, as the engines of these ranks have said."""
    bytes: int = 0
    """That they have copied."""
    seconds: float = 0.0
    """While the slowest of them was copying."""

    @property
    def twins(self) -> Tables:
        """The twins as engines are told: of pages from `first_page` on, and of a checkpoint."""
        return {
            TWINS[space]: PageTable(TWINS[space], twins, 0 if space is IndexSpace.SWA else self.first_page)
            for space, (_, twins) in self.moves.items()
        }

    def arrived(self, ranks: Iterable[Rank], copied_bytes: int, seconds: float) -> None:
        """An engine says that it is there on its ranks."""
        self.ranks.update(ranks)
        self.bytes += copied_bytes
        self.seconds = max(self.seconds, seconds)


@dataclass(eq=False)
class Room(Generic[StateT]):
    """One attempt at one request on this node. Written by its service only."""

    final_states: ClassVar[frozenset[Any]] = frozenset()
    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    max_new_tokens: int
    client: str
    state: StateT
    created_s: float
    admitted_by: str = ""
    """The engine that admitted it itself; it ends with that one, and no limit ends it while it waits for it."""
    prompt_digest: bytes = b""
    """What that engine says it is of, and the one on the other side has to say, too."""
    held: bool = False
    """On decode: that engine was told that prefill holds it already."""
    tables: Tables = field(default_factory=dict)
    reason_code: str = ""
    reason: str = ""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    deadline_s: float | None = None
    """When the present wait counts as failed, on the service's clock."""
    deadline_name: str = ""
    """The configuration key of that wait."""
    note_limit: Callable[[Any, float], None] = field(default=lambda _room, _limit_s: None, repr=False)
    """Told when another limit ends the room; set by the book, which keeps limits in their order."""
    begin_by_s: float | None = None
    """Until then a prefill engine has to begin the room, on the service's clock; None once that does not matter any more."""
    begin_limit: str = ""
    """Who set that limit: a configuration key, or a field of the admission."""
    missed: str = ""
    """The limit that has ended the room, if one has."""
    computed_tokens: int = 0
    """Prefill: how much of the prompt it held already, where its engine starts to compute."""
    checkpoint: PageIdArray | None = None
    """Prefill: the cached windows and states that its engine starts from, to be read only; None: it has not been asked for."""
    host_tokens: int = 0
    """Of the prefix that it was given, the last so many tokens were in host memory alone."""
    shared_pages: dict[IndexSpace, int] = field(default_factory=dict)
    """Of its pages in each space, the first ones, those that it had not to be given: cached ones."""
    load: Load | None = None
    """What engines have to load back before they can read it; None: nothing, or nothing any more."""
    keys: Keys = field(default_factory=Keys)
    """Of the prompt's whole pages, until it ends, as routers and engines say them; empty: it shares nothing. The cache and the
    store go by the names that these have in its namespace (`Keys.in_namespace`)."""
    disputed_page: int | None = None
    """The first page of the prompt of which one of its engines has said other tokens than those that the keys name."""
    namespace: str = ""
    retention: Retention | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    """The request id and the trace id of its admission, those that there were."""
    trace: TraceContext | None = None
    """Its own span, or its caller's where nothing is traced here; None while there is no trace."""
    shown: RoomState | None = None
    """The state that users were told of last."""
    quarantine: Quarantine | None = None
    """Why its pages are quarantined, while they are."""
    number: int = 0
    """Counts the rooms that this node has admitted, from 1."""
    peers: tuple[str, ...] = ()
    """The nodes at the other end as INSTANCE/NODE, or where they listen before they have answered; kept with the receipt."""
    departed: set[str] = field(default_factory=set)
    """Engines that may use its pages, whose connection has ended and whose process has not."""

    @property
    def over(self) -> bool:
        """Whether its table has ended."""
        return self.state in self.final_states

    @property
    def owner(self) -> Owner:
        """The key under which pages are booked."""
        return Owner(self.room, self.generation)

    @property
    def first_peer(self) -> str:
        """The incarnation of the node at the other end, the first of several; empty while there is none."""
        return ""

    @property
    def waits_for(self) -> str:
        """What has to happen next, for people; empty when nothing is waited for."""
        raise NotImplementedError

    @property
    def identity(self) -> RoomIdentity:
        """What every fact about the room says of it."""
        return {"room": self.room, "generation": self.generation, "peer": self.first_peer}

    @property
    def users(self) -> set[str]:
        """Engines that may use its pages."""
        raise NotImplementedError

    def lose(self, engine: str) -> bool:
        """An engine will not come back; whether the room cannot go on without it."""
        raise NotImplementedError

    def let_go(self, engine: str) -> None:
        """An engine does not use the pages any more; harmless for one that did not."""
        raise NotImplementedError

    def blame(self, code: str, reason: str) -> None:
        """Keep the first cause; what others wrote is cut to a length that every message can carry."""
        if not self.reason_code:
            self.reason_code = code[:200] or RoomFailedError.code
            self.reason = reason[:REASON_CHARS]

    def wait_until(self, deadline_s: float | None, name: str = "") -> None:
        """Start another wait (None: no limit)."""
        self.deadline_s, self.deadline_name = deadline_s, name
        if deadline_s is not None:
            self.note_limit(self, deadline_s)

    @property
    def next_limit(self) -> tuple[float | None, str]:
        """What ends the room first unless something happens: when, on the service's clock, and the limit's name."""
        if self.begin_by_s is not None and (self.deadline_s is None or self.begin_by_s <= self.deadline_s):
            return self.begin_by_s, self.begin_limit
        return self.deadline_s, self.deadline_name

    def late(self, now_s: float) -> str:
        """Return the name of the limit that has passed, empty when none has.

        A deadline is named once, `begin_limit` until it does not matter any more.
        """
        limit_s, name = self.next_limit
        if limit_s is None or now_s < limit_s:
            return ""
        if limit_s != self.begin_by_s:
            self.wait_until(None)
        return name

    def why_late(self, limit: str) -> str:
        """Return what did not happen within a limit that `late` has returned."""
        what = f"it has waited too long for {self.waits_for}"
        if limit == self.begin_limit:
            what = "no prefill engine has begun it in time"
        return f"{what} (limit: {limit})"


def slowest(phases_s: dict[str, float], of_rank_s: Mapping[str, float]) -> None:
    """Add the phases of a rank to those of its room, which is as slow as the slowest of its ranks."""
    for phase, seconds in of_rank_s.items():
        phases_s[phase] = max(phases_s.get(phase, 0.0), seconds)
