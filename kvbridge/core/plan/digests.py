"""Digests of pages: their bytes in memory, their sums, and the arithmetic of CRC-32C.

The digest of a page is the raw CRC-32C of the page as the destination keeps it, without its padding and with zeros where the
request has no live row. Each writer computes digests from its own rows; their exclusive or is the page's. A digest is known by
component, destination lanes, layer and logical page, but not by rank: ranks with the same lanes keep the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.ids import MOST_PAGES, FrozenModel, MemoryKind, NonNegative, Positive, Tables
from kvbridge.core.plan.operations import AddressArray, IndexArray, Section, split_rows
from kvbridge.core.plan.pairing import LayerGroup, Pairing
from kvbridge.core.plan.planner import pages_to_send

ChecksumArray = npt.NDArray[np.uint32]

MAX_PART_BYTES = 4 * MOST_PAGES
"""Bytes of digests in one message. A page table cannot name more pages of one layer."""
PIECES_AT_ONCE = 4_096
"""The approximate number of pieces, of several layers, that are found together."""


class DigestKind(StrEnum):
    """The digest of a request's pages."""

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
        """The key of these pages."""
        return DigestKey(self.component, self.lane_start, self.lane_stop)


@dataclass(frozen=True, slots=True, eq=False)
class DigestPieces:
    """Contiguous stretches of memory, each inside one page of one layer: arrays of equal length, int64 but for `address`."""

    key: DigestKey
    memory: MemoryKind
    device: int
    """CUDA ordinal of VRAM; 0 for DRAM."""
    layer: IndexArray
    """Global layer ids."""
    page: IndexArray
    """Logical pages; a page has several pieces where its rows are not contiguous."""
    address: AddressArray
    """uint64; virtual, in the computing process."""
    length: IndexArray
    """Bytes, at least 1."""
    behind: IndexArray
    """Bytes of the destination's page that follow the piece, without padding."""

    def __len__(self) -> int:
        return len(self.length)


def sent_groups(pairings: Iterable[Pairing], layers: tuple[int, ...] | None) -> list[LayerGroup]:
    """Return the groups of some layers that a source rank sends to all ranks of a peer; equal groups only once."""
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
    """Return the key of a group's digests."""
    form = group.destination.form
    return DigestKey(group.component.kind, form.lane_start, form.lane_stop)


def digest_pieces(
    groups: Sequence[LayerGroup], section: Section, source: Tables, destination: Tables
) -> Iterator[DigestPieces]:
    """Yield the pieces of the source's memory that hold live rows of a section, a few thousand at once. Raises as `plan` does.

    The source is the side that computes. A receiver is both sides of the groups that it holds (`held_groups`).
    """
    for part in pages_to_send(groups, section, source, destination):
        group, pages = part.group, part.split.full
        full = np.arange(pages.start, pages.stop)
        mine = group.stripe.pages(pages)
        full = full if mine is None else full[mine]
        # The pieces of one layer, by their offsets behind the first copied lane.
        partial = [(page, *stretch) for page, found in group.partial_stretches(part.split) for stretch in found]
        page, offset, length = np.array(partial, dtype=np.int64).reshape(-1, 3).T
        page, offset = np.append(full, page), np.append(np.zeros_like(full), offset)
        length = np.append(np.full(len(full), group.lanes * group.component.lane_block_bytes), length)
        if not len(page):
            continue
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


class Mismatch(NamedTuple):
    """A page of a layer for which two sides have different digests."""

    key: DigestKey
    layer: int
    page: int
    """Logical."""
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class _Component:
    """The digests that one component can have."""

    rows: Mapping[int, int]
    """Where each layer stands in the arrays."""
    lanes: int
    pages: range


