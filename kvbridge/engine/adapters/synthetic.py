"""An engine that computes nothing: rows whose bytes say where they belong.

Owns: the function from (room, component, layer, lane, row, byte) to a byte, filling pages with it and checking them.
Must not know: what real rows mean, how bytes travelled.

The oracle for replays, benchmarks and fault tests: a byte that is missing, moved, stale or of another room differs from
what belongs there. Bytes come in words of eight: a word is a mixed key of the row xored with one of the word's place in
the row, mixed once more, so that a block of rows costs a few passes over memory and no hashing of single bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.geometry.components import Component, ComponentKind
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine.rows import place_rows, section_rows
from kvbridge.engine.views import PoolViews, RegionView

BLOCK_BYTES = 256 * 1024
"""Rows are made and compared in blocks of about this size, which stay in a core's cache."""
_WORD_BYTES = 8
_KIND_NUMBERS = {kind: number for number, kind in enumerate(ComponentKind, start=1)}

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first wrong byte of one row of one lane, and where it lies."""

    component: ComponentKind
    layer: int
    lane: int
    """Global number of the lane."""
    row: int
    page_id: int
    slot: int
    first_byte: int
    """Offset in the row of this lane, its parts one after another."""
    expected: int
    found: int
    wrong_bytes: int
    """How many bytes of this row and lane are wrong."""

    def __str__(self) -> str:
        return (
            f"{self.component} layer {self.layer} lane {self.lane} row {self.row} (page {self.page_id} slot "
            f"{self.slot}): {self.wrong_bytes} wrong bytes, the first at {self.first_byte}: expected "
            f"{self.expected:#04x}, found {self.found:#04x}"
        )


def expected_rows(
    component: Component, *, room: int, layer: int, lanes: tuple[int, int], start_row: int, stop_row: int
) -> Rows:
    """Return what rows [start_row, stop_row) hold: uint8 [rows, (lanes[1] - lanes[0]) * row_bytes]."""
    count = stop_row - start_row
    words = -(-component.row_bytes // _WORD_BYTES)
    numbers = np.arange(start_row, stop_row, dtype=np.uint64)
    rows = np.empty((count, lanes[1] - lanes[0], component.row_bytes), dtype=np.uint8)
    place_keys = _mixed(np.arange(words, dtype=np.uint64))
    for position, lane in enumerate(range(*lanes)):
        row_keys = _mixed(numbers + _stream(room, component.kind, layer, lane))
        mixed = row_keys[:, None] ^ place_keys[None, :]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        little = mixed.astype("<u8", copy=False).view(np.uint8)
        rows[:, position] = little.reshape(count, words * _WORD_BYTES)[:, : component.row_bytes]
    return rows.reshape(count, -1)


def fill(views: PoolViews, *, room: int, tables: Tables, section: Section) -> int:
    """Write the rows that become final with `section`, on every layer that the views hold; return bytes written.

    A head-sharded rank fills its own lanes. Raises PageOutOfBoundsError when the tables are too short.
    """
    written = 0
    for view in _views(views, tables, section.layers):
        table = view.table(tables)
        rows = section_rows(view.component, section)
        for start, stop in _blocks(view, rows.start, rows.stop):
            block = torch.from_numpy(_expected(view, room, start, stop))
            view.write(place_rows(view.component, table, start, stop), block)
            written += block.numel()
    return written


def check(
    views: PoolViews,
    *,
    room: int,
    tables: Tables,
    tokens: int,
    prefix_tokens: int = 0,
    most_mismatches: int = 20,
) -> list[Mismatch]:
    """Compare every live row of a request of `tokens` tokens; return the first mismatches found, none when all is well.

    Growing rows of the first `prefix_tokens` tokens are not looked at. At most `most_mismatches` are returned; the
    comparison stops there.
    """
    found: list[Mismatch] = []
    for view in _views(views, tables, None):
        table = view.table(tables)
        rows = view.component.live_rows(tokens, prefix_tokens)
        for start, stop in _blocks(view, rows.start, rows.stop):
            places = place_rows(view.component, table, start, stop)
            held = view.read(places).cpu().numpy()
            wanted = _expected(view, room, start, stop)
            if np.array_equal(wanted, held):
                continue
            found += _mismatches(view, wanted, held, start, list(zip(places.page_ids, places.slots, strict=True)))
            if len(found) >= most_mismatches:
                return found[:most_mismatches]
    return found


def _views(views: PoolViews, tables: Tables, layers: Sequence[int] | None) -> Iterator[RegionView]:
    for component in views.geometry.components:
        for layer in views.layers(component.kind):
            if layers is None or layer in layers:
                yield views.home(component.kind, layer, tables=tables)


def _blocks(view: RegionView, start: int, stop: int) -> Iterator[tuple[int, int]]:
    each = max(1, BLOCK_BYTES // view.row_bytes)
    for first in range(start, stop, each):
        yield first, min(stop, first + each)


def _expected(view: RegionView, room: int, start: int, stop: int) -> Rows:
    lanes = (view.region.lane_start, view.region.lane_stop)
    return expected_rows(
        view.component, room=room, layer=view.region.layer, lanes=lanes, start_row=start, stop_row=stop
    )


def _mismatches(
    view: RegionView, wanted: Rows, held: Rows, start: int, places: list[tuple[np.int64, np.int64]]
) -> list[Mismatch]:
    shape = (len(wanted), view.region.lanes, view.component.row_bytes)
    wanted, held = wanted.reshape(shape), held.reshape(shape)
    wrong = wanted != held
    found = []
    for row, lane in np.argwhere(wrong.any(axis=2)):
        byte = int(wrong[row, lane].argmax())
        page_id, slot = places[row]
        found.append(
            Mismatch(
                component=view.region.component,
                layer=view.region.layer,
                lane=view.region.lane_start + int(lane),
                row=start + int(row),
                page_id=int(page_id),
                slot=int(slot),
                first_byte=byte,
                expected=int(wanted[row, lane, byte]),
                found=int(held[row, lane, byte]),
                wrong_bytes=int(wrong[row, lane].sum()),
            )
        )
    return found


def _stream(room: int, kind: ComponentKind, layer: int, lane: int) -> np.uint64:
    """A key for one lane of one layer of one component of one room; rows are counted on from it."""
    key = np.zeros(1, dtype=np.uint64)
    for number in (room, _KIND_NUMBERS[kind], layer, lane):
        key = _mixed(key ^ np.uint64(number))
    return np.uint64(key[0])


def _mixed(numbers: Words) -> Words:
    """Mix each number well: the finaliser of splitmix64, elementwise."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
