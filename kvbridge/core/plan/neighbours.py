"""Layers, of one component or of several, that lie side by side on both sides, so that one operation copies all of them.

Layers are neighbours when their pages are adjacent on both sides, as in `page_first`. Bytes between the live rows of two neighbours
are dead rows or padding of the same request, so that they may be copied too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvbridge.core.plan.pages import IndexArray, Runs, find_runs, single_pages
from kvbridge.core.plan.pairing import LayerGroup, Side

Member = tuple[LayerGroup, int]
"""A group, and how many of its layers follow each other in a band."""


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Neighbours, each row of the bases one neighbourhood; all of the same members."""

    source: Side
    """Its bases are those of the first layer of each neighbourhood; so is the destination's."""
    destination: Side
    members: tuple[Member, ...]
    """In the order of their addresses."""
    page_bytes: int
    """Bytes that are copied for a full page of a neighbourhood."""

    @property
    def first(self) -> LayerGroup:
        """The group of the first member: spaces, extents and stripe are those of all."""
        return self.members[0][0]

    @property
    def rows(self) -> int:
        """How many neighbourhoods there are."""
        return len(self.source.pages)

    @property
    def joins_pages(self) -> bool:
        """Whether consecutive pages touch on both sides, so that a run of them is one operation."""
        return self.source.form.page_stride_bytes == self.destination.form.page_stride_bytes == self.page_bytes

    def runs(self, pages: range, source: IndexArray, destination: IndexArray) -> Runs:
        """Return this writer's share of logical pages, given by their ids; where pages do not touch, each is a run of its own."""
        mine = self.first.stripe.pages(pages)
        if mine is not None:
            source, destination = source[mine], destination[mine]
        if not self.joins_pages:
            return single_pages(source, destination)
        return find_runs(source, destination, (self.source.pages.borders, self.destination.pages.borders))

    def stretches(
        self, live: Mapping[LayerGroup, Sequence[tuple[int, int]]], *, most_dead_bytes: int
    ) -> tuple[IndexArray, IndexArray]:
        """Return offsets and lengths of what is sent of a page of a neighbourhood; `live`: those of a layer's page.

        Dead bytes between two live stretches are taken along where they are at most `most_dead_bytes`. The result ascends.
        """
        pieces, begin = [], 0
        for group, count in self.members:
            offset, length = np.array(live[group], dtype=np.int64).T
            layers = begin + np.arange(count) * group.page_bytes
            pieces.append((np.add.outer(layers, offset).ravel(), np.tile(length, count)))
            begin += count * group.page_bytes
        offset, length = (np.concatenate(column) for column in zip(*pieces, strict=True))
        apart = offset[1:] - (offset + length)[:-1] > most_dead_bytes
        starts = np.flatnonzero(np.append(True, apart))
        stops = np.flatnonzero(np.append(apart, True))
        return offset[starts], offset[stops] + length[stops] - offset[starts]


def find_neighbours(groups: Sequence[LayerGroup]) -> tuple[Band, ...]:
    """Return the bands of groups whose pages are sent alike; each layer is in one of them."""
    bands: list[Band] = []
    by_frame: dict[tuple[object, ...], list[LayerGroup]] = {}
    for group in groups:
        frame = (group.stripe, *_frame(group.source), *_frame(group.destination))
        by_frame.setdefault(frame, []).append(group)
    for alike in by_frame.values():
        found: dict[tuple[Member, ...], list[tuple[LayerGroup, int]]] = {}
        for neighbours in _neighbourhoods(alike):
            members = tuple((group, len(list(each))) for group, each in groupby(group for group, _ in neighbours))
            found.setdefault(members, []).append(neighbours[0])
        bands += [_band(members, firsts) for members, firsts in found.items()]
    return tuple(bands)


def page_operations(groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Return how many operations copy one page of each of these layers, and how few would if both sides lay alike.

    The second is what the better one of the two layouts allows. Layers of which not all lanes are copied count for
    themselves in any layout.
    """
    alike = [
        tuple(replace(group, source=one, destination=one) for group, one in zip(groups, sides, strict=True))
        for sides in ([group.source for group in groups], [group.destination for group in groups])
    ]
    here, *others = (sum(band.rows for band in find_neighbours(found)) for found in (groups, *alike))
    return here, min(here, *others)


def _frame(side: Side) -> tuple[object, ...]:
    """What neighbours have in common on one side."""
    form = side.form
    place = form.space, form.memory, form.device
    return *place, form.pages_per_extent, form.page_count, form.page_stride_bytes, side.pages.bases.shape[1]


def _neighbourhoods(groups: Sequence[LayerGroup]) -> list[list[tuple[LayerGroup, int]]]:
    """Return the layers that follow each other, each as its group and its place in it."""
    layers = [(group, position) for group in groups for position in range(len(group.layers))]
    sizes = np.array([group.page_bytes for group, _ in layers], dtype=np.uint64)
    sides = [[group.source for group in groups], [group.destination for group in groups]]
    begins = [np.concatenate([side.pages.bases for side in each]) for each in sides]
    order = np.argsort(begins[0][:, 0], kind="stable")
    layers, sizes = [layers[place] for place in order.tolist()], sizes[order]
    touching = np.ones(len(layers) - 1, dtype=np.bool_)
    for begin in begins:
        touching &= (np.diff(begin[order], axis=0) == sizes[:-1, None]).all(axis=1)
    # What is longer than a stride is not one page of a block, but two blocks that happen to touch.
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


def _band(members: tuple[Member, ...], firsts: Sequence[tuple[LayerGroup, int]]) -> Band:
    group, rows = firsts[0][0], [position for _, position in firsts]
    return Band(
        group.source.layers(rows),
        group.destination.layers(rows),
        members,
        sum(each.page_bytes * count for each, count in members),
    )
