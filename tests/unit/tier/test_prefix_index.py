"""The index of cached prefixes, case by case; `tests/property/test_prefix_index.py` has it against a naive model."""

import numpy as np
import pytest

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError
from kvbridge.core.ids import IndexSpace
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.prefix_recount import check_index

FULL, HOST, SWA = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA
FULL_COPY = IndexSpace.FULL_COPY
IDENTITY = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=1)


def keys_of(text: str) -> Keys:
    return page_keys(IDENTITY, [ord(letter) for letter in text])


class Pool:
    """An index with pages that nobody else has."""

    def __init__(self, capacity: int = 1000, **options) -> None:
        self.index = PrefixIndex([FULL, HOST], capacity, **options)
        self.next_page, self.now = 0, 0.0

    def pages(self, count: int) -> dict:
        ids = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        return {FULL: ids, HOST: ids + 5000}

    def add(self, text: str, start: int = 0, **options):
        self.now += 1
        keys = keys_of(text)
        return self.index.insert(keys, start, self.pages(len(keys) - start), now=self.now, **options)

    def match(self, text: str, **options):
        return self.index.match(keys_of(text), **options)

    def knows(self, *texts: str) -> bool:
        check_index(self.index)
        return all(len(self.match(text)) == len(text) for text in texts)

    def evict(self, count: int) -> list[int]:
        found = self.index.evict({FULL: count})
        assert (found[HOST] - 5000).tolist() == found[FULL].tolist()
        check_index(self.index)
        return found[FULL].tolist()


def test_keys_that_are_no_chain_share_nothing_wrong():
    pool = Pool()
    pool.add("abc")
    pool.add("xyz")
    abc, xyz = keys_of("abc"), keys_of("xyz")
    crossed = Keys(abc[:2].data + xyz[2:].data)
    assert len(pool.index.match(crossed)) == 2
    assert len(pool.index.match(Keys(abc[1:].data))) == 0
    fresh = keys_of("q")
    for keys, new in ((crossed, 0), (Keys(abc.data + xyz[:1].data), 0), (Keys(abc.data + 2 * fresh.data), 1)):
        before = len(pool.index)
        inserted = pool.index.insert(keys, 0, pool.pages(len(keys)), now=9.0)
        assert (len(inserted.new), len(pool.index) - before) == (new, new), "as far as they are a chain"
        assert {len(ids) for ids in inserted.pages.values()} == {new}
        assert inserted.left_out == 1
    assert pool.knows("abc", "xyz")


@pytest.mark.parametrize("foreign", [0, 1, 4, 7])
def test_a_page_that_hangs_elsewhere_takes_nothing_but_itself_from_a_prompt(foreign):
    """Somebody's pages came under keys of which one is another prompt's: that one is found as far as it goes, and is kept so."""
    pool = Pool()
    keys = keys_of("victims!")
    strange = Keys(keys_of("abcdefgh")[:foreign].data + keys[foreign:].data)
    pool.index.insert(strange, 0, pool.pages(8), now=1.0)
    if foreign:
        first = pool.index.insert(keys, 0, pool.pages(8), now=2.0)
        assert (len(first.new), first.left_out) == (foreign, 8 - foreign)
        assert len(pool.index.match(keys)) == foreign
    assert len(pool.index.match(strange)) == 8
    check_index(pool.index)


@pytest.mark.parametrize(
    "pages",
    [
        {FULL: np.zeros(2, np.int32)},
        {FULL: np.zeros(2, np.int32), HOST: np.zeros(1, np.int32)},
        {FULL: np.zeros(2, np.int32), HOST: np.zeros(2, np.int32), SWA: np.zeros(2, np.int32)},
    ],
)
def test_each_key_needs_a_page_of_each_space(pages):
    with pytest.raises(InvalidInputError, match="2 keys need"):
        Pool().index.insert(keys_of("ab"), 0, pages, now=1.0)


class TestCheckpoints:
    @pytest.fixture
    def pool(self) -> Pool:
        pool = Pool()
        pool.add("abc")
        pool.add("abx")
        for name, text in enumerate(("ab", "abc", "abx")):
            assert pool.index.device.set_checkpoint(
                int(pool.match(text)[-1]), np.array([2 * name, 2 * name + 1], np.int32)
            )
        return pool

    def test_they_go_alone_before_pages_do_the_oldest_first(self, pool):
        path = pool.match("ab")
        pool.index.pin(path)
        pool.index.device.pin_checkpoint(int(path[-1]))
        assert pool.index.evictable()[SWA] == 4
        assert pool.index.evict({SWA: 1})[SWA].tolist() == [2, 3]
        pool.index.device.unpin_checkpoint(int(path[-1]))
        pool.index.unpin(path)
        found = pool.index.evict({SWA: 3})
        assert found[SWA].tolist() == [4, 5, 0, 1]  # that which was read is the younger one
        assert not len(found[FULL])
        assert pool.knows("abc", "abx")
        with pytest.raises(CapacityError, match="'swa'"):
            pool.index.evict({SWA: 1})

    def test_who_restores_pins_the_page_too_and_for_longer(self, pool):
        path = pool.match("abc")
        with pytest.raises(IntegrityError, match="not pinned the record"):
            pool.index.device.pin_checkpoint(int(path[-1]))
        pool.index.pin(path)
        pool.index.device.pin_checkpoint(int(path[-1]))
        with pytest.raises(IntegrityError, match="still pins its checkpoint"):
            pool.index.unpin(path)
        pool.index.device.unpin_checkpoint(int(path[-1]))
        with pytest.raises(IntegrityError, match="more often"):
            pool.index.device.unpin_checkpoint(int(path[-1]))
        pool.index.unpin(path)
        check_index(pool.index)


def test_candidates_that_are_outdated_do_not_pile_up():
    pool = Pool()
    pool.add("abc")
    path = pool.match("abc")
    for now in range(5000):
        pool.index.touch(path, now=10.0 + now)
    assert len(pool.index.device._candidates) < 1100
    assert pool.evict(3) == [2, 1, 0]


def test_pages_that_leave_the_host_are_counted_by_whether_they_were_of_use_there():
    index = PrefixIndex([FULL], 100, has_copies=True)
    pages = iter(range(100))

    def some(space: IndexSpace, count: int) -> dict:
        return {space: np.array([next(pages) for _ in range(count)], dtype=np.int32)}

    def on_host(text: str) -> None:
        index.insert(keys_of(text), 0, some(FULL, len(text)), now=float(len(index)))
        index.add_copies(index.match(keys_of(text)), 0, some(FULL_COPY, len(text)))

    for text in ("abc", "xyz"):
        on_host(text)
    index.evict({FULL: 6})
    index.add_device(index.match(keys_of("abc")), 0, some(FULL, 3))
    assert (index.host.evicted.read_back, index.host.evicted.unused) == (0, 0), "leaving the device is something else"
    index.evict({FULL: 3, FULL_COPY: 6})
    assert (index.host.evicted.read_back, index.host.evicted.unused) == (3, 3)
    on_host("abc")
    index.evict({FULL: 3, FULL_COPY: 3})
    assert (index.host.evicted.read_back, index.host.evicted.unused) == (3, 6), "its next time there begins anew"
    check_index(index)
