"""One attempt at one request on a node, as both roles keep it, and the page keys that its engines state.

Whoever names a page key gets its page, and a router's keys are a claim. Engines therefore state the keys of the tokens that they
really have, and a room goes on only with equal ones. Errors name pages, never tokens or keys. Behind the last whole page, where
there are no keys, the end keys of the room's engines are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kvbridge.core.errors import InvalidInputError, KeyMismatchError, RoomFailedError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import Retention
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.engine_messages import Begin, Claim
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.pool.accounts.book import Owner
from kvbridge.telemetry.context import TraceContext
from kvbridge.tier.keys import KEY_BYTES, NO_KEYS, Keys

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
    """An engine that admits a room itself: the room ends with that engine, and waits for it without a limit."""

    name: str = ""
    prompt_digest: bytes = b""
    """The engine's statement of the prompt; the engine on the other side has to state the same."""
    held: bool = False
    """Decode: the engine was told that prefill holds the room already."""


OVER_HTTP = AdmittingEngine()
"""No engine: the room was admitted over HTTP, or by an engine on behalf of others."""


class StatedAnswer(NamedTuple):
    """An engine's statement about a room that it releases: how many tokens its pages hold whole, and their keys."""

    valid_tokens: int
    keys: Keys


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
            twin: PageTable(twin, self.moves[space][1], 0 if space is IndexSpace.SWA else self.first_page)
            for space, twin in HOST_COPIES.items()
            if space in self.moves
        }


