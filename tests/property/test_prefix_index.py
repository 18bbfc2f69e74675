"""Evictions from the index of cached prefixes, and their order, against a naive model: a dictionary of paths.

Checkpoints, twins and pages of several spaces are in the model of `test_host_copies`.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbridge.core.errors import CapacityError, NotFoundError
from kvbridge.core.ids import IndexSpace
from kvbridge.tier import residence as victims_module
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.examples import fewer
from tests.helpers.prefix_recount import all_pages, check_index

FULL = IndexSpace.FULL
IDENTITY = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=1)
PAGES = 40
TEXTS = st.text("ab", min_size=1, max_size=7)


def keys_of(text: str) -> Keys:
    return page_keys(IDENTITY, [ord(letter) for letter in text])


@dataclass(eq=False)
class Page:
    full: int
    used: float
    pins: int = 0


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.hand = 0
        self.index = PrefixIndex([FULL], PAGES)
        self.known: dict[str, Page] = {}
        self.unreachable: list[Page] = []
        self.readers: list[tuple[np.ndarray, list[Page]]] = []
        self.free = list(range(PAGES))
        self.now = 0.0

    def path(self, text: str) -> list[Page]:
        """The pages of a text from its beginning, as far as they are known."""
        length = max(length for length in range(len(text) + 1) if not length or text[:length] in self.known)
        return [self.known[text[: at + 1]] for at in range(length)]

    def give(self, found: dict, pages: list[Page]) -> None:
        """The index has given up these pages and no others."""
        assert sorted(found.get(FULL, np.array([])).tolist()) == sorted(page.full for page in pages)
        self.free += [page.full for page in pages]

    def expected_victims(self, count: int) -> list[str]:
        """One page at a time: of the oldest fifth as the hand comes to them, going down, and then the oldest."""
        gone: list[str] = []

        def bare(text: str) -> bool:
            return not self.known[text].pins and not any(
                text + letter in self.known and text + letter not in gone for letter in "ab"
            )

        def age(text: str) -> float:
            return self.known[text].used

        used = sorted(page.used for page in [*self.known.values(), *self.unreachable])
        lying = {page.full: text for text, page in self.known.items()}
        for page in [*range(self.hand - 1, -1, -1), *range(PAGES - 1, self.hand - 1, -1)]:
            text = lying.get(page)
            if text is not None and bare(text) and age(text) <= used[len(used) // 5]:
                gone.append(text)
                if len(gone) == count:
                    self.hand = page
                    return gone
        while len(gone) < count:
            text = min((text for text in self.known if text not in gone and bare(text)), key=age)
            oldest = age(text)
            while len(gone) < count and text and bare(text) and age(text) <= oldest:
                gone.append(text)
                text = text[:-1]
        return gone

    @rule(text=TEXTS, start=st.integers(0, 7), read=st.booleans())
    def insert(self, text, start, read):
        self.now += 1
        known, start = len(self.path(text)), min(start, len(text))
        if len(text) - start > len(self.free):
            return
        pages = [self.free.pop() for _ in range(len(text) - start)]
        own = {FULL: np.array(pages, dtype=np.int32)}
        if known < start:
            with pytest.raises(NotFoundError):
                self.index.insert(keys_of(text), start, own, now=self.now)
            self.free += pages
            return
        found = self.index.insert(keys_of(text), start, own, now=self.now)
        assert len(found.new) == len(text) - max(start, known)
        self.free += pages[: max(0, known - start)]
        for at in range(max(start, known), len(text)):
            self.known[text[: at + 1]] = Page(pages[at - start], self.now)
        path = self.path(text)
        for page in path:
            page.used = self.now
        assert self.index.pages(found.records)[FULL].tolist() == [page.full for page in path[start:]]
        if read:
            before = self.index.match(keys_of(text), at_most=start)
            self.pin([before, found.records], path)

    def pin(self, parts: list[np.ndarray], pages: list[Page]) -> None:
        for part in parts:
            self.index.pin(part)
        for page in pages:
            page.pins += 1
        self.readers.append((np.concatenate(parts), pages))

    @rule(text=TEXTS, at_most=st.none() | st.integers(0, 8), act=st.sampled_from(["look", "pin", "touch"]))
    def match(self, text, at_most, act):
        records = self.index.match(keys_of(text), at_most=at_most)
        pages = self.path(text if at_most is None else text[:at_most])
        assert self.index.pages(records)[FULL].tolist() == [page.full for page in pages]
        if act == "pin":
            self.pin([records], pages)
        elif act == "touch":
            self.now += 1
            self.index.touch(records, self.now)
            for page in pages:
                page.used = self.now

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def unpin(self, which):
        records, pages = self.readers.pop(which % len(self.readers))
        found = self.index.unpin(records)
        for page in pages:
            page.pins -= 1
        over = [page for page in pages if not page.pins and page in self.unreachable]
        self.unreachable = [page for page in self.unreachable if page not in over]
        self.give(found, over)

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        if count > sum(not page.pins for page in self.known.values()):
            with pytest.raises(CapacityError):
                self.index.evict({FULL: count})
            return
        expected = self.expected_victims(count)
        found = self.index.evict({FULL: count})
        assert found[FULL].tolist() == [self.known[text].full for text in expected]
        pages = [self.known.pop(text) for text in expected]
        assert not any(page.pins for page in pages)
        self.give(found, pages)

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 99), everything=st.booleans())
    def drop(self, which, everything):
        text = sorted(self.known)[which % len(self.known)]
        gone = [other for other in self.known if everything or other.startswith(text)]
        found = self.index.drop(None if everything else self.index.match(keys_of(text))[-1:])
        pages = [self.known.pop(other) for other in gone]
        self.unreachable += [page for page in pages if page.pins]
        self.give(found, [page for page in pages if not page.pins])

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "index"):
            return
        check_index(self.index)
        cached = all_pages(self.index)[FULL].tolist()
        assert sorted(cached) == sorted(page.full for page in [*self.known.values(), *self.unreachable])
        assert sorted(self.free + cached) == list(range(PAGES))
        assert self.index.evictable()[FULL] == sum(not page.pins for page in self.known.values())
        assert all(text[:-1] in self.known for text in self.known if len(text) > 1)


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch):
    """There are so few candidates here that outdated ones would never be left out."""
    monkeypatch.setattr(victims_module, "_SPARE_CANDIDATES", 4)


TestIndex = IndexMachine.TestCase
TestIndex.settings = fewer(2, stateful_step_count=40)
