"""Mistakes that daemons and rank workers are started with: proof that the canaries would see them."""

from __future__ import annotations

FREE_BY_TIMER = """
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.book import PageState

def quarantine(book, owner, reason):
    if book.state(owner) is PageState.LEASED:
        book.move(owner, PageState.LEASED, PageState.HELD)
    if book.state(owner) is PageState.HELD:
        book.free(owner)

PageBook.quarantine = quarantine
"""
"""Pages that nobody has proved to be quiet are given to the next room instead of being quarantined."""

BELIEVE_QUIET = """
from kvbridge.transport.base import TransferState
from tests.helpers import faulty_transport

class Believer:
    FAILED_NOT_QUIET = TransferState.FAILED_QUIET

    def __getattr__(self, name):
        return getattr(TransferState, name)

faulty_transport.TransferState = Believer()
"""
"""A transport that may still write is taken for one that does not (in the rank workers)."""
