"""The digests of one request, or of a part of it: added up from many sides, cut into messages, compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ModelGeometry, RowInterval
from kvbridge.core.plan.crc32c import ChecksumArray
from kvbridge.core.plan.digests import MAX_PART_BYTES, DigestKey, PageDigests
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.page_array import IndexArray
from kvbridge.core.plan.planner import rows_to_send
from kvbridge.core.plan.runs import split_rows


class Mismatch(NamedTuple):
    """A page of a layer of which two sides have different digests."""

    key: DigestKey
    layer: int
    page: int
    """Logical."""
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class _Component:
    """What digests of one component there can be."""

    rows: Mapping[int, int]
    """Where each layer stands in the arrays."""
    lanes: int
    pages: range


class DigestSums:
    """Digests of all layers of some logical pages; absent ones count as 0. 4 bytes for each page of each layer."""

    def __init__(self, live: Mapping[Component, RowInterval], *, allowed: frozenset[DigestKey] | None = None) -> None:
        """`live`: the rows of each component that the digests may be about. `allowed`: the keys (None: any)."""
        self._components = {
            component.kind: _Component(
                rows={layer: row for row, layer in enumerate(component.layers)},
                lanes=component.lanes,
                pages=split_rows(component, rows).touched if rows.count else range(0),
            )
            for component, rows in live.items()
        }
        self._allowed = allowed
        self._sums: dict[DigestKey, ChecksumArray] = {}
        self._layers: dict[DigestKey, set[int]] = {}

    @classmethod
    def of_room(
        cls,
        geometry: ModelGeometry,
        *,
        prompt_tokens: int,
        prefix_tokens: int,
        allowed: frozenset[DigestKey] | None = None,
    ) -> Self:
        """Digests of all that a request needs."""
        live = {part: part.live_rows(prompt_tokens, prefix_tokens) for part in geometry.components}
        return cls(live, allowed=allowed)

    @classmethod
    def of_section(cls, geometry: ModelGeometry, section: Section) -> Self:
        """Digests of what one section adds."""
        return cls({part: rows_to_send(part, section) for part in geometry.components})

    def add(self, key: DigestKey, layer: IndexArray, page: IndexArray, values: ChecksumArray) -> None:
        """Add a contribution to the digest of each (layer, page); places may repeat. They are the caller's own."""
        sums, component = self._array(key), self._components[key.component]
        distinct, which = np.unique(layer, return_inverse=True)
        rows = np.array([component.rows[one] for one in distinct.tolist()])
        np.bitwise_xor.at(sums, (rows[which], page - component.pages.start), values)
        self._layers[key].update(distinct.tolist())

    def merge(self, entries: Iterable[PageDigests]) -> None:
        """Add what another process has found. Raises InvalidInputError, naming it, for what cannot be of this request."""
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
        """Yield all digests, as many together as one message carries."""
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

    def of_pages(self, key: DigestKey, layers: Sequence[int], pages: range) -> ChecksumArray:
        """Return the digests of some pages of these layers: of shape (layers, pages)."""
        component = self._components[key.component]
        rows = [component.rows[layer] for layer in layers]
        first = pages.start - component.pages.start
        return self._array(key)[rows, first : first + len(pages)]

    def mismatches(self, found: DigestSums, key: DigestKey, layers: Sequence[int]) -> Iterator[Mismatch]:
        """Yield where these layers of `found` differ from this, in ascending order. Both are about the same pages."""
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
