"""The index of cached prefixes against a naive model: a dictionary of paths, each page with its readers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbridge.core.errors import CapacityError, NotFoundError
from kvbridge.core.ids import IndexSpace
from kvbridge.tier import victims as victims_module
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import PrefixIdentity, page_keys
from tests.helpers.examples import fewer

FULL, HOST, SWA = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA
IDENTITY = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=1)
PAGES = {FULL: 40, HOST: 50, SWA: 12}
TEXTS = st.text("ab", min_size=1, max_size=7)


@dataclass(eq=False)
class Page:
    """One cached page of the model."""

    full: int
    host: int
    used: float
    pins: int = 0
    checkpoint: list[int] = field(default_factory=list)
    checkpoint_pins: int = 0


@dataclass(eq=False)
class Reader:
    records: np.ndarray
    pages: list[Page]
    restores: int | None = None
    """The place in its path of the checkpoint that it pins."""


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.hand = 0
        self.index = PrefixIndex([FULL, HOST], PAGES[FULL])
        self.known: dict[str, Page] = {}
        self.unreachable: list[Page] = []
        self.readers: list[Reader] = []
        self.free = {space: list(range(count)) for space, count in PAGES.items()}
        self.checkpoints: list[Page] = []
        """The one that was used longest ago first."""
        self.now = 0.0

    # ------------------------------------------------------------------------------------- the model

    def longest(self, text: str) -> int:
        return max(length for length in range(len(text) + 1) if not length or text[:length] in self.known)

    def leaves(self) -> list[str]:
        return [
            text
            for text, page in self.known.items()
            if not page.pins and not any(text + letter in self.known for letter in "ab")
        ]

    def give(self, found: dict) -> None:
        for space, ids in found.items():
            self.free[space] += ids.tolist()

    def take(self, count: int) -> dict:
        taken = {space: [self.free[space].pop() for _ in range(count)] for space in (FULL, HOST)}
        return {space: np.array(ids, dtype=np.int32) for space, ids in taken.items()}

    def expected_victims(self, count: int) -> list[str]:
        """One page at a time: of the oldest fifth as the hand comes to them, going down, and then the oldest."""
        gone: list[str] = []

        def bare(text: str) -> bool:
            return not self.known[text].pins and not any(
                text + letter in self.known and text + letter not in gone for letter in "ab"
            )

        used = sorted(page.used for page in [*self.known.values(), *self.unreachable])
        lying = {page.full: text for text, page in self.known.items()}
        for page in [*range(self.hand - 1, -1, -1), *range(PAGES[FULL] - 1, self.hand - 1, -1)]:
            text = lying.get(page)
            if text is not None and bare(text) and self.age(text) <= used[len(used) // 5]:
                gone.append(text)
                if len(gone) == count:
                    self.hand = page
                    return gone
        while len(gone) < count:
            text = min((text for text in self.known if text not in gone and bare(text)), key=self.age)
            age = self.age(text)
            while len(gone) < count and text and bare(text) and self.age(text) <= age:
                gone.append(text)
                text = text[:-1]
        return gone

    def age(self, text: str) -> float:
        return self.known[text].used

    def forget(self, texts: list[str]) -> list[Page]:
        pages = [self.known.pop(text) for text in texts]
        self.checkpoints = [page for page in self.checkpoints if page not in pages]
        return pages

    # ------------------------------------------------------------------------------------- rules

    @rule(text=TEXTS, start=st.integers(0, 7), read=st.booleans())
    def insert(self, text, start, read):
        self.now += 1
        known, start = self.longest(text), min(start, len(text))
        count = len(text) - start
        if count > min(len(self.free[FULL]), len(self.free[HOST])):
            return
        pages = self.take(count)
        keys = page_keys(IDENTITY, [ord(letter) for letter in text])
        if known < start:
            with pytest.raises(NotFoundError):
                self.index.insert(keys, start, pages, now=self.now)
            self.give(pages)
            return
        found = self.index.insert(keys, start, pages, now=self.now)
        assert len(found.new) == len(text) - max(start, known)
        for at in range(start, len(text)):
            full, host = (int(pages[space][at - start]) for space in (FULL, HOST))
            if at >= known:
                self.known[text[: at + 1]] = Page(full, host, self.now)
            else:
                self.give({FULL: np.array([full]), HOST: np.array([host])})
        for length in range(1, len(text) + 1):
            self.known[text[:length]].used = self.now
        expected = [self.known[text[: at + 1]].full for at in range(start, len(text))]
        assert self.index.pages(found.records)[FULL].tolist() == expected
        if read:
            self.pin_in_two_parts(text, start, found.records)

    def pin_in_two_parts(self, text, start, records):
        path = self.index.match(page_keys(IDENTITY, [ord(letter) for letter in text]), at_most=start)
        self.index.pin(path)
        self.index.pin(records)
        self.note_reader(text, np.concatenate((path, records)))

    def note_reader(self, text, records):
        pages = [self.known[text[: at + 1]] for at in range(len(records))]
        for page in pages:
            page.pins += 1
        self.readers.append(Reader(records, pages))

    @rule(text=TEXTS, at_most=st.none() | st.integers(0, 8), act=st.sampled_from(["look", "pin", "touch"]))
    def match(self, text, at_most, act):
        keys = page_keys(IDENTITY, [ord(letter) for letter in text])
        records = self.index.match(keys, at_most=at_most)
        count = self.longest(text if at_most is None else text[:at_most])
        pages = [self.known[text[: at + 1]] for at in range(count)]
        found = self.index.pages(records)
        assert found[FULL].tolist() == [page.full for page in pages]
        assert found[HOST].tolist() == [page.host for page in pages]
        assert self.index.device.checkpointed(records).tolist() == [bool(page.checkpoint) for page in pages]
        if act == "pin":
            self.index.pin(records)
            self.note_reader(text, records)
        elif act == "touch":
            self.now += 1
            self.index.touch(records, self.now)
            for page in pages:
                page.used = self.now

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def unpin(self, which):
        reader = self.readers.pop(which % len(self.readers))
        if reader.restores is not None:
            self.index.device.checkpoints.unpin(int(reader.records[reader.restores]))
            reader.pages[reader.restores].checkpoint_pins -= 1
        found = self.index.unpin(reader.records)
        for page in reader.pages:
            page.pins -= 1
        over = [page for page in reader.pages if not page.pins and page in self.unreachable]
        self.unreachable = [page for page in self.unreachable if page not in over]
        self.checkpoints = [page for page in self.checkpoints if page not in over]
        self.require_pages(found, over)
        self.give(found)

    def require_pages(self, found, pages):
        assert sorted(found.get(FULL, np.array([])).tolist()) == sorted(page.full for page in pages)
        assert sorted(found.get(HOST, np.array([])).tolist()) == sorted(page.host for page in pages)
        assert sorted(found.get(SWA, np.array([])).tolist()) == sorted(one for page in pages for one in page.checkpoint)

    @rule(count=st.integers(1, 8), space=st.sampled_from([FULL, HOST]))
    def evict(self, count, space):
        unpinned = sum(not page.pins for page in self.known.values())
        if count > unpinned:
            with pytest.raises(CapacityError):
                self.index.evict({space: count})
            return
        expected = self.expected_victims(count)
        found = self.index.evict({space: count})
        gone = [text for text, page in self.known.items() if page.full in found[FULL].tolist()]
        assert len(gone) == len(found[FULL]) >= count
        assert found[FULL].tolist() == [self.known[text].full for text in expected]
        pages = self.forget(gone)
        assert not any(page.pins for page in pages)
        assert all(text[:-1] in self.known for text in self.known if len(text) > 1)
        self.require_pages(found, pages)
        self.give(found)

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 99), everything=st.booleans())
    def drop(self, which, everything):
        text = sorted(self.known)[which % len(self.known)]
        gone = [other for other in self.known if everything or other.startswith(text)]
        record = self.index.match(page_keys(IDENTITY, [ord(letter) for letter in text]))[-1:]
        found = self.index.drop(None if everything else record)
        pinned = [self.known[other] for other in gone if self.known[other].pins]
        free = [self.known[other] for other in gone if not self.known[other].pins]
        order = self.checkpoints
        self.forget(gone)
        self.checkpoints = [page for page in order if page not in free]
        self.unreachable += pinned
        self.require_pages(found, free)
        self.give(found)

    # ------------------------------------------------------------------------------------- checkpoints

    @precondition(lambda self: self.known and len(self.free[SWA]) >= 2)
    @rule(which=st.integers(0, 99), count=st.integers(1, 2))
    def set_checkpoint(self, which, count):
        text = sorted(self.known)[which % len(self.known)]
        record = int(self.index.match(page_keys(IDENTITY, [ord(letter) for letter in text]))[-1])
        ids = [self.free[SWA].pop() for _ in range(count)]
        page = self.known[text]
        assert self.index.device.set_checkpoint(record, np.array(ids, dtype=np.int32)) == (not page.checkpoint)
        if page.checkpoint:
            self.free[SWA] += ids
        else:
            page.checkpoint = ids
            self.checkpoints.append(page)
        assert self.index.device.checkpoints.pages(record).tolist() == page.checkpoint

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99))
    def restore(self, which):
        reader = self.readers[which % len(self.readers)]
        places = [place for place, page in enumerate(reader.pages) if page.checkpoint]
        if reader.restores is not None or not places:
            return
        reader.restores = places[-1]
        page = reader.pages[places[-1]]
        assert self.index.device.pin_checkpoint(int(reader.records[places[-1]])).tolist() == page.checkpoint
        page.checkpoint_pins += 1
        self.checkpoints.remove(page)
        self.checkpoints.append(page)

    @rule(count=st.integers(1, 6))
    def evict_checkpoints(self, count):
        unpinned = [page for page in self.checkpoints if not page.checkpoint_pins]
        if count > sum(len(page.checkpoint) for page in unpinned):
            with pytest.raises(CapacityError):
                self.index.evict({SWA: count})
            return
        found = self.index.evict({SWA: count})
        assert not len(found[FULL])
        expected: list[int] = []
        for page in unpinned:
            if len(expected) < count:
                expected += page.checkpoint
                page.checkpoint = []
                self.checkpoints.remove(page)
        assert found[SWA].tolist() == expected
        self.give(found)

    # ------------------------------------------------------------------------------------- always

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        cached = self.index.all_pages()
        there = [*self.known.values(), *self.unreachable]
        assert sorted(cached[FULL].tolist()) == sorted(page.full for page in there)
        assert sorted(cached[SWA].tolist()) == sorted(one for page in there for one in page.checkpoint)
        for space, count in PAGES.items():
            assert sorted(self.free[space] + cached[space].tolist()) == list(range(count))
        unpinned = sum(not page.pins for page in self.known.values())
        checkpoints = sum(len(page.checkpoint) for page in there if not page.checkpoint_pins)
        assert self.index.evictable() == {FULL: unpinned, HOST: unpinned, SWA: checkpoints}
        assert len(self.index) == len(there)


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch):
    """There are so few candidates here that outdated ones would never be left out."""
    monkeypatch.setattr(victims_module, "_SPARE_CANDIDATES", 4)


TestIndex = IndexMachine.TestCase
TestIndex.settings = fewer(2, stateful_step_count=40)
