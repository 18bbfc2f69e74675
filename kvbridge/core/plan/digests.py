"""Which bytes of a page its digest is about, and where they lie on the side that computes it.

The digest of a page is the raw CRC-32C of the page as the destination keeps it, without its padding and with zeros
where the request has no live row; of what several writers compute from their own rows it is the exclusive or.

A digest is known by component, destination lanes, layer and logical page, and not by the destination rank: ranks that
keep the same lanes keep the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive, Tables
from kvbridge.core.plan.operations import AddressArray, Section
from kvbridge.core.plan.page_array import IndexArray
from kvbridge.core.plan.pairing import LayerGroup, Pairing
from kvbridge.core.plan.planner import Part, pages_to_send

MAX_PART_BYTES = 512 * 1024
"""Digests that one message carries. More pages than that of one layer do not fit into a page table."""
PIECES_AT_ONCE = 4_096
"""About how many pieces of several layers are found together."""


class DigestKind(StrEnum):
    """What is computed over the pages of a request."""

    NONE = "none"
    CRC32C = "crc32c"


class DigestKey(NamedTuple):
    """Pages that are alike on every destination rank that has them: a component and the lanes that a page holds."""

    component: ComponentKind
    lane_start: int
    lane_stop: int


class PageDigests(FrozenModel):
    """Digests of consecutive logical pages of some layers, on the wire."""

    component: ComponentKind
    lane_start: NonNegative
    lane_stop: Positive
    """The lanes of a destination page."""
    layers: Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=4_096)]
    first_page: NonNegative
    values: Annotated[bytes, Field(max_length=MAX_PART_BYTES)]
    """uint32, little-endian, layer by layer; as many pages for each."""

    @property
    def key(self) -> DigestKey:
        """What the pages are."""
        return DigestKey(self.component, self.lane_start, self.lane_stop)


@dataclass(frozen=True, slots=True, eq=False)
class DigestPieces:
    """Contiguous stretches of memory, each inside one page of one layer; int64 arrays of equal length but for the first three."""

    key: DigestKey
    memory: MemoryKind
    device: int
    """CUDA ordinal of VRAM; 0 for DRAM."""
    layer: IndexArray
    """Global layer ids."""
    page: IndexArray
    """Logical pages; a page has several pieces where its rows are not contiguous."""
    address: AddressArray
    """Virtual addresses in the computing process, uint64."""
    length: IndexArray
    """Bytes, at least 1."""
    behind: IndexArray
    """Bytes of the destination's page that follow the piece, without padding."""

    def __len__(self) -> int:
        return len(self.length)


def sent_groups(pairings: Iterable[Pairing], layers: tuple[int, ...] | None) -> list[LayerGroup]:
    """Return what a source rank sends of some layers to all ranks of a peer, what several of them get alike only once."""
    seen: set[tuple[DigestKey, int]] = set()
    groups = []
    for pairing in pairings:
        found = list(pairing.groups_of(layers))
        for group in found:
            fresh = group.only(frozenset(layer for layer in group.layers if (key_of(group), layer) not in seen))
            if fresh is not None:
                groups.append(fresh)
        seen |= {(key_of(group), layer) for group in found for layer in group.layers}
    return groups


def key_of(group: LayerGroup) -> DigestKey:
    """Return under which key the digests of a group are known."""
    form = group.destination.form
    return DigestKey(group.component.kind, form.lane_start, form.lane_stop)


def digest_pieces(
    groups: Sequence[LayerGroup], section: Section, source: Tables, destination: Tables
) -> Iterator[DigestPieces]:
    """Yield every piece of memory on the source's side that holds live rows of a section, a few thousand at once.

    The source is the side that computes: what a receiver holds has it as both sides (`held_groups`). Raises what
    `plan` raises for tables that do not fit.
    """
    for part in pages_to_send(groups, section, source, destination):
        page, offset, length = _layer_pieces(part)
        if len(page):
            yield from _all_layers(part, page, offset, length)


def _layer_pieces(part: Part) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return the logical page, the offset behind the first copied lane, and the length of each piece of one layer."""
    group, pages = part.group, part.split.full
    full = np.arange(pages.start, pages.stop)
    mine = group.stripe.pages(pages)
    full = full if mine is None else full[mine]
    stretches = [(page, *stretch) for page, found in group.partial_stretches(part.split) for stretch in found]
    page, offset, length = np.array(stretches, dtype=np.int64).reshape(-1, 3).T
    whole = np.full(len(full), group.lanes * group.component.lane_block_bytes)
    return np.append(full, page), np.append(np.zeros(len(full), dtype=np.int64), offset), np.append(whole, length)


def _all_layers(part: Part, page: IndexArray, offset: IndexArray, length: IndexArray) -> Iterator[DigestPieces]:
    group = part.group
    ids = part.ids[0][page - part.split.touched.start]
    image_bytes = group.destination.form.lanes * group.component.lane_block_bytes
    behind = image_bytes - group.destination.lane_offset_bytes - offset - length
    layers = np.array(group.layers, dtype=np.int64)
    step = max(1, PIECES_AT_ONCE // len(page))
    for first in range(0, len(layers), step):
        chosen = layers[first : first + step]
        address = np.empty((len(chosen), len(page)), dtype=np.uint64)
        group.source.pages.layers(slice(first, first + step)).write(ids, offset, address)
        yield DigestPieces(
            key=key_of(group),
            memory=group.source.form.memory,
            device=group.source.form.device,
            layer=np.repeat(chosen, len(page)),
            page=np.tile(page, len(chosen)),
            address=address.reshape(-1),
            length=np.tile(length, len(chosen)),
            behind=np.tile(behind, len(chosen)),
        )
