"""The journal of a kept pool against memory that is used again and again: whatever becomes of its bytes, no page is wrong."""

import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import IntegrityError
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon import kept_pools as kept_journal
from tests.helpers import examples

HOST_COPIES, HOMES = 6, 106
HEADER = kept_journal.KeptHeader(
    incarnation="i",
    form={"layout": "l", "ranks": "pp0.tp0"},
    page_counts={IndexSpace.FULL_COPY: HOST_COPIES, IndexSpace.SWA_COPY: HOST_COPIES, IndexSpace.HOST: HOMES},
    files=(kept_journal.KeptFile(name="twins.0", length_bytes=4096, inode=7),),
)


def key_of(text: str) -> bytes:
    return text.encode().ljust(16, b".")


def page_of(text: str, twin: int, digest: int) -> kept_journal.Held:
    parent = key_of(text[:-1]) if len(text) > 1 else kept_journal.FIRST
    return kept_journal.Held(IndexSpace.FULL_COPY, key_of(text), (twin,), parent, 100 + twin, (digest,))


def page_number(space: IndexSpace, twin: int) -> int:
    """Pages of both kinds in one row."""
    return twin + HOST_COPIES * (space is IndexSpace.SWA_COPY)


class Pool:
    """Pages of memory, each with what was written into it last, and a journal that follows the rules."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[str, int]] = {}
        """By number: the text of whose page it holds, and the digest of these bytes."""
        self.held: dict[int, str] = {}
        self.checkpoints: dict[str, tuple[int, ...]] = {}
        head = kept_journal.header_bytes(HEADER)
        self.bases, end = kept_journal.entry_bases(HEADER.page_counts, len(head))
        self.journal = bytearray(head.ljust(end, b"\0"))
        self.start = len(head)
        self.writes = 0

    def say(self, held: kept_journal.Held) -> None:
        for place, entry in held.entries(self.writes):
            self.put(place, entry)

    def put(self, place: tuple[IndexSpace, int], entry: bytes) -> None:
        at = self.bases[place[0]] + place[1] * kept_journal.ENTRY_BYTES
        self.journal[at : at + kept_journal.ENTRY_BYTES] = entry

    def write(self, number: int, text: str) -> int:
        self.writes += 1
        self.memory[number] = (text, self.writes)
        return self.writes

    def add(self, text: str, twin: int) -> None:
        if text in self.held.values() or twin in self.held:
            return
        if len(text) > 1 and text[:-1] not in self.held.values():
            return
        self.say(page_of(text, twin, self.write(twin, text)))
        self.held[twin] = text

    def add_checkpoint(self, text: str, twins: tuple[int, ...]) -> None:
        used = set(sum(self.checkpoints.values(), ()))
        is_used = text in self.checkpoints or used & set(twins) or len(set(twins)) != len(twins)
        if is_used or text not in self.held.values():
            return
        numbers = [page_number(IndexSpace.SWA_COPY, twin) for twin in twins]
        digests = tuple(self.write(number, f"end of {text}") for number in numbers)
        self.say(kept_journal.Held(IndexSpace.SWA_COPY, key_of(text), twins, digests=digests))
        self.checkpoints[text] = twins

    def remove(self, twin: int) -> None:
        text = self.held.get(twin)
        if text is None or any(other.startswith(text) and other != text for other in self.held.values()):
            return
        for end in self.checkpoints.pop(text, ()):
            self.put((IndexSpace.SWA_COPY, end), bytes(kept_journal.ENTRY_BYTES))
        self.put((IndexSpace.FULL_COPY, twin), bytes(kept_journal.ENTRY_BYTES))
        del self.held[twin]

    def taken(self, journal: bytes) -> tuple[set[str], set[str]]:
        """The pages that a new process takes over with this memory and this journal, by digests; fails when a page is wrong."""
        _, contents = kept_journal.read_journal(bytes(journal))
        pages, ends = set(), set()
        for keys, path in contents.prompts():
            for at, page in enumerate(path):
                text = bytes(keys[at]).rstrip(b".").decode()
                written, digest = self.memory.get(page.copies[0], ("", 0))
                if (digest,) != page.digests:
                    break
                assert (written, page.home) == (text, 100 + page.copies[0])
                pages.add(text)
        for checkpoint in contents.checkpoints.values():
            text = checkpoint.key.rstrip(b".").decode()
            numbers = [page_number(IndexSpace.SWA_COPY, twin) for twin in checkpoint.copies]
            found = [self.memory.get(number, ("", 0)) for number in numbers]
            if text in pages and tuple(digest for _, digest in found) == checkpoint.digests:
                assert {written for written, _ in found} == {f"end of {text}"}
                ends.add(text)
        return pages, ends


TEXT, TWIN = st.text("ab", min_size=1, max_size=3), st.integers(0, HOST_COPIES - 1)
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
@examples.more(2)
def test_a_whole_journal_gives_back_exactly_what_was_held(steps):
    pool = pool_after(steps)
    assert pool.taken(pool.journal) == (set(pool.held.values()), set(pool.checkpoints))


@given(STEPS, st.data())
@examples.more(2)
def test_cut_at_any_byte_no_page_is_wrong(steps, data):
    pool = pool_after(steps)
    pages, ends = pool.taken(pool.journal[: data.draw(st.integers(pool.start, len(pool.journal)))])
    assert pages <= set(pool.held.values())
    assert ends <= pages & pool.checkpoints.keys()


@given(STEPS, st.data())
@examples.more(2)
def test_with_any_byte_flipped_no_page_is_wrong_and_all_but_one_entry_counts(steps, data):
    pool = pool_after(steps)
    before = kept_journal.read_journal(bytes(pool.journal))[1]
    flipped = bytearray(pool.journal)
    flipped[data.draw(st.integers(pool.start, len(pool.journal) - 1))] ^= data.draw(st.integers(1, 255))
    after = kept_journal.read_journal(bytes(flipped))[1]
    assert after.damaged == 1
    lost = len(before.pages) - len(after.pages) + len(before.checkpoints) - len(after.checkpoints)
    assert lost in {0, 1}, "0: where there was no entry"
    pool.taken(flipped)


@given(STEPS, st.data())
@examples.more(2)
def test_killed_while_an_entry_is_written_or_wiped_no_page_is_wrong(steps, data):
    """Whatever part of an entry has come to memory by then."""
    pool, before = pool_after(steps[:-1]), pool_after(steps[:-1])
    for verb, *arguments in steps[-1:]:
        getattr(pool, verb)(*arguments)
    cut = data.draw(st.integers(0, kept_journal.ENTRY_BYTES))
    for base in range(pool.start, len(pool.journal), kept_journal.ENTRY_BYTES):
        before.journal[base : base + cut] = pool.journal[base : base + cut]
    pages, _ = pool.taken(before.journal)
    assert pages <= set(before.held.values()) | set(pool.held.values())


@given(st.data())
@examples.more(2)
def test_a_header_comes_back_or_is_refused(data):
    whole = kept_journal.header_bytes(HEADER)
    assert kept_journal.read_header(whole + b"x" * kept_journal.ENTRY_BYTES) == (HEADER, len(whole))
    assert len(whole) % kept_journal.ENTRY_BYTES == 0
    text_end = len(whole.rstrip(b"\0"))
    cut = data.draw(st.integers(0, text_end - 1))
    with pytest.raises(IntegrityError):
        kept_journal.read_header(whole[:cut])
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, text_end - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IntegrityError):
        kept_journal.read_header(bytes(flipped))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"form": {"layout": "k", "ranks": "pp0.tp0"}}, "its layout is l, this daemon's is k"),
        ({"form": {"layout": "l", "ranks": "pp0.tp0, pp0.tp1"}}, "its ranks is pp0.tp0, "),
        ({"page_counts": {}}, "its page counts is"),
    ],
)
def test_a_pool_of_another_form_is_refused_and_says_why(changed, said):
    assert said in HEADER.why_not(HEADER.model_copy(update=changed))
    assert not HEADER.why_not(HEADER.model_copy(update={"incarnation": "j", "files": ()}))
