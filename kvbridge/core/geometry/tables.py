"""From booked page ids to the tables of a request and from the wire, in one place for both sides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import first_window_page
from kvbridge.core.ids import IndexSpace, PageIdArray, PageTable, Tables
from kvbridge.core.wire.messages import MAX_TABLE_BYTES, WireTable

GROWING_SPACES = (IndexSpace.FULL, IndexSpace.HOST)
"""Those in which a page is final once its tokens are computed."""
MOST_PAGES = MAX_TABLE_BYTES // 4
"""Pages that a table on the wire can name."""


def request_tables(geometry: ModelGeometry, ids: Mapping[IndexSpace, PageIdArray], *, prompt_tokens: int) -> Tables:
    """Build the tables of a request of `prompt_tokens` tokens; a window table begins with its last window."""
    return {
        space: PageTable(
            space,
            np.ascontiguousarray(pages, dtype=np.int32),
            first_window_page(geometry, prompt_tokens) if space is IndexSpace.SWA else 0,
        )
        for space, pages in ids.items()
    }


def further_tables(held: Tables, named: Tables) -> Tables:
    """Return the pages of `named` that follow those of `held`, which it may repeat.

    Raises ConflictError when it names another page in the place of one of them, or leaves out what comes between.
    """
    further = {}
    for space, table in named.items():
        before = held.get(space)
        if before is None:
            further[space] = table
            continue
        stop = before.first_page + len(before)
        repeated = table.ids[: max(0, stop - table.first_page)]
        known = before.ids[max(0, table.first_page - before.first_page) :][: len(repeated)]
        if not before.first_page <= table.first_page <= stop or not np.array_equal(repeated, known):
            raise ConflictError(
                f"of space '{space}' the room has the {len(before)} logical pages from {before.first_page} on; named are "
                f"{len(table)} from {table.first_page} on, which are others or do not follow"
            )
        if len(repeated) < len(table):
            further[space] = PageTable(space, table.ids[len(repeated) :], stop)
    return further


def joined_tables(held: Tables, more: Tables) -> Tables:
    """Append the pages of `more` to those of `held`, space by space; neither is changed."""
    together = dict(held)
    for space, table in more.items():
        before = held.get(space)
        together[space] = (
            table if before is None else PageTable(space, np.concatenate([before.ids, table.ids]), before.first_page)
        )
    return together


def tables_from_wire(wire: tuple[WireTable, ...]) -> Tables:
    """Decode the tables of a message. Raises InvalidInputError when they are malformed."""
    try:
        tables = {
            table.space: PageTable(table.space, np.frombuffer(table.ids, "<i4").astype(np.int32), table.first_page)
            for table in wire
        }
    except ValueError as error:
        raise InvalidInputError(f"the page tables are malformed: {error}") from error
    if len(tables) != len(wire):
        raise InvalidInputError(f"the page tables name a space twice: {[table.space.value for table in wire]}")
    for space, table in tables.items():
        if len(table) and int(table.ids.min()) < 0:
            raise InvalidInputError(f"page id {int(table.ids.min())} of space '{space}' is negative")
    return tables


def check_demand(demand: Mapping[IndexSpace, int]) -> None:
    """Raise InvalidInputError when a request needs more pages of a space than a message can name."""
    for space, count in demand.items():
        if count > MOST_PAGES:
            raise InvalidInputError(
                f"the request needs {count} pages of space '{space}', one page table names at most {MOST_PAGES}; "
                "shorten the request"
            )
