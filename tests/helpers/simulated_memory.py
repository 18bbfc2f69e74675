"""The contents of the pages of two nodes, by page key or by owner, and the pages of engines that bring their own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvbridge.core.errors import BridgeError, CapacityError
from kvbridge.core.ids import IndexSpace, Rank, Tables
from kvbridge.core.wire.worker_messages import Send
from kvbridge.pool.accounts.book import Owner
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.rooms import PAGE, R0, R1

PAGES = 8
RANKS = (R0, R1)

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
    """The content of a whole page, or of the last one, of an owner's prompt."""
    return keys[page] if page < len(keys) else (owner, page)


def write(memory: Memory, rank: Rank, tables: Tables, pages: Iterable[int], labels: Sequence[Label]) -> None:
    """The engine of a rank writes pages of a request; `labels` are those of all its pages, from the first on."""
    table = tables[IndexSpace.FULL]
    for page in pages:
        memory[rank, int(table.ids[page - table.first_page])] = labels[page]


def pages_sent(order: Send) -> range:
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


class EnginePool:
    """Page ids of one engine with a prefix cache. A page that nobody reads is found by its key until it is given out again."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.of: dict[Owner, list[int]] = {}
        self.found: dict[Owner, int] = {}
        self.reused = 0
        self._readers: Counter[int] = Counter()
        self._known: dict[Label, int] = {}

    @property
    def unused(self) -> list[int]:
        """Pages that no request reads; those that hold nothing known come first."""
        known = set(self._known.values())
        return sorted((page for page in range(PAGES) if not self._readers[page]), key=lambda page: page in known)

    def take(self, owner: Owner, labels: Sequence[Label], *, at_most: int, fresh: int | None = None) -> None:
        """Take a request's pages: `at_most` so many of its beginning that are there, and others (`fresh` for now) for the rest."""
        if owner in self.of:
            return
        found = []
        for label in labels[:at_most]:
            if label not in self._known:
                break
            found.append(self._known[label])
        rest = len(labels) - len(found)
        lacking = rest if fresh is None else min(fresh, rest)
        others = [page for page in self.unused if page not in found][:lacking]
        if len(others) < lacking:
            raise CapacityError("the engine has no pages left")
        self._forget(others)
        self.of[owner], self.found[owner] = found + others, len(found)
        self._readers.update(self.of[owner])
        self.reused += len(found)

    @contextmanager
    def returned_if_refused(self, owner: Owner) -> Iterator[None]:
        """Pages that a request takes for a call go back when the node refuses that, unless it had them before."""
        fresh = owner not in self.of
        try:
            yield
        except BridgeError:
            if fresh:
                self.give_back(owner)
            raise

    def take_more(self, owner: Owner, count: int) -> None:
        fresh = self.unused[:count]
        if len(fresh) < count:
            raise CapacityError("the engine has no pages left")
        self._forget(fresh)
        self.of[owner] += fresh
        self._readers.update(fresh)

    def _forget(self, pages: Sequence[int]) -> None:
        self._known = {label: page for label, page in self._known.items() if page not in pages}

    def know(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Others find those whole pages of a request from now on that hold, on every rank, what they are to hold."""
        for key, page in zip(keys, self.of.get(owner, ()), strict=False):
            if all(self.memory.get((rank, page)) == key for rank in RANKS):
                self._known.setdefault(key, page)

    def give_back(self, owner: Owner) -> None:
        """A request is over, or its room is; harmless when it has nothing."""
        self._readers.subtract(self.of.pop(owner, ()))
        self.found.pop(owner, None)

    def check(self) -> None:
        for key, page in self._known.items():
            for rank in RANKS:
                held = self.memory.get((rank, page))
                assert held == key, f"page {page} is known as {key!r}, and rank {rank} of it holds {held!r}"