class DigestSums:
    """Digests of all layers of some logical pages; absent ones count as 0. 4 bytes for each page of each layer."""

    def __init__(
        self, geometry: ModelGeometry, section: Section, *, allowed: frozenset[DigestKey] | None = None
    ) -> None:
        """The digests may be about the rows that `section` adds, and have the keys `allowed` (None: any)."""
        self._components: dict[ComponentKind, _Component] = {}
        for component in geometry.components:
            rows = section.added_rows(component)
            pages = split_rows(component, rows).touched if rows.count else range(0)
            numbers = {layer: row for row, layer in enumerate(component.layers)}
            self._components[component.kind] = _Component(numbers, component.lanes, pages)
        self._allowed = allowed
        self._sums: dict[DigestKey, ChecksumArray] = {}
        self._layers: dict[DigestKey, set[int]] = {}

    def add(self, key: DigestKey, layer: IndexArray, page: IndexArray, values: ChecksumArray) -> None:
        """Add the caller's own values to the digests of these (layer, page); a place may come several times."""
        sums, component = self._array(key), self._components[key.component]
        distinct, which = np.unique(layer, return_inverse=True)
        rows = np.array([component.rows[one] for one in distinct.tolist()])
        np.bitwise_xor.at(sums, (rows[which], page - component.pages.start), values)
        self._layers[key].update(distinct.tolist())

    def merge(self, entries: Iterable[PageDigests]) -> None:
        """Add the digests of another process. Raises InvalidInputError, naming the entry, for one that cannot be of the request."""
        for entry in entries:
            component = self._check(entry)
            rows = [component.rows[layer] for layer in entry.layers]
            values = np.frombuffer(entry.values, dtype="<u4").reshape(len(rows), -1)
            first = entry.first_page - component.pages.start
            self._array(entry.key)[rows, first : first + values.shape[1]] ^= values
            self._layers[entry.key].update(entry.layers)

    def _check(self, entry: PageDigests) -> _Component:
        component = self._components.get(entry.component)
        what = f"digests of {entry.component}, lanes [{entry.lane_start}, {entry.lane_stop})"
        if component is None or not entry.lane_start < entry.lane_stop <= component.lanes:
            raise InvalidInputError(f"{what} are not this model's")
        if self._allowed is not None and entry.key not in self._allowed:
            raise InvalidInputError(f"{what}: no rank keeps such pages")
        if len(set(entry.layers)) < len(entry.layers) or not component.rows.keys() >= set(entry.layers):
            raise InvalidInputError(f"{what} name layers that the component does not have, or one twice")
        pages, rest = divmod(len(entry.values), 4 * len(entry.layers))
        stop = entry.first_page + pages
        if rest or not pages or entry.first_page < component.pages.start or stop > component.pages.stop:
            raise InvalidInputError(
                f"{what} are {len(entry.values)} bytes for {len(entry.layers)} layers from page {entry.first_page}, but "
                f"the request has the pages [{component.pages.start}, {component.pages.stop})"
            )
        return component

    def _array(self, key: DigestKey) -> ChecksumArray:
        found = self._sums.get(key)
        if found is None:
            component = self._components[key.component]
            found = np.zeros((len(component.rows), len(component.pages)), dtype=np.uint32)
            self._sums[key], self._layers[key] = found, set()
        return found

    def parts(self) -> Iterator[tuple[PageDigests, ...]]:
        """Yield all digests, cut into what one message carries."""
        part: list[PageDigests] = []
        room = MAX_PART_BYTES
        for key, sums in self._sums.items():
            component = self._components[key.component]
            layers = sorted(self._layers[key])
            row_bytes = 4 * len(component.pages)
            while layers:
                if room < row_bytes:
                    yield tuple(part)
                    part, room = [], MAX_PART_BYTES
                taken, layers = layers[: room // row_bytes], layers[room // row_bytes :]
                values = sums[[component.rows[layer] for layer in taken]].astype("<u4").tobytes()
                part.append(
                    PageDigests(
                        component=key.component,
                        lane_start=key.lane_start,
                        lane_stop=key.lane_stop,
                        layers=tuple(taken),
                        first_page=component.pages.start,
                        values=values,
                    )
                )
                room -= len(values)
        if part:
            yield tuple(part)

    def mismatches(self, found: DigestSums, key: DigestKey, layers: Sequence[int]) -> Iterator[Mismatch]:
        """Yield where `found`, which is about the same pages, differs from these sums in some layers; ascending."""
        if key not in self._sums and key not in found._sums:
            return
        component = self._components[key.component]
        rows = [component.rows[layer] for layer in layers]
        expected, seen = self._array(key)[rows], found._array(key)[rows]
        for row, page in np.argwhere(expected != seen).tolist():
            yield Mismatch(
                key, layers[row], component.pages.start + page, int(expected[row, page]), int(seen[row, page])
            )

    def __repr__(self) -> str:
        held = [f"{key.component}[{key.lane_start}:{key.lane_stop}] {sums.shape}" for key, sums in self._sums.items()]
        return f"<DigestSums {', '.join(held) or 'empty'}>"


# ------------------------------------------------------------------------------------------- CRC-32C

# The *raw* checksum of bytes (register 0 at the start, no inversion at the end) is their polynomial over GF(2) times x^32, modulo
# the generator of Castagnoli. Raw checksums are linear: that of a whole is the exclusive or of those of its parts, each times
# x^(8n) for the n bytes that follow the part. Zeros in front change nothing, hence only bytes at fixed places are compared. A
# checksum is a uint32 whose highest bit is the coefficient of x^0, as every library stores it.

GENERATOR = 0x82F63B78
"""x^32 + x^28 + ... + 1 without its x^32."""
ONE = 0x80000000
"""The polynomial 1."""
_X8 = ONE >> 8
_BITS = np.arange(32, dtype=np.uint32)
_LOWEST = np.uint32(1)


def product(left: int, right: int) -> int:
    """Return the product of two polynomials modulo the generator."""
    result = 0
    while left:
        if left & ONE:
            result ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (GENERATOR if right & 1 else 0)
    return result


@lru_cache(maxsize=4_096)
def bytes_power(count: int) -> int:
    """Return x^(8 * count), the factor of a raw checksum when `count` >= 0 bytes follow."""
    result, square = ONE, _X8
    while count:
        if count & 1:
            result = product(result, square)
        square = product(square, square)
        count >>= 1
    return result


@lru_cache(maxsize=4_096)
def _multiples(count: int) -> tuple[int, ...]:
    """Return x^(8 * count) times the power of x of each bit of a checksum, the lowest bit first."""
    multiple, found = bytes_power(count), []
    for _ in range(32):
        found.append(multiple)
        multiple = multiple >> 1 ^ (GENERATOR if multiple & 1 else 0)
    return tuple(reversed(found))


def followed_by(checksums: ChecksumArray, counts: npt.NDArray[np.int64]) -> ChecksumArray:
    """Return the raw checksums when so many bytes of zeros follow each; two arrays of equal length."""
    if not counts.any():
        return checksums
    distinct, which = np.unique(counts, return_inverse=True)
    multiples = np.array([_multiples(count) for count in distinct.tolist()], dtype=np.uint32)
    bits = checksums[:, np.newaxis] >> _BITS & _LOWEST
    # A product is the sum of the multiples at which there is a bit; the sum of polynomials is the exclusive or.
    products: ChecksumArray = np.bitwise_xor.reduce(bits * multiples[which], axis=1)
    return products
