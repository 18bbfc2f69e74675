"""Which layers, of one component or of several, lie side by side on both sides, so that one operation copies all of them.

Owns: the search for such neighbours, the stretches that are sent of their partial pages. Must not know: page tables, page ids.

Layers are neighbours when their pages are adjacent on both sides, as in `page_first`. Bytes between the live rows of two neighbours
are dead rows or padding of the same request, so that they may be copied too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvbridge.core.plan.operations import AddressArray
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Side
from kvbridge.core.plan.runs import IndexArray

Stretches = tuple[IndexArray, IndexArray]
"""Offsets and lengths in bytes, ascending; they neither overlap nor touch."""


@dataclass(frozen=True, slots=True)
class Member:
    """Layers of a group that follow each other in a band."""

    group: LayerGroup
    layers: int
    offset_bytes: int
    """Where in the band's page the first of them begins."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all of them."""
        return self.layers * self.group.page_bytes


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
    joins_pages: bool
    """Whether consecutive pages touch on both sides, so that a run of them is one operation."""

    @property
    def first(self) -> LayerGroup:
        """The group of the first member: spaces, extents and stripe are those of all."""
        return self.members[0].group

    def stretches(self, live: Mapping[LayerGroup, Sequence[tuple[int, int]]], *, most_dead_bytes: int) -> Stretches:
        """Return what is sent of a page of a neighbourhood, of which these (offset, length) of a layer's page are live.

        Dead bytes between two of them are taken along where they are at most `most_dead_bytes`.
        """
        pieces = []
        for member in self.members:
            offset, length = np.array(live[member.group], dtype=np.int64).T
            layers = member.offset_bytes + np.arange(member.layers) * member.group.page_bytes
            pieces.append((np.add.outer(layers, offset).ravel(), np.tile(length, member.layers)))
        offset, length = (np.concatenate(column) for column in zip(*pieces, strict=True))
        apart = offset[1:] - (offset + length)[:-1] > most_dead_bytes
        starts = np.flatnonzero(np.append(True, apart))
        stops = np.flatnonzero(np.append(apart, True))
        return offset[starts], offset[stops] + length[stops] - offset[starts]

    def shares(self, stretches: Stretches) -> list[int]:
        """Return how many bytes of the stretches of a page lie in the pages of each member."""
        offset, length = stretches
        return [
            int((np.clip(offset + length, begin, end) - np.clip(offset, begin, end)).sum())
            for begin, end in ((each.offset_bytes, each.offset_bytes + each.page_bytes) for each in self.members)
        ]

    def count_begins(self, offsets: IndexArray) -> list[int]:
        """Return how many of these offsets in a page lie in the pages of each member."""
        firsts = [member.offset_bytes for member in self.members]
        found = np.searchsorted(firsts, offsets, side="right") - 1
        return [int(count) for count in np.bincount(found, minlength=len(firsts))]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of a group, by its place in it."""

    group: LayerGroup
    position: int


def find_neighbours(groups: tuple[LayerGroup, ...]) -> tuple[Band, ...]:
    """Return the bands of groups whose pages are sent alike; each layer is in one of them."""
    bands: list[Band] = []
    by_frame: dict[tuple[object, ...], list[LayerGroup]] = {}
    for group in groups:
        by_frame.setdefault(_frame(group), []).append(group)
    for alike in by_frame.values():
        found: dict[tuple[tuple[LayerGroup, int], ...], list[_Layer]] = {}
        for neighbours in _neighbourhoods(alike):
            form = tuple((group, len(list(each))) for group, each in groupby(layer.group for layer in neighbours))
            found.setdefault(form, []).append(neighbours[0])
        bands += [_band(form, firsts) for form, firsts in found.items()]
    return tuple(bands)


def known_neighbours(pairing: Pairing, groups: tuple[LayerGroup, ...]) -> tuple[Band, ...]:
    """Return the same for groups of a pairing that are asked for again, plan after plan. The pairing keeps the answers."""
    if groups not in pairing.neighbours:
        pairing.neighbours[groups] = find_neighbours(groups)
    return pairing.neighbours[groups]


def page_operations(groups: tuple[LayerGroup, ...]) -> tuple[int, int]:
    """Return how many operations copy one page of each of these layers, and how few would if both sides lay alike.

    The second is what the better one of the two layouts allows. Layers of which not all lanes are copied count for
    themselves in any layout.
    """
    alike = [
        tuple(replace(group, source=one, destination=one) for group, one in zip(groups, sides, strict=True))
        for sides in ([group.source for group in groups], [group.destination for group in groups])
    ]
    here, *others = (sum(len(band.source.bases) for band in find_neighbours(found)) for found in (groups, *alike))
    return here, min(here, *others)


def _frame(group: LayerGroup) -> tuple[object, ...]:
    """What neighbours have in common: their page ids, who sends which pages, and where pages lie."""
    return (group.stripe, *_side_frame(group.source), *_side_frame(group.destination))


def _side_frame(side: Side) -> tuple[object, ...]:
    form = side.form
    return (
        form.space,
        form.memory,
        form.device,
        form.pages_per_extent,
        form.page_count,
        form.page_stride_bytes,
        side.bases.shape[1],
    )


def _neighbourhoods(groups: Sequence[LayerGroup]) -> list[list[_Layer]]:
    layers = [_Layer(group, position) for group in groups for position in range(len(group.layers))]
    sizes = np.repeat([group.page_bytes for group in groups], [len(group.layers) for group in groups])
    sides = [_begins([group.source for group in groups]), _begins([group.destination for group in groups])]
    order = np.argsort(sides[0][:, 0], kind="stable")
    layers, sizes = [layers[place] for place in order.tolist()], sizes[order]
    touching = np.ones(len(layers) - 1, dtype=np.bool_)
    for begins in sides:
        touching &= (np.diff(begins[order], axis=0) == sizes[:-1, None].astype(np.uint64)).all(axis=1)
    # What is longer than a stride is not one page of a block, but two blocks that happen to touch.
    limit = min(min(group.source.form.page_stride_bytes, group.destination.form.page_stride_bytes) for group in groups)
    found, room = [[layers[0]]], limit - int(sizes[0])
    for layer, size, touches in zip(layers[1:], sizes[1:].tolist(), touching.tolist(), strict=True):
        if touches and size <= room:
            found[-1].append(layer)
        else:
            found.append([layer])
            room = limit
        room -= size
    return found


def _begins(sides: Sequence[Side]) -> AddressArray:
    """Where what is copied of each layer begins, in each extent."""
    return np.concatenate([side.bases + np.uint64(side.lane_offset_bytes) for side in sides])


def _band(form: tuple[tuple[LayerGroup, int], ...], firsts: Sequence[_Layer]) -> Band:
    members, page_bytes = [], 0
    for group, count in form:
        members.append(Member(group, count, page_bytes))
        page_bytes += members[-1].page_bytes
    group, rows = firsts[0].group, [first.position for first in firsts]
    source, destination = (replace(side, bases=side.bases[rows]) for side in (group.source, group.destination))
    strides = source.form.page_stride_bytes, destination.form.page_stride_bytes
    return Band(source, destination, tuple(members), page_bytes, joins_pages=strides == (page_bytes, page_bytes))
