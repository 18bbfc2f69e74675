"""Offers of decode nodes: the check whether one fits a room, and the offers that came before their room was admitted."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvbridge.core.errors import InvalidInputError, KeyMismatchError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import GROWING_SPACES, tables_from_wire
from kvbridge.core.ids import REQUEST_SPACES
from kvbridge.core.process import Clock
from kvbridge.core.wire.messages import Intend, Offer
from kvbridge.node.prefill.room import Asking

MOST_OFFERS = 4_096
MOST_PEER_BYTES = 8 << 20
MOST_BYTES = 64 << 20
"""How many offers may wait at once, and the bytes that those of one peer and of all may take; one too many is refused."""
HELD_WAIT_S = 0.5
"""An offer marked `held` waits so long for its room. The engine's Hold may still be in the node's socket; longer means that the
room is gone."""
OFFER_BYTES = 4_096
"""The size of an offer beside its page tables."""


def check_offer(asking: Asking, geometry: ModelGeometry, *, prompt_tokens: int, prompt_digest: bytes = b"") -> None:
    """Raise InvalidInputError, naming the fault, for an offer or intent that does not fit a room of `prompt_tokens` tokens.

    Raises KeyMismatchError when the engines of both sides state different prompts. The planner checks page ids against the peer's
    manifest where it uses them.
    """
    if asking.prompt_digest != prompt_digest:
        ours, theirs = (digest.hex() or "nothing" for digest in (prompt_digest, asking.prompt_digest))
        raise KeyMismatchError(
            f"the room is of another prompt: by its digest decode asks for {theirs}, and prefill holds {ours}; tokens, adapter, "
            "multimodal inputs or salt of the two requests differ, or the room's id is that of another request"
        )
    if asking.prompt_tokens != prompt_tokens:
        raise InvalidInputError(f"decode offers {asking.prompt_tokens} prompt tokens, prefill admitted {prompt_tokens}")
    if isinstance(asking, Intend):
        return
    page, prefix_tokens = geometry.tokens_per_page, asking.prefix_tokens
    if prefix_tokens > prompt_tokens or prefix_tokens % page:
        raise InvalidInputError(
            f"decode holds a prefix of {prefix_tokens} tokens, which must be a multiple of {page} and at most {prompt_tokens}"
        )
    for space, table in tables_from_wire(asking.tables).items():
        if space not in REQUEST_SPACES:
            raise InvalidInputError(f"decode offers pages of '{space}', which no peer writes")
        if space in GROWING_SPACES and table.first_page != prefix_tokens // page:
            raise InvalidInputError(
                f"decode holds the first {prefix_tokens // page} pages of the prompt, and its table of space '{space}' "
                f"begins with page {table.first_page}: pages that several read are nobody's to write"
            )


class EarlyOffer(NamedTuple):
    """An offer or intent that waits for its room."""

    peer: str
    offer: Asking
    expires_s: float
    size_bytes: int
    """The memory that the offer takes, about."""


class EarlyOffers:
    """At most one offer for each attempt: the first, or the offer that follows an intent of the same peer.

    Each peer has a share of its own, so that no peer crowds the others out.
    """

    def __init__(self, *, wait_s: float, clock: Clock) -> None:
        """`wait_s`: `timeouts.early_offer_s`."""
        self._wait_s, self._clock = wait_s, clock
        self._waiting: dict[tuple[int, int], EarlyOffer] = {}
        """By room and generation, in the order of their arrival."""
        self._bytes: Counter[str] = Counter()
        """The size of each peer's offers."""

    def put(self, peer: str, message: Asking) -> bool:
        """Keep an offer; return whether there was room for it."""
        key = message.room, message.generation
        known = self._waiting.get(key)
        if known is not None and known.peer != peer:
            return False
        if known is not None and (isinstance(known.offer, Offer) or isinstance(message, Intend)):
            return True
        self.take(*key)
        tables = message.tables if isinstance(message, Offer) else ()
        size_bytes = OFFER_BYTES + sum(len(table.ids) for table in tables)
        is_too_much = self._bytes[peer] + size_bytes > MOST_PEER_BYTES or self._bytes.total() + size_bytes > MOST_BYTES
        if is_too_much or len(self._waiting) >= MOST_OFFERS:
            return False
        wait_s = min(HELD_WAIT_S, self._wait_s) if message.held else self._wait_s
        self._waiting[key] = EarlyOffer(peer, message, self._clock() + wait_s, size_bytes)
        self._bytes[peer] += size_bytes
        return True

    def take(self, room: int, generation: int, *, of: str = "") -> EarlyOffer | None:
        """Return and forget the offer for an attempt; `of`: only if this peer made it."""
        found = self._waiting.get((room, generation))
        if found is None or (of and found.peer != of):
            return None
        self._bytes[found.peer] -= found.size_bytes
        return self._waiting.pop((room, generation))

    def forget_peer(self, peer: str) -> None:
        """Forget every offer of a peer."""
        self._waiting = {key: known for key, known in self._waiting.items() if known.peer != peer}
        del self._bytes[peer]

    def expired(self) -> list[EarlyOffer]:
        """Return and forget the offers that have waited long enough."""
        now_s = self._clock()
        late = [key for key, waiting in self._waiting.items() if waiting.expires_s <= now_s]
        return [offer for key in late if (offer := self.take(*key)) is not None]
