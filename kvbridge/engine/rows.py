"""Which rows of a component a section holds, and in which page and slot each row lies.

Owns: the step from row numbers to (page id, slot). Must not know: torch, addresses, what a row means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import Component, Liveness, RowInterval
from kvbridge.core.ids import PageTable
from kvbridge.core.plan.operations import Section

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Where consecutive rows lie: two int64 arrays of equal length, `page_ids[i]` and `slots[i]` of the i-th row."""

    page_ids: IndexArray
    slots: IndexArray


def place_rows(component: Component, table: PageTable, start_row: int, stop_row: int) -> RowPlaces:
    """Return where rows [start_row, stop_row) of `component` lie in the pages of `table`.

    Raises InvalidInputError when the interval is not one, or when a ring would hold two of its rows in one slot;
    PageOutOfBoundsError when the table has no page for a row.
    """
    if not 0 <= start_row <= stop_row:
        raise InvalidInputError(f"{component.kind}: rows [{start_row}, {stop_row}) are not an interval of rows")
    rows = np.arange(start_row, stop_row, dtype=np.int64)
    pages = rows // component.rows_per_logical_page - table.first_page
    if len(rows) and (pages[0] < 0 or pages[-1] >= len(table)):
        raise PageOutOfBoundsError(
            f"{component.kind}: rows [{start_row}, {stop_row}) need logical pages {pages[0] + table.first_page} to "
            f"{pages[-1] + table.first_page}, the request's '{table.space}' table holds {table.first_page} to "
            f"{table.first_page + len(table) - 1}; reserve the pages before using them"
        )
    if component.is_ring and len(rows) > component.slots_per_page and _overwrites_itself(component, pages):
        raise InvalidInputError(
            f"{component.kind}: rows [{start_row}, {stop_row}) do not fit a ring of {component.slots_per_page} slots "
            "at once; ask for live rows only (Component.live_rows)"
        )
    return RowPlaces(page_ids=table.ids[pages].astype(np.int64), slots=rows % component.slots_per_page)


def section_rows(component: Component, section: Section) -> RowInterval:
    """Return the rows that become final with `section`: new growing rows, and everything else when it is the last."""
    rows = component.published_rows(
        section.stop_token, prompt_tokens=section.prompt_tokens, prefix_tokens=section.prefix_tokens
    )
    if component.liveness is not Liveness.GROWING:
        return rows
    start = max(rows.start, section.start_token // component.tokens_per_row)
    return RowInterval(start=min(start, rows.stop), stop=rows.stop)


def _overwrites_itself(component: Component, pages: IndexArray) -> bool:
    return int(np.unique(pages, return_counts=True)[1].max()) > component.slots_per_page
