"""What decode nodes offer: whether an offer can be right, and where it waits when it came before its room was admitted.

Owns: the form of an offer, the waiting ones, how many may wait and for how long. Must not know: how an offer is taken
or refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from kvbridge.core.clock import Clock
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.tables import GROWING_SPACES, tables_from_wire
from kvbridge.core.ids import REQUEST_SPACES
from kvbridge.core.wire.messages import Offer

MOST_OFFERS = 4_096
MOST_BYTES = 64 << 20
"""Offers that wait at once, and the bytes that they take; when there are more, one of them is turned away."""
OFFER_BYTES = 4_096
"""What an offer takes beside its page tables."""


def check_offer(offer: Offer, geometry: ModelGeometry, *, prompt_tokens: int) -> None:
    """Raise InvalidInputError, naming what is wrong, for an offer that does not fit a room of `prompt_tokens` tokens.

    Page ids are checked against the peer's manifest where they are used, by the planner.
    """
    page = geometry.tokens_per_page
    if offer.prompt_tokens != prompt_tokens:
        raise InvalidInputError(f"decode offers {offer.prompt_tokens} prompt tokens, prefill admitted {prompt_tokens}")
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
    """An offer, who made it and until when it waits."""

    peer: str
    offer: Offer
    expires_s: float

    @property
    def size_bytes(self) -> int:
        """What it takes to keep it, about."""
        return OFFER_BYTES + sum(len(table.ids) for table in self.offer.tables)


class EarlyOffers:
    """At most one offer for each attempt; the first one counts. In the order of their expiry.

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

    def put(self, peer: str, offer: Offer) -> EarlyOffer | None:
        """Keep an offer. Returns the one that is turned away for it: this one, or the oldest of too many."""
        key = offer.room, offer.generation
        known = self._waiting.get(key)
        newcomer = EarlyOffer(peer, offer, self._clock() + self._wait_s)
        if known is not None:
            return None if known.peer == peer else newcomer
        if newcomer.size_bytes > MOST_BYTES // 2:
            return newcomer
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
        late = [key for key, waiting in takewhile(lambda item: item[1].expires_s <= now_s, self._waiting.items())]
        return [offer for key in late if (offer := self._forget(key)) is not None]
