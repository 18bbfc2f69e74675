"""The journal of kept pools beside a real cache and real files: what the next process would find after every step."""

import itertools
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.kept_pools import (
    NO_PAGE,
    Contents,
    Held,
    KeptHeader,
    KeptJournal,
    Restored,
    RestoredCopies,
    entry_bases,
    read_header,
    read_journal,
)
from tests.helpers.prefix_bench import PrefixBench, keys
from tests.helpers.prefix_recount import check_cache

FULL, HOST, FULL_COPY, SWA_COPY = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
HEADER = KeptHeader(incarnation="i", form={"layout": "l"}, page_counts={})
PAGES = {FULL: 8, IndexSpace.SWA: 4, FULL_COPY: 16, SWA_COPY: 4}
PAGE_COUNTS = {FULL_COPY: 16, SWA_COPY: 4, HOST: 16}


class Memory:
    """Digests of pages whose bytes are numbers that the test gives them."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[IndexSpace, int], int] = {}

    def __call__(self, pages) -> int:
        for space, page in pages:
            if not 0 <= page < PAGE_COUNTS[space]:
                raise IndexError(f"page {page} of {space} is not in memory")
        return hash(tuple(self.bytes.get(page, 1000 + page[1]) for page in pages)) & 0xFFFFFFFF

    def size_bytes(self, pages) -> int:
        return 10 * len(pages)


class Node:
    """A node's cache, its journal, and its memory."""

    def __init__(self, path: Path, memory: Memory, found: Contents | None, spaces, make) -> None:
        self.bench, self.path, self.memory, self.spaces, self.make = (
            PrefixBench(PAGES | dict.fromkeys(spaces[1:], 16)),
            path,
            memory,
            spaces,
            make,
        )
        counts = {space: count for space, count in PAGE_COUNTS.items() if space is not HOST or HOST in spaces}
        self.journal = KeptJournal(path, HEADER.model_copy(update={"page_counts": counts}), memory, found or Contents())
        self.bench.copies.watchers.append(self.journal)

    def keep(self, name: str, pages: int, **fields) -> None:
        self.bench.warm(name, pages, **fields)
        self.bench.back_up(name, pages)

    async def written(self) -> None:
        if self.journal._reading is not None:
            await self.journal._reading

    def found(self) -> Contents:
        return read_journal(self.path.read_bytes())[1]

    def prompts(self) -> dict[bytes, int]:
        """By last key, the page counts of the prompts that the next process would find."""
        return {found[-1]: len(path) for found, path in self.found().prompts()}

    def third(self, name: str) -> Held:
        [page] = [page for page in self.found().pages.values() if page.key == keys(name, 3)[2]]
        return page

    def say(self, page: Held) -> None:
        """Write an entry with a right checksum over the one of this host copy."""
        data = bytearray(self.path.read_bytes())
        header, start = read_header(data)
        [(place, entry)] = page.entries(1 << 40)
        at = entry_bases(header.page_counts, start)[0][place[0]] + place[1] * len(entry)
        data[at : at + len(entry)] = entry
        self.path.write_bytes(data)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
async def made(tmp_path, memory):
    nodes: list[Node] = []

    def make(found: Contents | None = None, spaces=(FULL,)) -> Node:
        nodes.append(Node(tmp_path / "kvbridge-keep.journal", memory, found, spaces, make))
        return nodes[-1]

    yield make
    for node in nodes:
        node.journal.close()


@pytest.fixture
async def node(made) -> Node:
    return made()


async def restored(node: Node) -> tuple[Node, RestoredCopies]:
    """Return the process after one that was killed just now."""
    await node.written()
    found = node.found()
    after = node.make(found, node.spaces)
    made = RestoredCopies(
        after.bench.book, after.bench.copies, after.memory, found, Restored(), lost=after.journal.removed
    )
    await made.run()
    check_cache(after.bench.cache)
    return after, made


async def test_what_goes_while_it_is_being_read_is_never_written(node):
    node.keep("a", 4)
    node.bench.cache.drop()
    await node.written()
    assert not node.found().pages


@pytest.mark.parametrize("spaces", [(FULL,), (FULL, HOST)])
async def test_the_next_process_goes_on_with_prompts_and_checkpoints(made, spaces):
    node = made(spaces=spaces)
    node.keep("a", 4, checkpoint=True)
    node.keep("b", 3)
    after, back = await restored(node)
    assert (back.found.restored_pages, back.found.checkpoints, back.found.lost_pages) == (7, 1, 0)
    assert (after.bench.where("a", 4), after.bench.where("b", 3)) == ((0, 4), (0, 3))
    _, got = after.bench.admit("a", 6, from_checkpoint=True)
    assert (got.prefix_pages, len(got.checkpoint_copy)) == (4, 1)
    await after.written()
    assert after.found().pages == node.found().pages, "nothing is read and written twice"


