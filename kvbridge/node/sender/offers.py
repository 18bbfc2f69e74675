"""What decode nodes offer: whether an offer can be right, and where it waits when it came before its room was admitted.

Owns: the form of an offer, the waiting ones, how many may wait and for how long. Must not know: how an offer is taken
or refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.errors import InvalidInputError, KeyMismatchError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.tables import GROWING_SPACES, tables_from_wire
from kvbridge.core.ids import REQUEST_SPACES
from kvbridge.core.wire.messages import Intend, Offer

MOST_OFFERS = 4_096
MOST_BYTES = 64 << 20
"""Offers that wait at once, and the bytes that they take; when there are more, one of them is turned away."""
HELD_WAIT_S = 0.5
"""How long an offer for a room waits of which decode was told that it is there: as long as the message that admits it may take from
the engine to its node, which may have been sent before that, and read after."""
OFFER_BYTES = 4_096
"""What an offer takes beside its page tables."""


Asking = Intend | Offer
"""How a decode node asks for a room."""


def check_offer(asking: Asking, geometry: ModelGeometry, *, prompt_tokens: int, prompt_digest: bytes = b"") -> None:
    """Raise InvalidInputError, naming what is wrong, for what does not fit a room of `prompt_tokens` tokens.

    KeyMismatchError for a room of another prompt: what the engines of both sides say it is of (`prompt_digest`) differs. Page ids
    are checked against the peer's manifest where they are used, by the planner.
    """
    if asking.prompt_digest != prompt_digest:
        ours, theirs = (digest.hex() or "nothing" for digest in (prompt_digest, asking.prompt_digest))
        raise KeyMismatchError(
            f"the room is of another prompt: by its digest decode asks for {theirs}, and prefill holds {ours}; tokens, adapter, "
            "multimodal inputs or salt of the two requests differ, or the room's id is that of another request"
        )
    if asking.prompt_tokens != prompt_tokens:
        raise InvalidInputError(f"decode offers {asking.prompt_tokens} prompt tokens, prefill admitted {prompt_tokens}")
    if isinstance(asking, Offer):
        _check_tables(asking, geometry)


def _check_tables(offer: Offer, geometry: ModelGeometry) -> None:
    page = geometry.tokens_per_page
    if offer.prefix_tokens > offer.prompt_tokens or offer.prefix_tokens % page:
        raise InvalidInputError(
            f"decode holds a prefix of {offer.prefix_tokens} tokens, which must be a multiple of {page} "
            f"and at most {offer.prompt_tokens}"
        )
    for space, table in tables_from_wire(offer.tables).items():
        if space not in REQUEST_SPACES:
            raise InvalidInputError(f"decode offers pages of '{space}', which no peer writes")
        if space in GROWING_SPACES and table.first_page != offer.prefix_tokens // page:
            raise InvalidInputError(
                f"decode holds the first {offer.prefix_tokens // page} pages of the prompt, and its table of space '{space}' "
                f"begins with page {table.first_page}: pages that several read are nobody's to write"
            )


@dataclass(frozen=True, slots=True)
class EarlyOffer:
    """An offer, or an intent, who made it and until when it waits."""

    peer: str
    offer: Asking
    expires_s: float

    @property
    def size_bytes(self) -> int:
        """What it takes to keep it, about."""
        tables = self.offer.tables if isinstance(self.offer, Offer) else ()
        return OFFER_BYTES + sum(len(table.ids) for table in tables)


class EarlyOffers:
    """At most one offer for each attempt; the first one counts, but that an offer follows the intent of its peer.

    In the order in which they came.

    When there are too many, the peer whose offers take the most loses its oldest: nobody crowds the others out.
    """

    def __init__(self, *, wait_s: float, clock: Clock) -> None:
        """`wait_s`: `timeouts.early_offer_s`."""
        self._wait_s = wait_s
        self._clock = clock
        self._waiting: OrderedDict[tuple[int, int], EarlyOffer] = OrderedDict()
        self._peers: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, peer: str, message: Asking) -> EarlyOffer | None:
        """Keep an offer. Returns the one that is turned away for it: this one, or the oldest of too many."""
        key = message.room, message.generation
        known = self._waiting.get(key)
        wait_s = min(HELD_WAIT_S, self._wait_s) if message.held else self._wait_s
        newcomer = EarlyOffer(peer, message, self._clock() + wait_s)
        if known is not None and known.peer != peer:
            return newcomer
        if known is not None and (isinstance(known.offer, Offer) or isinstance(message, Intend)):
            return None
        if newcomer.size_bytes > MOST_BYTES // 2:
            return newcomer
        self._forget(key)
        self._waiting[key] = newcomer
        self._peers[peer] += newcomer.size_bytes
        self._bytes += newcomer.size_bytes
        return self._turn_away() if len(self._waiting) > MOST_OFFERS or self._bytes > MOST_BYTES else None

    def _turn_away(self) -> EarlyOffer | None:
        most = self._peers.most_common(1)[0][0]
        return self._forget(next(key for key, waiting in self._waiting.items() if waiting.peer == most))

    def _forget(self, key: tuple[int, int]) -> EarlyOffer | None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._bytes -= found.size_bytes
            self._peers[found.peer] -= found.size_bytes
            if not self._peers[found.peer]:
                del self._peers[found.peer]
        return found

    def take(self, room: int, generation: int) -> EarlyOffer | None:
        """Return and forget the offer for an attempt."""
        return self._forget((room, generation))

    def withdraw(self, peer: str, room: int, generation: int) -> None:
        """Forget the offer that this peer made for an attempt."""
        known = self._waiting.get((room, generation))
        if known is not None and known.peer == peer:
            self._forget((room, generation))

    def forget_peer(self, peer: str) -> None:
        """Forget every offer of a peer."""
        for key in [key for key, known in self._waiting.items() if known.peer == peer]:
            self._forget(key)

    def expired(self) -> list[EarlyOffer]:
        """Return and forget the offers that have waited long enough."""
        now_s = self._clock()
        late = [key for key, waiting in self._waiting.items() if waiting.expires_s <= now_s]
        return [offer for key in late if (offer := self._forget(key)) is not None]
