"""From a section of a request and its page tables to the operations that move it.

The work is proportional to pages plus operations, in numpy, and to components in Python; never to pages or layers in
Python. Layers and components that lie side by side on both sides are copied together (`neighbours`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import Component, ComponentKind, RowInterval
from kvbridge.core.ids import Tables
from kvbridge.core.plan.neighbours import Band, find_neighbours
from kvbridge.core.plan.operations import Amount, Amounts, Operations, Plan, Section, cut_sizes
from kvbridge.core.plan.pages import IndexArray, PageSplit, split_rows
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Side, Stripe


def plan(
    pairing: Pairing,
    section: Section,
    source: Tables,
    destination: Tables,
    *,
    max_operation_bytes: int,
    operation_cost_bytes: int = 0,
) -> Plan:
    """Return every operation by which the source rank moves its share of `section` to the destination rank.

    `source` and `destination` are the request's page tables on the two nodes. An operation is cut at
    `max_operation_bytes`; dead bytes of the request's own pages are sent along where they are at most
    `operation_cost_bytes`, if that saves an operation. Everything is checked before anything is returned:
    InvalidInputError for a section that contradicts itself or a missing table, PageOutOfBoundsError (naming side, component,
    space, id and limit) for a table that is too short or a page id that a region does not have.
    """
    _check(section, max_operation_bytes)
    parts = list(pages_to_send(pairing.groups_of(section.layers), section, source, destination))
    # Rows that are not live yet may be under way with a later section by the time that these arrive: only the last one
    # of a request may write more than it owes.
    most_dead_bytes = operation_cost_bytes if section.stop_token == section.prompt_tokens else 0
    # The groups of all layers are the pairing's own and come again; those of some layers are made for this plan.
    known = pairing.neighbours if section.layers is None else {}
    batches = [*_full_batches(parts, known), *_partial_batches(parts, known, most_dead_bytes)]
    amounts: Amounts = {}
    for part in parts:
        group = part.group
        rows = owned_rows(group.component, part.split, group.stripe) * group.lanes * len(group.layers)
        _add(amounts, group, Amount(lane_rows=rows))
    for batch in batches:
        batch.add_to(amounts, max_operation_bytes)
    return Plan(_written(batches).cut(max_operation_bytes), amounts)


def rows_to_send(component: Component, section: Section) -> RowInterval:
    """Return the rows that a section adds to what its predecessors have sent; possibly none (count 0)."""

    def published(tokens: int) -> RowInterval:
        return component.published_rows(
            tokens, prompt_tokens=section.prompt_tokens, prefix_tokens=section.prefix_tokens
        )

    before, after = published(section.start_token), published(section.stop_token)
    return RowInterval(start=max(before.stop, after.start), stop=after.stop)


def owned_rows(component: Component, split: PageSplit, stripe: Stripe) -> int:
    """Return how many rows of `split` lie in pages of `stripe`."""
    partial = sum(page.rows for page in split.partial if stripe.owns_page(page.page))
    return stripe.count_pages(split.full) * component.slots_per_page + partial


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a section adds of one group: the logical pages that it touches, and their ids on the source and on the destination."""

    group: LayerGroup
    split: PageSplit
    ids: tuple[IndexArray, IndexArray]

    def ids_of(self, pages: range) -> tuple[IndexArray, IndexArray]:
        """Return the ids of some of the touched pages."""
        first = self.split.touched.start
        source, destination = (ids[pages.start - first : pages.stop - first] for ids in self.ids)
        return source, destination


def pages_to_send(
    groups: Iterable[LayerGroup], section: Section, source: Tables, destination: Tables
) -> Iterator[Part]:
    """Yield each group of which a section adds rows, with its pages.

    Pages that another replica sends are checked too: an id that is wrong for one is wrong for all. Raises
    InvalidInputError for a missing table, PageOutOfBoundsError for a table that is too short or an id that does
    not exist.
    """
    for group in groups:
        rows = rows_to_send(group.component, section)
        if rows.count:
            split, kind = split_rows(group.component, rows), group.component.kind
            pages = split.touched
            sides = (group.source, source), (group.destination, destination)
            here, there = (_checked_ids(side, kind, tables, pages) for side, tables in sides)
            yield Part(group, split, (here, there))


def _checked_ids(side: Side, kind: ComponentKind, tables: Tables, pages: range) -> IndexArray:
    space, page_count = side.form.space, side.form.page_count
    table = tables.get(space)
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
    ids = table.require(space)[pages.start - covered.start : pages.stop - covered.start].astype(np.int64)
    if ids.min() < 0 or ids.max() >= page_count:
        wrong = int(np.flatnonzero((ids < 0) | (ids >= page_count))[0])
        raise PageOutOfBoundsError(
            f"{side.name}: {kind} would use page id {ids[wrong]} of space '{space}' for the request's "
            f"logical page {pages.start + wrong}, but its regions have the pages [0, {page_count})"
        )
    return ids


