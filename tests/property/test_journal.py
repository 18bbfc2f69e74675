"""The journal of a kept pool against memory that is used again and again: whatever becomes of its bytes, no page is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.errors import IntegrityError
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.tier.journal import (
    ENTRY_BYTES,
    EntryKind,
    HeldCheckpoint,
    HeldPage,
    KeptFile,
    KeptHeader,
    gone,
    header_bytes,
    read_header,
    replay,
)

TWINS = 6
HEADER = KeptHeader(
    incarnation="i",
    fingerprint="f",
    model_identity=ModelIdentity(name="m", revision="1"),
    ranks=("pp0.tp0",),
    layout="l",
    files=(KeptFile(name="twins.0", length_bytes=4096, inode=7),),
)


def key_of(text: str) -> bytes:
    return text.encode().ljust(16, b".")


def page_of(text: str, twin: int, written: int) -> HeldPage:
    parent = key_of(text[:-1]) if len(text) > 1 else b""
    return HeldPage(key_of(text), parent, len(text) - 1, twin, 100 + twin, written)


class Pool:
    """Pages of memory, each with what was written into it last, and a journal that follows the rules."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[str, int]] = {}
        """By twin: the text of whose page it holds, and the digest of these bytes."""
        self.held: dict[int, str] = {}
        self.checkpoints: dict[str, tuple[int, ...]] = {}
        self.journal = b""
        self.writes = 0

    def write(self, twin: int, text: str) -> int:
        assert twin not in self.held
        self.writes += 1
        self.memory[twin] = (text, self.writes)
        return self.writes

    def add(self, text: str, twin: int) -> None:
        if text in self.held.values() or twin in self.held or twin in sum(self.checkpoints.values(), ()):
            return
        if len(text) > 1 and text[:-1] not in self.held.values():
            return
        digest = self.write(twin, text)
        self.journal += page_of(text, twin, digest).entry()
        self.held[twin] = text

    def add_checkpoint(self, text: str, twins: tuple[int, ...]) -> None:
        used = {*self.held, *sum(self.checkpoints.values(), ())}
        if (
            text in self.checkpoints
            or text not in self.held.values()
            or used & set(twins)
            or len(set(twins)) != len(twins)
        ):
            return
        digests = tuple(self.write(twin, f"end of {text}") for twin in twins)
        self.journal += b"".join(HeldCheckpoint(key_of(text), twins, digests).entries().values())
        self.checkpoints[text] = twins

    def remove(self, twin: int) -> None:
        text = self.held.get(twin)
        if text is None or any(other.startswith(text) and other != text for other in self.held.values()):
            return
        if text in self.checkpoints:
            self.journal += gone(self.checkpoints.pop(text), EntryKind.CHECKPOINT_GONE)
        self.journal += gone([twin], EntryKind.PAGE_GONE)
        del self.held[twin]

    def taken(self, journal: bytes) -> tuple[set[str], set[str]]:
        """What somebody takes who finds this memory and this journal, and compares digests; fails when any of it is wrong."""
        contents = replay(journal)
        pages, ends = set(), set()
        for keys, path in contents.prompts():
            for at, page in enumerate(path):
                text = bytes(keys[at]).rstrip(b".").decode()
                written, digest = self.memory.get(page.twin, ("", 0))
                if digest != page.digest:
                    break
                assert (written, page.home) == (text, 100 + page.twin)
                pages.add(text)
        for checkpoint in contents.checkpoints.values():
            text = checkpoint.key.rstrip(b".").decode()
            found = [self.memory.get(twin, ("", 0)) for twin in checkpoint.twins]
            if text in pages and tuple(digest for _, digest in found) == checkpoint.digests:
                assert {written for written, _ in found} == {f"end of {text}"}
                ends.add(text)
        return pages, ends


TEXT, TWIN = st.text("ab", min_size=1, max_size=3), st.integers(0, TWINS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), TEXT, TWIN),
        st.tuples(st.just("add_checkpoint"), TEXT, st.lists(TWIN, min_size=1, max_size=2).map(tuple)),
        st.tuples(st.just("remove"), TWIN),
    ),
    max_size=40,
)


def pool_after(steps) -> Pool:
    pool = Pool()
    for verb, *arguments in steps:
        getattr(pool, verb)(*arguments)
    return pool


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_a_whole_journal_gives_back_exactly_what_was_held(steps):
    pool = pool_after(steps)
    assert pool.taken(pool.journal) == (set(pool.held.values()), set(pool.checkpoints))


@given(STEPS, st.data())
@settings(max_examples=300, deadline=None)
def test_cut_at_any_byte_no_page_is_wrong(steps, data):
    pool = pool_after(steps)
    pages, ends = pool.taken(pool.journal[: data.draw(st.integers(0, len(pool.journal)))])
    assert pages <= set(pool.held.values()) | {text for text, _ in pool.memory.values()}
    assert ends <= pages


@given(STEPS, st.data())
@settings(max_examples=300, deadline=None)
def test_with_any_byte_flipped_no_page_is_wrong_and_all_but_one_entry_counts(steps, data):
    pool = pool_after(steps)
    if not pool.journal:
        return
    at = data.draw(st.integers(0, len(pool.journal) - 1))
    flipped = bytearray(pool.journal)
    flipped[at] ^= data.draw(st.integers(1, 255))
    contents = replay(bytes(flipped))
    assert (contents.damaged, contents.entries) == (1, len(pool.journal) // ENTRY_BYTES - 1)
    pool.taken(bytes(flipped))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_header_comes_back_or_is_refused(data):
    whole = header_bytes(HEADER)
    assert read_header(whole + b"x" * ENTRY_BYTES) == (HEADER, len(whole))
    assert len(whole) % ENTRY_BYTES == 0
    text_end = len(whole.rstrip(b"\0"))
    cut = data.draw(st.integers(0, text_end - 1))
    with pytest.raises(IntegrityError):
        read_header(whole[:cut])
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, text_end - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IntegrityError):
        read_header(bytes(flipped))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fingerprint": "g"}, "fingerprint"),
        ({"model_identity": ModelIdentity(name="m", revision="2")}, "model_identity"),
        ({"layout": "k"}, "layout"),
        ({"ranks": ("pp0.tp0", "pp0.tp1")}, "ranks"),
    ],
)
def test_a_pool_of_another_form_is_refused_and_says_why(changed, said):
    assert said in HEADER.why_not(HEADER.model_copy(update=changed))
    assert not HEADER.why_not(HEADER.model_copy(update={"incarnation": "j", "files": ()}))
