"""Recounts the accounts of pages: every structure of a book and of its spaces agrees with every other."""

import numpy as np

from kvbridge.core.ids import Pages
from kvbridge.pool.accounts.book import PageBook, PageState
from kvbridge.pool.accounts.spaces import AdoptedSpace, RunAllocator, runs_of


def check_book(book: PageBook) -> None:
    """Recount everything from the owners' pages: lost pages, two owners and wrong counts fail."""
    holdings = book._holdings.values()
    for holding in holdings:
        assert (holding.state is PageState.QUARANTINED) == bool(holding.reasons), holding
    for space, states in book._in_state.items():
        counted = {
            state: sum(len(one.pages.get(space, ())) for one in holdings if one.state is state) for state in states
        }
        assert counted == states, f"{space}: pages by state, counted again, differ from the book"
    for space, account in book._spaces.items():
        owned = np.concatenate([np.empty(0, np.int32), *(each.pages.get(space, ()) for each in holdings)]).astype(int)
        read = np.concatenate([np.empty(0, np.int32), *(each.shared.get(space, ()) for each in holdings)]).astype(int)
        assert len(np.unique(owned)) == len(owned), f"{space}: a page has two owners"
        if isinstance(account, AdoptedSpace):
            readers = np.bincount(read, minlength=account.page_count)
            assert np.array_equal(readers, account._readers), f"{space}: readers are not those that owners share"
            assert np.array_equal(np.flatnonzero(account._is_written), np.sort(owned)), f"{space}: written pages"
            assert account._written == len(owned)
            assert account.cached == np.count_nonzero((readers > 0) & ~account._is_written)
        else:
            check_allocator(account)
            out = np.flatnonzero(~account._is_free & ~account._is_cached)
            assert np.array_equal(out, np.sort(owned)), f"{space}: pages that are out are not those of owners"
            assert int(account._is_cached.sum()) == account.cached
            assert not (account._is_free & account._is_cached).any()
        assert sum(book.counts()[space].values()) == account.page_count, f"{space}: {book.counts()[space]}"


def cached_pages(book: PageBook) -> Pages:
    """Return every cached page of the owned spaces."""
    return {space: np.flatnonzero(book._spaces[space]._is_cached).astype(np.int32) for space in book.owned_spaces}


def check_allocator(allocator: RunAllocator) -> None:
    expected = {start: stop - start for start, stop in runs_of(np.flatnonzero(allocator._is_free))}
    by_length = allocator._starts_of_length
    assert allocator._length_at_start == expected
    assert allocator._length_at_stop == {start + length: length for start, length in expected.items()}
    assert {start: length for length, starts in by_length.items() for start in starts} == expected
    assert all(by_length.values()), "a length without runs"
    places = {start: place for starts in by_length.values() for place, start in enumerate(starts)}
    assert allocator._place_of_start == places
    assert allocator._lengths == sorted(by_length)
    assert allocator.free == sum(expected.values())