def _check(section: Section, max_operation_bytes: int) -> None:
    if not section.start_token <= section.stop_token <= section.prompt_tokens:
        raise InvalidInputError(
            f"a section needs start_token <= stop_token <= prompt_tokens, got [{section.start_token}, "
            f"{section.stop_token}) of {section.prompt_tokens} tokens"
        )
    if section.prefix_tokens > section.prompt_tokens:
        raise InvalidInputError(
            f"a prefix of {section.prefix_tokens} tokens is longer than the prompt of {section.prompt_tokens}"
        )
    if max_operation_bytes < 1:
        raise InvalidInputError(f"max_operation_bytes must be at least 1, got {max_operation_bytes}")


def _add(amounts: Amounts, group: LayerGroup, amount: Amount) -> None:
    kind = group.component.kind
    amounts[kind] = amounts.get(kind, Amount()) + amount


# ------------------------------------------------------------------------------------------- operations

Neighbours = dict[tuple[LayerGroup, ...], tuple[Band, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Copies that are made in every neighbourhood of a band: int64 arrays of equal length."""

    band: Band
    ids: tuple[IndexArray, IndexArray]
    offset: IndexArray
    """Where in the pages the copies begin."""
    length: IndexArray
    live_bytes: list[int]
    """What is live of each member, in one neighbourhood."""

    def add_to(self, amounts: Amounts, max_operation_bytes: int) -> None:
        """Add what the copies amount to. The operations, and dead bytes between members, count for the first member."""
        rows = self.band.rows
        parts, _ = cut_sizes(self.length, max_operation_bytes)
        dead_bytes = int(self.length.sum()) - sum(self.live_bytes)
        operations = int(parts.sum())
        for (group, _), live_bytes in zip(self.band.members, self.live_bytes, strict=True):
            _add(amounts, group, Amount(bytes=rows * (live_bytes + dead_bytes), operations=rows * operations))
            dead_bytes = operations = 0


def _bands(known: Neighbours, parts: Iterable[Part]) -> tuple[Band, ...]:
    groups = tuple(part.group for part in parts)
    if groups not in known:
        known[groups] = find_neighbours(groups)
    return known[groups]


def _full_batches(parts: Iterable[Part], known: Neighbours) -> Iterator[_Batch]:
    """Yield the copies of full pages."""
    by_pages: dict[range, list[Part]] = {}
    for part in parts:
        if part.split.full:
            by_pages.setdefault(part.split.full, []).append(part)
    for pages, alike in by_pages.items():
        ids = {part.group: part.ids_of(pages) for part in alike}
        for band in _bands(known, alike):
            runs = band.runs(pages, *ids[band.first])
            count = int(runs.pages.sum())
            if count:
                live_bytes = [count * layers * group.page_bytes for group, layers in band.members]
                begin = np.zeros(1, dtype=np.int64)
                yield _Batch(band, (runs.source, runs.destination), begin, runs.pages * band.page_bytes, live_bytes)


def _partial_batches(parts: Iterable[Part], known: Neighbours, most_dead_bytes: int) -> Iterator[_Batch]:
    """Yield the copies of what is live in pages that are not sent whole."""
    begun = [(page, part, live) for part in parts for page, live in part.group.partial_stretches(part.split)]
    for page, alike in groupby(sorted(begun, key=lambda one: one[0]), key=lambda one: one[0]):
        found = list(alike)
        live_of = {part.group: live for _, part, live in found}
        ids = {part.group: part.ids_of(range(page, page + 1)) for _, part, _ in found}
        for band in _bands(known, [part for _, part, _ in found]):
            offset, length = band.stretches(live_of, most_dead_bytes=most_dead_bytes)
            live_bytes = [layers * sum(size for _, size in live_of[group]) for group, layers in band.members]
            source, destination = (np.repeat(one, len(offset)) for one in ids[band.first])
            yield _Batch(band, (source, destination), offset, length, live_bytes)


def _written(batches: list[_Batch]) -> Operations:
    """Write all copies, in that order, into arrays made for them once."""
    out = np.empty((3, sum(batch.band.rows * len(batch.length) for batch in batches)), dtype=np.uint64)
    written = 0
    for batch in batches:
        shape = (batch.band.rows, len(batch.length))
        columns = out[:, written : written + shape[0] * shape[1]].reshape(3, *shape)
        for side, ids, column in zip((batch.band.source, batch.band.destination), batch.ids, columns, strict=False):
            side.pages.write(ids, batch.offset, column)
        columns[2] = batch.length
        written += shape[0] * shape[1]
    return Operations(*out)