@dataclass(eq=False)
class Room(Generic[StateT]):
    """One attempt at one request on this node. Only `Rooms` writes the fields. Times are on its clock."""

    final_states: ClassVar[frozenset[Any]] = frozenset()
    room: int
    generation: int
    prompt_tokens: int
    max_new_tokens: int
    client: str
    state: StateT
    created_s: float
    prefix_tokens: int = 0
    """Tokens that decode holds already: nobody sends them."""
    admitted_by: AdmittingEngine = OVER_HTTP
    owner: Owner = field(init=False)
    """The key under which pages are booked."""
    about: dict[str, Any] = field(init=False, repr=False)
    """The fields of every message about the room."""
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
    """Called with every new limit; set by the book, which keeps limits in their order."""
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
    """How many of the last tokens of the cache hit were in host memory alone."""
    shared_pages: dict[IndexSpace, int] = field(default_factory=dict)
    """How many leading pages of the room are shared cache pages, by space."""
    load: Load | None = None
    """Pages that engines have to load before they can read them; None: nothing, or nothing any more."""
    keys: Keys = NO_KEYS
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
    peer: str = ""
    """The incarnation of the first node at the other end; empty while there is none."""
    peers: tuple[str, ...] = ()
    """The nodes at the other end as INSTANCE/NODE, or their addresses before they have answered; kept with the receipt."""
    users: set[str] = field(default_factory=set)
    """Engines that may use the pages: prefill's that may write them, decode's that have claimed and not released the room."""
    departed: set[str] = field(default_factory=set)
    """Those users whose connection has ended and whose process has not."""

    def __post_init__(self) -> None:
        self.owner = Owner(self.room, self.generation)
        self.about = {"room": self.room, "generation": self.generation}

    # ------------------------------------------------------------------ differs by role

    @property
    def user_state(self) -> RoomState:
        """The state that users see: a failing room has failed for them, whatever is still to be cleaned up."""
        raise NotImplementedError

    def lacks(self, ranks: tuple[Rank, ...], prompt_digest: bytes) -> bool:  # noqa: ARG002 - only prefill has rooms of several engines
        """Return whether another engine computes this very prompt on other ranks, and the room needs these ranks as well."""
        return False

    @property
    def waits_for(self) -> str:
        """The next thing that has to happen, for people; empty when nothing is waited for."""
        raise NotImplementedError

    def lose(self, engine: str) -> bool:
        """Note that an engine will not come back; return whether the room fails without it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ as others are told of it

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state in self.final_states

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of every fact about the room."""
        return {**self.about, "peer": self.peer}

    @property
    def tokens(self) -> dict[str, Any]:
        """The numbers of tokens in every description of the room."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefix_tokens": self.prefix_tokens,
            "computed_tokens": self.computed_tokens,
        }

    def blame(self, code: str, reason: str) -> None:
        """Keep the first cause, cut to a length that every message can carry."""
        if not self.reason_code:
            self.reason_code = code[:200] or RoomFailedError.code
            self.reason = reason[:REASON_CHARS]

    def add_phases(self, of_rank_s: Mapping[str, float]) -> None:
        """Add the phases of a rank: a room is as slow as its slowest rank."""
        for phase, seconds in of_rank_s.items():
            self.phases_s[phase] = max(self.phases_s.get(phase, 0.0), seconds)

    # ------------------------------------------------------------------ limits

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
        """Return the name of the limit that has passed, once; empty when none has."""
        limit_s, name = self.next_limit
        if limit_s is None or now_s < limit_s:
            return ""
        if limit_s == self.begin_by_s:
            self.begin_by_s = None
        else:
            self.wait_until(None)
        return name

    # ------------------------------------------------------------------ page keys of engines

    def differing_page(self, said: Begin | Claim, tokens_per_page: int, end_keys: Iterable[bytes]) -> tuple[int, str]:
        """Return the first page in which an engine's tokens differ from the room's, and a text that is empty if none does.

        `end_keys`: as other engines of the room have stated them. The keys of engines are ignored in a room without keys. Raises
        InvalidInputError when the room has keys and the engine states none, or another number.
        """
        if not self.keys:
            return 0, ""
        if not said.page_hashes:
            raise InvalidInputError(
                f"room {self.room} was admitted with page keys, so its engines have to state those of their own tokens: give "
                "page_keys=engine.page_keys(tokens, adapter=..., namespace=...)"
            )
        keys = keys_of(said.page_hashes, self.prompt_tokens, tokens_per_page)
        text = self._difference(keys, tokens_per_page)
        if not text and said.end_key and end_differs((said.end_key, *end_keys)):
            text = (
                "tokens are not those of another engine of the room: the last page, which is not whole, is the first that "
                f"differs (tokens {len(self.keys) * tokens_per_page} to {self.prompt_tokens - 1})"
            )
        return self.keys.shared_with(keys), text

    def stated_answer(self, valid_tokens: int, page_hashes: bytes, tokens_per_page: int) -> StatedAnswer | None:
        """Return an engine's statement about the room that it releases; None when it makes none, or the room has no keys.

        Raises InvalidInputError for keys that are not those of so many tokens, KeyMismatchError for another prompt.
        """
        if not self.keys or not valid_tokens:
            return None
        if valid_tokens < self.prompt_tokens:
            raise InvalidInputError(
                f"valid_tokens is {valid_tokens}, but room {self.room} has a prompt of {self.prompt_tokens} tokens, all of which "
                "are in its pages: count them too"
            )
        keys = keys_of(page_hashes, valid_tokens, tokens_per_page)
        if text := self._difference(keys, tokens_per_page):
            raise KeyMismatchError(f"room {self.room}: nothing of its answer is kept: the decode engine's {text}")
        return StatedAnswer(valid_tokens, keys)

    def _difference(self, keys: Keys, tokens_per_page: int) -> str:
        page = self.keys.shared_with(keys)
        if page == len(self.keys):
            return ""
        first, last = page * tokens_per_page, (page + 1) * tokens_per_page - 1
        also = " or its model, revision, adapter or namespace" if page == 0 else ""
        return (
            f"tokens are not those that the request's page keys name: page {page} (tokens {first} to {last}) is the first that "
            f"differs; its tokens{also} are others in what computed the request's page_hashes"
        )


def keys_of(page_hashes: bytes, tokens: int, tokens_per_page: int) -> Keys:
    """Return the keys of all whole pages of so many tokens. Raises InvalidInputError for another number of bytes."""
    whole = tokens // tokens_per_page
    if len(page_hashes) != whole * KEY_BYTES:
        raise InvalidInputError(
            f"page_hashes has {len(page_hashes)} bytes; {tokens} tokens are {whole} whole pages of {tokens_per_page}, whose keys "
            f"have {whole * KEY_BYTES} bytes ({KEY_BYTES} each)"
        )
    return Keys(page_hashes)


def end_differs(end_keys: Iterable[bytes]) -> bool:
    """Return whether end keys are of different prompts; an empty one says nothing."""
    return len({*end_keys} - {b""}) > 1
