import pytest

from kvbridge.core.errors import ConflictError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from tests.helpers.accounts import check_book

FULL, SWA, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.HOST
FREE, HELD, LEASED, QUARANTINED = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED
A, B = Owner(7, 1), Owner(8, 1)


@pytest.fixture
def book():
    book = PageBook({FULL: 16, SWA: 4})
    yield book
    check_book(book)


def test_a_watcher_hears_of_pages_that_are_free_and_of_owners_that_are_gone(book):
    heard = []

    class Watcher:
        def freed(self, pages):
            heard.append(("freed", dict(pages), book.available_pages()[FULL]))

        def gone(self, owner):
            heard.append(("gone", owner))

    book.watchers.append(Watcher())
    book.reserve(A, {FULL: 3, SWA: 1})
    book.expect_free(A)
    book.free(A)
    assert heard == [("freed", {FULL: 3, SWA: 1}, 16), ("gone", A)]
    heard.clear()
    book.reserve(B, {FULL: 2})
    book.quarantine(B, "x")
    assert heard == []
    book.release_quarantined(B)
    assert heard == [("freed", {FULL: 2}, 16), ("gone", B)]


@pytest.fixture
def adopting():
    book = PageBook({HOST: 8}, adopted={FULL: 16})
    yield book
    check_book(book)


@pytest.mark.parametrize(("ids", "are_ids"), [([16], True), ([2**33], True), ([0.5], False), ([[1]], False)])
def test_bad_ids_are_refused(adopting, ids, are_ids):
    with pytest.raises(PageOutOfBoundsError if are_ids else InvalidInputError):
        adopting.adopt(A, {FULL: ids})
    assert A not in adopting


@pytest.mark.parametrize("end", ["committed", "quarantined"])
def test_what_a_peer_may_still_write_is_nobodys_prefix(adopting, end):
    adopting.adopt(A, {FULL: [1, 2]})
    adopting.move(A, HELD, LEASED)
    if end == "quarantined":
        adopting.quarantine(A, "a writer that may still write")
    with pytest.raises(ConflictError, match="may still write them for room 7 generation 1"):
        adopting.adopt(B, {FULL: [3]}, shared={FULL: [2]}, written_by_peers=True)
    assert B not in adopting
    if end == "committed":
        adopting.move(A, LEASED, HELD)
    else:
        adopting.release_quarantined(A)
    adopting.adopt(B, {FULL: [3]}, shared={FULL: [2]}, written_by_peers=True)