async def test_a_page_that_holds_something_else_is_lost_with_what_follows_it(node):
    node.keep("a", 5, checkpoint=True)
    await node.written()
    node.memory.bytes[FULL_COPY, node.third("a").copies[0]] = 7
    after, back = await restored(node)
    assert (back.found.restored_pages, back.found.checkpoints, back.found.lost_pages) == (2, 0, 3)
    assert after.bench.where("a", 5) == (0, 2)
    assert len(after.found().pages) == 2
    assert not after.found().checkpoints
    free = after.bench.book.available_pages()
    assert free[FULL_COPY] == after.bench.total[FULL_COPY]


async def test_a_journal_that_finds_no_memory_is_none(node, monkeypatch):
    """The journal before would name pages that have other contents by then."""
    node.keep("a", 3)
    await node.written()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    after = node.make()
    assert not node.path.exists()
    after.keep("b", 3)
    await after.written()
    after.bench.cache.drop()
    await after.journal.finish(1.0)
    assert not node.path.exists()


@pytest.mark.parametrize("home", [2**31 - 1, 16, -2, NO_PAGE])
async def test_a_page_whose_home_does_not_exist_is_left_out_with_what_follows_it(made, home):
    """A defect, or the user of the daemon, has written such an entry with a right checksum."""
    node = made(spaces=(FULL, HOST))
    node.keep("a", 5)
    await node.written()
    node.say(node.third("a")._replace(home=home))
    after, back = await restored(node)
    assert back.found.restored_pages == 2
    assert after.bench.where("a", 5) == (0, 2)


async def test_of_two_pages_in_one_home_the_later_one_counts(made, memory):
    """The entry that took the earlier page back was damaged. The accounts know each home once."""
    node = made(spaces=(FULL, HOST))
    for name in ("a", "b", "c"):
        node.keep(name, 2)
    await node.written()
    first = {page.key: page for page in node.found().pages.values()}
    taken, page = first[keys("a", 1)[0]], first[keys("b", 1)[0]]
    wrong = page._replace(home=taken.home)
    node.say(wrong._replace(digests=(memory(wrong.sets[0]),)))
    after, back = await restored(node)
    assert (back.found.restored_pages, back.found.lost_pages) == (4, 1)
    assert [after.bench.where(name, 2)[1] for name in ("a", "b", "c")] == [0, 2, 2]
    free = after.bench.book.available_pages()
    assert free[FULL_COPY] == after.bench.total[FULL_COPY]


async def test_a_defect_while_pages_come_back_costs_pages_and_not_the_daemon(node, monkeypatch):
    for name in ("a", "b"):
        node.keep(name, 3)
    await node.written()
    read, calls = Memory.__call__, itertools.count()

    def fail(self, pages):
        if next(calls) == 3:
            raise IndexError("list index out of range")
        return read(self, pages)

    monkeypatch.setattr(Memory, "__call__", fail)
    after, back = await restored(node)
    assert (back.found.restored_pages, back.found.refused_pages, back.found.waiting_pages) == (3, 3, 0)
    assert "IndexError: list index out of range" in back.found.refused
    free = after.bench.book.available_pages()
    assert free[FULL_COPY] == after.bench.total[FULL_COPY]
    await after.written()
    assert len(after.found().pages) == 3


async def test_a_page_that_cannot_be_read_costs_the_journal_that_page_alone(node, monkeypatch):
    read, calls = Memory.__call__, itertools.count()

    def fail(self, pages):
        if next(calls) == 1:
            raise IndexError("list index out of range")
        return read(self, pages)

    monkeypatch.setattr(Memory, "__call__", fail)
    with capture_logs() as lines:
        node.keep("a", 4)
        node.keep("b", 3)
        await node.written()
    assert [line["pages"] for line in lines if line["event"] == "kept_pages_not_read"] == [1]
    assert len(node.found().pages) == 4 - 1 + 3
    node.bench.cache.drop()
    node.keep("a", 4)
    await node.written()
    assert node.prompts() == {keys("a", 4)[-1]: 4}, "its place is written to again"


async def test_what_comes_to_the_host_is_written_once_it_was_read(node):
    node.bench.warm("a", 5)
    assert not node.prompts()
    node.bench.back_up("a", 5)
    await node.written()
    assert node.prompts() == {keys("a", 5)[-1]: 5}
    node.keep("a", 7)
    await node.written()
    assert node.prompts() == {keys("a", 7)[-1]: 7}
