"""From a section of a request and its page tables to the operations that move it.

Owns: the order of the work: which rows, which pages, checked against which bounds, as which operations.
Must not know: who publishes, who executes.

The work is proportional to pages plus operations, in numpy, and to components in Python; never to pages or layers in
Python. Whatever several components have in common (page ids of an interval, their bounds, their runs) is found once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, RowInterval
from kvbridge.core.ids import Tables
from kvbridge.core.plan.lookup import PageLookup
from kvbridge.core.plan.operations import Amount, Amounts, Plan, Section
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Stripe
from kvbridge.core.plan.pieces import Batch, Pieces, write_batches
from kvbridge.core.plan.runs import PageSplit, split_rows


def plan(pairing: Pairing, section: Section, source: Tables, destination: Tables, *, max_operation_bytes: int) -> Plan:
    """Return every operation by which the source rank moves its share of `section` to the destination rank.

    `source` and `destination` are the request's page tables on the two nodes. Everything is checked before anything is
    returned: InvalidInputError for a section that contradicts itself or a missing table, PageOutOfBoundsError (naming
    side, component, space, id and limit) for a table that is too short or a page id that a region does not have.
    """
    _check(section, max_operation_bytes)
    lookup = PageLookup(source, destination)
    batches: list[Batch] = []
    amounts: Amounts = {}
    for group, split in pages_to_send(pairing.groups_of(section.layers), section, lookup):
        mine = _batches(group, split, lookup, max_operation_bytes)
        batches += mine
        amounts[group.component.kind] = amounts.get(group.component.kind, Amount()) + Amount(
            lane_rows=owned_rows(group.component, split, group.stripe) * group.lanes * len(group.layers),
            bytes=sum(batch.total_bytes for batch in mine),
            operations=sum(batch.operations for batch in mine),
        )
    return Plan(write_batches(batches), amounts)


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


def _batches(group: LayerGroup, split: PageSplit, lookup: PageLookup, max_bytes: int) -> list[Batch]:
    found = []
    if split.full:
        for band in group.bands:
            runs = lookup.runs(group, band, split.full)
            source, destination = group.source.places(runs.source), group.destination.places(runs.destination)
            pieces = Pieces(source, destination, runs.pages * band.page_bytes)
            found.append(Batch(band.source_bases, band.destination_bases, pieces.cut(max_bytes)))
    page, offset, length = group.partial_stretches(split)
    if len(page):
        sources, destinations = (ids[page - split.touched.start] for ids in lookup.ids(group, split.touched))
        pieces = Pieces(group.source.places(sources, offset), group.destination.places(destinations, offset), length)
        found.append(Batch(group.source.bases, group.destination.bases, pieces.cut(max_bytes)))
    return [batch for batch in found if len(batch.pieces)]
