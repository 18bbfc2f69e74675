"""From a section of a request and its page tables to the operations that move it.

Owns: the order of the work: which rows, which pages, checked against which bounds, as which operations.
Must not know: who publishes, who executes.

The work is proportional to pages plus operations, in numpy, and to components in Python; never to pages or layers in
Python. Whatever several components have in common (page ids of an interval, their bounds, their runs) is found once, and
layers and components that lie side by side on both sides are copied together (`neighbours`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, RowInterval
from kvbridge.core.ids import Tables
from kvbridge.core.plan.lookup import PageLookup
from kvbridge.core.plan.neighbours import Band, find_neighbours, known_neighbours
from kvbridge.core.plan.operations import Amount, Amounts, Plan, Section
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Stripe
from kvbridge.core.plan.pieces import Batch, Pieces, write_batches
from kvbridge.core.plan.runs import PageSplit, split_rows


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
    lookup = PageLookup(source, destination)
    parts = list(pages_to_send(pairing.groups_of(section.layers), section, lookup))
    # Rows that are not live yet may be under way with a later section by the time that these arrive: only the last one
    # of a request may write more than it owes.
    most_dead_bytes = operation_cost_bytes if section.stop_token == section.prompt_tokens else 0
    # The groups of all layers are the pairing's own and come again; those of some layers are made for this plan.
    find = partial(known_neighbours, pairing) if section.layers is None else find_neighbours
    work = _Work(find, lookup, max_operation_bytes, most_dead_bytes)
    for group, split in parts:
        rows = owned_rows(group.component, split, group.stripe) * group.lanes * len(group.layers)
        work.add(group, Amount(lane_rows=rows))
    for pages, groups in _alike((split.full, group) for group, split in parts if split.full):
        work.send_full(pages, groups)
    begun = [(page, group, live) for group, split in parts for page, live in group.partial_stretches(split)]
    for page, groups in _alike((page, group) for page, group, _ in begun):
        work.send_partial(page, groups, {group: live for one, group, live in begun if one == page})
    return Plan(write_batches(work.batches), work.amounts)


def rows_to_send(component: Component, section: Section) -> RowInterval:
    """Return the rows that a section adds to what its predecessors have sent; possibly none (count 0)."""

    def published(tokens: int) -> RowInterval:
        return component.published_rows(
            tokens, prompt_tokens=section.prompt_tokens, prefix_tokens=section.prefix_tokens
        )

    before, after = published(section.start_token), published(section.stop_token)
    return RowInterval(start=max(before.stop, after.start), stop=after.stop)


def pages_to_send(
    groups: Iterable[LayerGroup], section: Section, lookup: PageLookup
) -> Iterator[tuple[LayerGroup, PageSplit]]:
    """Yield each group of which a section adds rows, and the pages that they touch; the tables have them (`PageLookup.check`)."""
    for group in groups:
        rows = rows_to_send(group.component, section)
        if rows.count:
            split = split_rows(group.component, rows)
            lookup.check(group, split.touched)
            yield group, split


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


def owned_rows(component: Component, split: PageSplit, stripe: Stripe) -> int:
    """Return how many rows of `split` lie in pages of `stripe`."""
    partial = sum(page.rows for page in split.partial if stripe.owns_page(page.page))
    return stripe.count_pages(split.full) * component.slots_per_page + partial


_What = TypeVar("_What")


def _alike(parts: Iterable[tuple[_What, LayerGroup]]) -> list[tuple[_What, tuple[LayerGroup, ...]]]:
    """Put together the groups of which the same is sent."""
    found: dict[_What, list[LayerGroup]] = {}
    for what, group in parts:
        found.setdefault(what, []).append(group)
    return [(what, tuple(groups)) for what, groups in found.items()]


@dataclass(slots=True, eq=False)
class _Work:
    """The batches of one plan, and what they amount to."""

    find: Callable[[tuple[LayerGroup, ...]], tuple[Band, ...]]
    lookup: PageLookup
    max_operation_bytes: int
    most_dead_bytes: int
    batches: list[Batch] = field(default_factory=list)
    amounts: Amounts = field(default_factory=dict)

    def add(self, group: LayerGroup, amount: Amount) -> None:
        kind = group.component.kind
        self.amounts[kind] = self.amounts.get(kind, Amount()) + amount

    def send_full(self, pages: range, groups: tuple[LayerGroup, ...]) -> None:
        """Send full pages of these groups."""
        for band in self.find(groups):
            runs = self.lookup.runs(band, pages)
            source, destination = band.source.places(runs.source), band.destination.places(runs.destination)
            pieces = Pieces(source, destination, runs.pages * band.page_bytes).cut(self.max_operation_bytes)
            count = int(runs.pages.sum())
            moved = [count * member.page_bytes for member in band.members]
            self._send(band, pieces, moved, [len(pieces), *[0] * (len(moved) - 1)])

    def send_partial(
        self, page: int, groups: tuple[LayerGroup, ...], live: Mapping[LayerGroup, Sequence[tuple[int, int]]]
    ) -> None:
        """Send what is live of a page of these groups."""
        for band in self.find(groups):
            offset, length = stretches = band.stretches(live, most_dead_bytes=self.most_dead_bytes)
            ids = self.lookup.ids(band.first, range(page, page + 1))
            source, destination = (
                side.places(np.repeat(one, len(offset)), offset)
                for side, one in zip((band.source, band.destination), ids, strict=True)
            )
            pieces = Pieces(source, destination, length).cut(self.max_operation_bytes)
            begins = pieces.source.offset - source.offset[0] + offset[0]
            self._send(band, pieces, band.shares(stretches), band.count_begins(begins))

    def _send(self, band: Band, pieces: Pieces, moved: Sequence[int], begun: Sequence[int]) -> None:
        """Add a batch, and to what it amounts: of each member the bytes, and the operations that begin in its pages."""
        if not len(pieces):
            return
        batch = Batch(band.source.bases, band.destination.bases, pieces)
        self.batches.append(batch)
        rows = len(batch.source_bases)
        for member, length, operations in zip(band.members, moved, begun, strict=True):
            self.add(member.group, Amount(bytes=length * rows, operations=operations * rows))
