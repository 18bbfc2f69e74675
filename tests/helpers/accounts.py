"""Recounts the accounts of pages: whether every structure of a book and of its spaces agrees with every other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbridge.core.ids import PageIdArray
from kvbridge.pool.accounts.allocator import RunAllocator, runs_of
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import AdoptedSpace, PageState


def check_book(book: PageBook) -> None:
    """Recount everything from the owners' pages: lost pages, two owners and wrong counts fail."""
    holdings = book._holdings.values()
    for owner, holding in book._holdings.items():
        quarantined = holding.state is PageState.QUARANTINED
        assert quarantined == bool(holding.reasons), f"{owner} is {holding.state} with reasons {holding.reasons}"
    assert book._count(holdings) == book._in_state, "pages by state, counted again, differ from the book"
    for space, account in book._spaces.items():
        owned = [holding.pages[space] for holding in holdings if space in holding.pages]
        shared = [holding.shared[space] for holding in holdings if space in holding.shared]
        if isinstance(account, AdoptedSpace):
            _check_adopted(account, owned, shared)
        else:
            assert not shared, f"{space}: its owners do not say who reads its cached pages"
            _check_owned(account, owned)
        counts = book.counts()[space]
        assert sum(counts.values()) == account.page_count, f"{space}: {counts} are not its {account.page_count} pages"


def _check_owned(account: RunAllocator, owned: Sequence[PageIdArray]) -> None:
    check_allocator(account)
    _check_disjoint(account.name, owned, account.page_count - account.free - account.cached)
    for ids in owned:
        assert not account._is_free[ids].any(), f"{account.name}: an owned page is also free"
        assert not account._is_cached[ids].any(), f"{account.name}: an owned page is also cached"
    assert int(account._is_cached.sum()) == account.cached
    assert not (account._is_free & account._is_cached).any()


def _check_adopted(account: AdoptedSpace, owned: Sequence[PageIdArray], shared: Sequence[PageIdArray]) -> None:
    _check_disjoint(account.name, owned, account._written)
    assert int(account._is_written.sum()) == account._written
    assert all(account._is_written[ids].all() for ids in owned), f"{account.name}: an owner's page is not written"
    readers = np.bincount(np.concatenate([np.empty(0, np.int32), *shared]), minlength=account.page_count)
    assert np.array_equal(readers, account._readers), f"{account.name}: readers are not those that owners share"
    assert account.cached == np.count_nonzero((readers > 0) & ~account._is_written)


def _check_disjoint(name: str, owned: Sequence[PageIdArray], expected: int) -> None:
    pages = np.concatenate([np.empty(0, np.int32), *owned])
    assert len(np.unique(pages)) == len(pages), f"{name}: a page has two owners"
    assert len(pages) == expected, f"{name}: owners have {len(pages)} pages, {expected} are out"


def check_allocator(allocator: RunAllocator) -> None:
    """Compare every structure of an allocator with its map of free pages."""
    expected = {start: stop - start for start, stop in runs_of(np.flatnonzero(allocator._is_free))}
    by_length = allocator._starts_of_length
    assert allocator._length_at_start == expected, "runs by start"
    assert allocator._length_at_stop == {start + length: length for start, length in expected.items()}, "runs by stop"
    assert {start: length for length, starts in by_length.items() for start in starts} == expected, "runs by length"
    assert all(by_length.values()), "a length without runs"
    places = {start: place for starts in by_length.values() for place, start in enumerate(starts)}
    assert allocator._place_of_start == places, "places"
    assert allocator._lengths == sorted(by_length), "sorted lengths"
    assert allocator.free == sum(expected.values()), "free count"
