"""The planner: from a section of a request and its page tables to the operations that move it.

The work in numpy grows with pages and operations, the work in Python with components only.

Layers of one or several components are *neighbours* when their pages are adjacent on both sides, as in `page_first`. One operation
copies all of them. Bytes between live rows of neighbours are dead rows or padding of the same request, so they may be copied too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import (
    Amount,
    Amounts,
    IndexArray,
    Operations,
    PageArray,
    PageSplit,
    Section,
    cut_sizes,
    find_runs,
    split_rows,
)
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Side


@dataclass(frozen=True, slots=True)
class Plan:
    """The copies of one rank to one peer rank for one section of one request."""

    operations: Operations
    amounts: Amounts


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

    `source` and `destination` are the request's page tables on the two nodes. Operations are cut at `max_operation_bytes`. At most
    `operation_cost_bytes` dead bytes of the request's own pages are sent along where they save an operation. Raises
    InvalidInputError for a section that contradicts itself or a missing table, PageOutOfBoundsError (naming side, component, space,
    id and limit) for a table that is too short or a page id that a region does not have.
    """
    _check(section, max_operation_bytes)
    parts = list(pages_to_send(pairing.groups_of(section.layers), section, source, destination))
    # Rows of a later section may be on their way at the same time: only the last section of a request may write dead bytes.
    most_dead_bytes = operation_cost_bytes if section.stop_token == section.prompt_tokens else 0
    # The groups of all layers come again in later plans; groups of some layers are made for this plan.
    known = pairing.neighbours if section.layers is None else {}
    batches = [*_full_batches(parts, known), *_partial_batches(parts, known, most_dead_bytes)]
    amounts: Amounts = {}
    for part in parts:
        group = part.group
        rows = group.stripe.count_rows(group.component, part.split) * group.lanes * len(group.layers)
        _add(amounts, group, Amount(lane_rows=rows))
    for batch in batches:
        # Operations, and dead bytes between members, count for the first member.
        operations = int(cut_sizes(batch.length, max_operation_bytes)[0].sum())
        dead_bytes = int(batch.length.sum()) - sum(batch.live_bytes)
        rows = batch.band.rows
        for (group, _), live_bytes in zip(batch.band.members, batch.live_bytes, strict=True):
            _add(amounts, group, Amount(bytes=rows * (live_bytes + dead_bytes), operations=rows * operations))
            dead_bytes = operations = 0
    return Plan(_written(batches).cut(max_operation_bytes), amounts)


def _add(amounts: Amounts, group: LayerGroup, amount: Amount) -> None:
    kind = group.component.kind
    amounts[kind] = amounts.get(kind, Amount()) + amount


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


# ------------------------------------------------------------------------------------------- pages to send


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The pages of one group that a section touches, and their ids on the source and on the destination."""

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
    """Yield each group of which a section adds rows, with its pages. Pages that another replica sends are checked too.

    Raises InvalidInputError for a missing table, PageOutOfBoundsError for a table that is too short or an id that does not exist.
    """
    for group in groups:
        rows = section.added_rows(group.component)
        if rows.count:
            split, kind = split_rows(group.component, rows), group.component.kind
            sides = (group.source, source), (group.destination, destination)
            here, there = (_checked_ids(side, kind, tables, split.touched) for side, tables in sides)
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


# ------------------------------------------------------------------------------------------- neighbours

Member = tuple[LayerGroup, int]
"""A group, and the number of its layers that follow each other in a band."""


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Neighbourhoods of the same members. Spaces, extents and stripe are those of the first member."""

    source: PageArray
    """Each row is the first layer of a neighbourhood."""
    destination: PageArray
    members: tuple[Member, ...]
    """In the order of their addresses."""
    page_bytes: int
    """Bytes that are copied for a full page of a neighbourhood."""

    @property
    def first(self) -> LayerGroup:
        """The group of the first member."""
        return self.members[0][0]

    @property
    def rows(self) -> int:
        """How many neighbourhoods there are."""
        return len(self.source)


def find_neighbours(groups: Sequence[LayerGroup]) -> tuple[Band, ...]:
    """Return the bands of groups whose pages are sent alike; each layer is in one of them."""
    bands: list[Band] = []
    by_frame: dict[tuple[object, ...], list[LayerGroup]] = {}
    for group in groups:
        frame = (group.stripe, *_frame(group.source), *_frame(group.destination))
        by_frame.setdefault(frame, []).append(group)
    for alike in by_frame.values():
        found: dict[tuple[Member, ...], list[int]] = {}
        for neighbours in _neighbourhoods(alike):
            members = tuple((group, len(list(each))) for group, each in groupby(group for group, _ in neighbours))
            found.setdefault(members, []).append(neighbours[0][1])
        for members, rows in found.items():
            first, page_bytes = members[0][0], sum(group.page_bytes * count for group, count in members)
            bands.append(
                Band(first.source.pages.layers(rows), first.destination.pages.layers(rows), members, page_bytes)
            )
    return tuple(bands)


