"""What the pages of two nodes hold, page by page, for `room_simulation`: the oracle of shared prefixes.

A page holds what was written last: a page key (all rows of that page of that prompt), or words that say whose it is. So a page that
is given to somebody while others still read it, or written by somebody late, is seen at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbridge.core.ids import IndexSpace, Rank, Tables
from kvbridge.core.wire.worker_messages import Send
from kvbridge.pool.accounts.pages import Owner
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.rooms import PAGE

Label = bytes | tuple[Owner, int] | str
Memory = dict[tuple[Rank, int], Label]
"""By the rank of the prefill node that computes the rows, which are half of each page on decode, and the page."""
GARBAGE = "what a failed transfer left"

IDENTITY = PrefixIdentity(model="tiny", revision="1", fingerprint="f", tokens_per_page=PAGE)
_CONVERSATIONS = ([1, 2, 3], [1, 2, 4], [1, 5, 6])
"""Tokens of each page: all begin alike."""


def keys_of(owner: Owner, tokens: int) -> Keys:
    """The page keys of an attempt's prompt: of the same conversation each time that room and generation make the same sum."""
    pages = _CONVERSATIONS[(owner.room + owner.generation) % len(_CONVERSATIONS)][: tokens // PAGE]
    return page_keys(IDENTITY, [token for token in pages for _ in range(PAGE)])


def label(owner: Owner, keys: Sequence[bytes], page: int) -> Label:
    """What the whole page, or the last one, of an owner's prompt holds."""
    return keys[page] if page < len(keys) else (owner, page)


def write(memory: Memory, rank: Rank, tables: Tables, pages: Iterable[int], labels: Sequence[Label]) -> None:
    """The engine of a rank writes pages of a request; `labels` are those of all its pages, from the first on."""
    table = tables[IndexSpace.FULL]
    for page in pages:
        memory[rank, int(table.ids[page - table.first_page])] = labels[page]


def pages_sent(order: Send) -> range:
    """The pages of the prompt of which an order moves rows."""
    section = order.section
    start = max(section.start_token, section.prefix_tokens)
    return range(start // PAGE, max(start // PAGE, -(-section.stop_token // PAGE)))


def wrong_pages(memory: Memory, ranks: Iterable[Rank], tables: Tables, labels: Sequence[Label]) -> list[str]:
    """Name the first pages of a request that hold something else."""
    ids = tables[IndexSpace.FULL].ids
    return [
        f"page {page} of the prompt (page {ids[page]}, rank {rank}) holds {memory.get((rank, int(ids[page])))!r}, not {wanted!r}"
        for page, wanted in enumerate(labels)
        for rank in ranks
        if memory.get((rank, int(ids[page]))) != wanted
    ]
