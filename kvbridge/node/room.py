"""One attempt at one request on a node, as both roles keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kvbridge.core.errors import RoomFailedError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import Retention
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.pool.accounts.pages import Owner
from kvbridge.telemetry.context import TraceContext
from kvbridge.tier.keys import Keys

StateT = TypeVar("StateT", bound=StrEnum)
NAMED = 8
"""A text names so many ranks, nodes or engines, and counts the others."""


class Quarantine(StrEnum):
    """The reason why nobody may use a room's pages, in one word."""

    NOT_QUIET = "transport_not_quiet"
    """Prefill: a transport of this node may still read them."""
    WRITER_SHUT_OUT = "writer_being_shut_out"
    """Decode: a writer gives no proof that it has stopped, or bytes of a writer may still arrive."""
    NOT_RELEASED = "engine_not_released"
    """An engine has not let go of them."""
    ENGINE_ALIVE = "engine_process_alive"
    """An engine has left without letting go of them, and no end of its process has been seen."""


def named(whom: Iterable[object]) -> str:
    """Return the names of some ranks, nodes or engines, for people."""
    names = sorted(map(str, whom))
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


class AdmittingEngine(NamedTuple):
    """An engine that admits a room itself."""

    name: str
    prompt_digest: bytes = b""
    """The engine's statement of the prompt."""
    held: bool = False
    """Decode: the engine was told that prefill holds the room already."""


@dataclass(slots=True, eq=False)
class Load:
    """Pages that are cached in host memory alone: engines copy them into pages of the room before they read them."""

    first_page: int
    """Index in the prompt of the first page, in the spaces that grow with the tokens."""
    moves: PageMoves
    """The room's own pages and their host copies, which stay until the room lets go; in `swa`, a checkpoint."""
    ranks: set[Rank] = field(default_factory=set)
    """The ranks into whose memory engines have copied them."""
    bytes: int = 0
    seconds: float = 0.0
    """Copy time of the slowest rank."""

    @property
    def host_copies(self) -> Tables:
        """The host copies as engines are told of them."""
        return {
            HOST_COPIES[space]: PageTable(
                HOST_COPIES[space], host_copies, 0 if space is IndexSpace.SWA else self.first_page
            )
            for space, (_, host_copies) in self.moves.items()
        }


@dataclass(eq=False)
class Room(Generic[StateT]):
    """One attempt at one request on this node. Only its service writes the fields. Times are on the service's clock."""

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
    """The engine that admitted the room itself: the room ends with that engine, and waits for it without a limit."""
    prompt_digest: bytes = b""
    """The admitting engine's statement of the prompt; the engine on the other side has to state the same."""
    held: bool = False
    """Decode: the admitting engine was told that prefill holds the room already."""
    tables: Tables = field(default_factory=dict)
    reason_code: str = ""
    reason: str = ""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    deadline_s: float | None = None
    """The end of the present wait."""
    deadline_name: str = ""
    """The configuration key of the present wait."""
    note_limit: Callable[[Any, float], None] = field(default=lambda _room, _limit_s: None, repr=False)
    """Hears of every new limit; set by the book, which keeps limits in their order."""
    begin_by_s: float | None = None
    """A prefill engine has to begin the room by then; None once that does not matter any more."""
    begin_limit: str = ""
    """The name of that limit: a configuration key, or a field of the admission."""
    missed: str = ""
    """The limit that has ended the room, if one has."""
    computed_tokens: int = 0
    """Prefill: the prompt tokens that the node held already. The engine computes the rest."""
    checkpoint: PageIdArray | None = None
    """Prefill: cached windows and states that the engine starts from and only reads; None: it has not been asked for."""
    host_tokens: int = 0
    """The last so many tokens of the cache hit were in host memory alone."""
    shared_pages: dict[IndexSpace, int] = field(default_factory=dict)
    """How many leading pages of the room are shared cache pages, by space."""
    load: Load | None = None
    """Pages that engines have to load before they can read them; None: nothing, or nothing any more."""
    keys: Keys = field(default_factory=Keys)
    """Page keys of the prompt as routers and engines name them; cache and store use `Keys.in_namespace`. Empty once the room has
    ended, and for a room that shares nothing."""
    disputed_page: int | None = None
    """The first page for which an engine of the room has named other tokens than its keys do."""
    namespace: str = ""
    retention: Retention | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    """Request id and trace id of the admission."""
    trace: TraceContext | None = None
    """The room's own span, or its caller's where nothing is traced here."""
    shown: RoomState | None = None
    """The state that users were told of last."""
    quarantine: Quarantine | None = None
    number: int = 0
    """Counts the rooms that this node has admitted, from 1."""
    peers: tuple[str, ...] = ()
    """The nodes at the other end as INSTANCE/NODE, or their addresses before they have answered; kept with the receipt."""
    departed: set[str] = field(default_factory=set)
    """Engines that may use the pages: their connection has ended, and their process has not."""

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state in self.final_states

    @property
    def owner(self) -> Owner:
        """The key under which pages are booked."""
        return Owner(self.room, self.generation)

    @property
    def first_peer(self) -> str:
        """The incarnation of the first node at the other end; empty while there is none."""
        return ""

    @property
    def waits_for(self) -> str:
        """The next thing that has to happen, for people; empty when nothing is waited for."""
        raise NotImplementedError

    @property
    def about(self) -> dict[str, Any]:
        """The fields of every message about the room."""
        return {"room": self.room, "generation": self.generation}

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of every fact about the room."""
        return {"room": self.room, "generation": self.generation, "peer": self.first_peer}

    @property
    def tokens(self) -> dict[str, Any]:
        """The numbers of tokens in every description of the room."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefix_tokens": self.prefix_tokens,
            "computed_tokens": self.computed_tokens,
        }

    @property
    def users(self) -> set[str]:
        """Engines that may use the pages."""
        raise NotImplementedError

    def lose(self, engine: str) -> bool:
        """Note that an engine will not come back; return whether the room fails without it."""
        raise NotImplementedError

    def let_go(self, engine: str) -> None:
        """Note that an engine does not use the pages any more; harmless for one that did not."""
        raise NotImplementedError

    def blame(self, code: str, reason: str) -> None:
        """Keep the first cause, cut to a length that every message can carry."""
        if not self.reason_code:
            self.reason_code = code[:200] or RoomFailedError.code
            self.reason = reason[:REASON_CHARS]

    def wait_until(self, deadline_s: float | None, name: str = "") -> None:
        """Start another wait (None: no limit)."""
        self.deadline_s, self.deadline_name = deadline_s, name
        if deadline_s is not None:
            self.note_limit(self, deadline_s)

    def begin_within(self, within_s: float, name: str) -> None:
        """Limit the wait for a prefill engine, from the admission on."""
        self.begin_by_s, self.begin_limit = self.created_s + within_s, name
        self.note_limit(self, self.begin_by_s)

    @property
    def next_limit(self) -> tuple[float | None, str]:
        """The time and the name of the limit that ends the room first."""
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
        """Say what did not happen within a limit that `late` has returned."""
        what = f"it has waited too long for {self.waits_for}"
        if limit == self.begin_limit:
            what = "no prefill engine has begun it in time"
        return f"{what} (limit: {limit})"


def slowest(phases_s: dict[str, float], of_rank_s: Mapping[str, float]) -> None:
    """Add the phases of a rank to those of its room, which is as slow as its slowest rank."""
    for phase, seconds in of_rank_s.items():
        phases_s[phase] = max(phases_s.get(phase, 0.0), seconds)
