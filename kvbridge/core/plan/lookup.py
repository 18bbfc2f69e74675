"""Page ids of one request on both sides: looked up, checked against the regions' bounds, searched for runs; each once.

Owns: the bounds check, and the memory of what one plan has already found. Must not know: rows, bytes, addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageTable, Tables
from kvbridge.core.plan.neighbours import Band
from kvbridge.core.plan.pairing import LayerGroup, Side
from kvbridge.core.plan.runs import IndexArray, Runs, find_runs, single_pages


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Page ids of consecutive logical pages, int64, and the extremes among them."""

    ids: IndexArray
    lowest: int
    highest: int


class _SideLookup:
    """The page tables on one side."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._found: dict[tuple[IndexSpace, range], _Pages] = {}

    def ids(self, space: IndexSpace, pages: range) -> IndexArray:
        """Return the int64 page ids of logical pages that the table has been found to cover."""
        return self._slice(self._tables[space], space, pages).ids

    def check(self, side: Side, kind: ComponentKind, pages: range) -> None:
        """See `PageLookup.check`."""
        space, page_count = side.form.space, side.form.page_count
        table = self._tables.get(space)
        if table is None:
            raise InvalidInputError(
                f"{side.name}: {kind} needs a page table of space '{space}', but the request has none there"
            )
        covered = range(table.first_page, table.first_page + len(table))
        if pages.start < covered.start or pages.stop > covered.stop:
            missing = pages.start if pages.start < covered.start else pages.stop - 1
            raise PageOutOfBoundsError(
                f"{side.name}: {kind} needs logical page {missing} of space '{space}', but the request's table "
                f"covers [{covered.start}, {covered.stop})"
            )
        found = self._slice(table, space, pages)
        if found.lowest < 0 or found.highest >= page_count:
            wrong = int(np.flatnonzero((found.ids < 0) | (found.ids >= page_count))[0])
            raise PageOutOfBoundsError(
                f"{side.name}: {kind} would use page id {found.ids[wrong]} of space '{space}' for the request's "
                f"logical page {pages.start + wrong}, but its regions have the pages [0, {page_count})"
            )

    def _slice(self, table: PageTable, space: IndexSpace, pages: range) -> _Pages:
        key = (space, pages)
        found = self._found.get(key)
        if found is None:
            ids = table.require(space)[pages.start - table.first_page : pages.stop - table.first_page]
            found = _Pages(ids.astype(np.int64), int(ids.min()), int(ids.max()))
            self._found[key] = found
        return found


class PageLookup:
    """The page tables of one request on both nodes, for the length of one plan.

    Components that live in the same spaces share everything here. `check` comes first; the other methods trust it.
    """

    def __init__(self, source: Tables, destination: Tables) -> None:
        self._source = _SideLookup(source)
        self._destination = _SideLookup(destination)
        self._runs: dict[tuple[object, ...], Runs] = {}

    def check(self, group: LayerGroup, pages: range) -> None:
        """Check that both tables give to each of these logical pages a page that the group's regions have.

        Pages that another replica sends are checked too: an id that is wrong for one is wrong for all. Raises
        InvalidInputError for a missing table, PageOutOfBoundsError for a table that is too short or an id that does
        not exist.
        """
        self._source.check(group.source, group.component.kind, pages)
        self._destination.check(group.destination, group.component.kind, pages)

    def ids(self, group: LayerGroup, pages: range) -> tuple[IndexArray, IndexArray]:
        """Return the page ids of all these logical pages on the source and on the destination, whoever sends them."""
        return self._source.ids(group.source.form.space, pages), self._destination.ids(
            group.destination.form.space, pages
        )

    def runs(self, band: Band, pages: range) -> Runs:
        """Return the band's share of these logical pages as runs; where pages do not touch, each is its own run."""
        group = band.first
        borders = (group.source.border_pages, group.destination.border_pages) if band.joins_pages else None
        key = (group.source.form.space, group.destination.form.space, pages, group.stripe, borders)
        found = self._runs.get(key)
        if found is None:
            source, destination = self.ids(group, pages)
            mine = group.stripe.pages(pages)
            if mine is not None:
                source, destination = source[mine], destination[mine]
            found = find_runs(source, destination, borders) if borders else single_pages(source, destination)
            self._runs[key] = found
        return found