def page_operations(groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Return the operations that copy one page of each of these layers, and the fewest if both sides had the same layout.

    The second number is that of the better of the two layouts. Layers of which not all lanes are copied count one each.
    """
    alike = [
        tuple(replace(group, source=one, destination=one) for group, one in zip(groups, sides, strict=True))
        for sides in ([group.source for group in groups], [group.destination for group in groups])
    ]
    here, *others = (sum(band.rows for band in find_neighbours(found)) for found in (groups, *alike))
    return here, min(here, *others)


def _frame(side: Side) -> tuple[object, ...]:
    """Return the properties that neighbours have in common on one side."""
    form = side.form
    place = form.space, form.memory, form.device
    return *place, form.pages_per_extent, form.page_count, form.page_stride_bytes, side.pages.bases.shape[1]


def _neighbourhoods(groups: Sequence[LayerGroup]) -> list[list[tuple[LayerGroup, int]]]:
    """Return the layers that follow each other, each as its group and its place in the group."""
    layers = [(group, position) for group in groups for position in range(len(group.layers))]
    sizes = np.array([group.page_bytes for group, _ in layers], dtype=np.uint64)
    sides = [[group.source for group in groups], [group.destination for group in groups]]
    begins = [np.concatenate([side.pages.bases for side in each]) for each in sides]
    order = np.argsort(begins[0][:, 0], kind="stable")
    layers, sizes = [layers[place] for place in order.tolist()], sizes[order]
    touching = np.ones(len(layers) - 1, dtype=np.bool_)
    for begin in begins:
        touching &= (np.diff(begin[order], axis=0) == sizes[:-1, None]).all(axis=1)
    # More than a stride is no page of a block, but two blocks that happen to touch.
    limit = min(side.form.page_stride_bytes for each in sides for side in each)
    found, room = [[layers[0]]], limit - int(sizes[0])
    for layer, size, touches in zip(layers[1:], sizes[1:].tolist(), touching.tolist(), strict=True):
        if touches and size <= room:
            found[-1].append(layer)
        else:
            found.append([layer])
            room = limit
        room -= size
    return found


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
    """Live bytes of each member, in one neighbourhood."""


def _bands(known: Neighbours, parts: Iterable[Part]) -> tuple[Band, ...]:
    groups = tuple(part.group for part in parts)
    if groups not in known:
        known[groups] = find_neighbours(groups)
    return known[groups]


def _full_batches(parts: Iterable[Part], known: Neighbours) -> Iterator[_Batch]:
    """Yield the copies of full pages. A run of pages that touch on both sides is one copy."""
    by_pages: dict[range, list[Part]] = {}
    for part in parts:
        if part.split.full:
            by_pages.setdefault(part.split.full, []).append(part)
    for pages, alike in by_pages.items():
        ids = {part.group: part.ids_of(pages) for part in alike}
        for band in _bands(known, alike):
            source, destination = ids[band.first]
            mine = band.first.stripe.pages(pages)
            if mine is not None:
                source, destination = source[mine], destination[mine]
            count = len(source)
            if not count:
                continue
            length = np.full(count, band.page_bytes)
            if band.source.stride_bytes == band.destination.stride_bytes == band.page_bytes:
                runs = find_runs(source, destination, (band.source.borders, band.destination.borders))
                source, destination, length = runs.source, runs.destination, runs.pages * band.page_bytes
            live_bytes = [count * layers * group.page_bytes for group, layers in band.members]
            yield _Batch(band, (source, destination), np.zeros(1, dtype=np.int64), length, live_bytes)


def _partial_batches(parts: Iterable[Part], known: Neighbours, most_dead_bytes: int) -> Iterator[_Batch]:
    """Yield the copies of live bytes in pages that are not sent whole."""
    begun = [(page, part, live) for part in parts for page, live in part.group.partial_stretches(part.split)]
    for page, alike in groupby(sorted(begun, key=lambda one: one[0]), key=lambda one: one[0]):
        found = list(alike)
        live_of = {part.group: live for _, part, live in found}
        ids = {part.group: part.ids_of(range(page, page + 1)) for _, part, _ in found}
        for band in _bands(known, [part for _, part, _ in found]):
            offset, length = _stretches(band.members, live_of, most_dead_bytes)
            live_bytes = [layers * sum(size for _, size in live_of[group]) for group, layers in band.members]
            source, destination = (np.repeat(one, len(offset)) for one in ids[band.first])
            yield _Batch(band, (source, destination), offset, length, live_bytes)


def _stretches(
    members: Sequence[Member], live: Mapping[LayerGroup, Sequence[tuple[int, int]]], most_dead_bytes: int
) -> tuple[IndexArray, IndexArray]:
    """Return the offsets, ascending, and lengths to send of a neighbourhood's page, with dead bytes between close stretches."""
    pieces, begin = [], 0
    for group, count in members:
        offset, length = np.array(live[group], dtype=np.int64).T
        layers = begin + np.arange(count) * group.page_bytes
        pieces.append((np.add.outer(layers, offset).ravel(), np.tile(length, count)))
        begin += count * group.page_bytes
    offset, length = (np.concatenate(column) for column in zip(*pieces, strict=True))
    apart = offset[1:] - (offset + length)[:-1] > most_dead_bytes
    starts = np.flatnonzero(np.append(True, apart))
    stops = np.flatnonzero(np.append(apart, True))
    return offset[starts], offset[stops] + length[stops] - offset[starts]


def _written(batches: list[_Batch]) -> Operations:
    """Write all copies, in their order, into arrays that are made once."""
    out = np.empty((3, sum(batch.band.rows * len(batch.length) for batch in batches)), dtype=np.uint64)
    written = 0
    for batch in batches:
        shape = (batch.band.rows, len(batch.length))
        columns = out[:, written : written + shape[0] * shape[1]].reshape(3, *shape)
        for pages, ids, column in zip((batch.band.source, batch.band.destination), batch.ids, columns, strict=False):
            pages.write(ids, batch.offset, column)
        columns[2] = batch.length
        written += shape[0] * shape[1]
    return Operations(*out)
