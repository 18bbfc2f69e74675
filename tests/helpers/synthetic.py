"""An engine that computes nothing: rows whose bytes say where they belong, so that a missing, moved, stale or foreign byte is seen.

Bytes come in words of eight: a mixed key of the row xored with one of the word's place in the row, mixed once more. The *seed* says
whose rows they are: the room, or with page keys what a model would give them:

- growing rows of a page that has a key: the first eight bytes of the key;
- growing rows behind the last key: the room, since nobody shares them;
- windows and states: the key of the prompt's last page when the prompt ends with it, as a checkpoint does, else the room.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, RowInterval
from kvbridge.core.ids import PageTable, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine.views import PoolViews, RegionView, RowPlaces, place_rows, section_rows
from kvbridge.tier.keys import KEY_BYTES, NO_KEYS, Keys

BLOCK_BYTES = 256 * 1024
"""Rows are made and compared in blocks of about this size, which stay in a core's cache."""
MOST_NAMED = 20
"""Wrong rows that one comparison names; all wrong bytes are counted."""
_WORD_BYTES = 8
_WORD_MASK = (1 << 64) - 1
_KIND_NUMBERS = {kind: number for number, kind in enumerate(ComponentKind, start=1)}

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Mismatch:
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.component} layer {self.layer} lane {self.lane} row {self.row} (page {self.page_id} slot "
            f"{self.slot}): {self.wrong_bytes} wrong bytes, the first at {self.first_byte}: expected "
            f"{self.expected:#04x}, found {self.found:#04x}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    checked_bytes: int
    wrong_bytes: int
    mismatches: tuple[Mismatch, ...]


def expected_rows(
    component: Component, *, room: int, layer: int, lanes: tuple[int, int], start_row: int, stop_row: int
) -> Rows:
    """Return what rows [start_row, stop_row) of a room without keys hold: uint8 [rows, (lanes[1] - lanes[0]) * row_bytes]."""
    return _rows(component, layer, lanes, np.arange(start_row, stop_row, dtype=np.uint64), room)


def fill(views: PoolViews, *, room: int, tables: Tables, section: Section, keys: Keys = NO_KEYS) -> int:
    """Write the rows that become final with `section`, on every layer that the views hold; return bytes written.

    `keys`: of the whole pages of the prompt (of its answer, too, where rows behind the prompt are written). A head-sharded rank
    fills its own lanes. Raises PageOutOfBoundsError when the tables are too short.
    """
    written = 0
    seeds = _Seeds(room, keys, section.prompt_tokens, views.geometry.tokens_per_page)
    for view in _views(views, tables, section.layers):
        table = view.table(tables)
        rows = section_rows(view.component, section)
        for start, stop in _blocks(view, rows.start, rows.stop):
            block = torch.from_numpy(_expected(view, seeds, start, stop))
            view.write(place_rows(view.component, table, start, stop), block)
            written += block.numel()
    return written


def compare(
    views: PoolViews, *, room: int, tables: Tables, tokens: int, prefix_tokens: int = 0, keys: Keys = NO_KEYS
) -> Comparison:
    """Compare every live row of a request but growing ones of its prefix; the first wrong rows are named."""
    checked = wrong = 0
    named: list[Mismatch] = []
    seeds = _Seeds(room, keys, tokens, views.geometry.tokens_per_page)
    for view in _views(views, tables, None):
        for block in _compared(view, view.table(tables), seeds, view.component.live_rows(tokens, prefix_tokens)):
            checked += block.held.size
            if not np.array_equal(block.wanted, block.held):
                wrong += int((block.wanted != block.held).sum())
                named += block.mismatches(MOST_NAMED - len(named))
    return Comparison(checked, wrong, tuple(named))


class _Seeds:
    def __init__(self, room: int, keys: Keys, tokens: int, tokens_per_page: int) -> None:
        self._room = room
        self._pages = np.frombuffer(keys.data, "<u8")[:: KEY_BYTES // _WORD_BYTES]
        pages, rest = divmod(tokens, tokens_per_page)
        self._whole = int(self._pages[pages - 1]) if 0 < pages <= len(keys) and not rest else room

    def of_rows(self, component: Component, start_row: int, stop_row: int) -> int | Words:
        """Return one seed for all of these rows, or one for each."""
        if component.liveness is not Liveness.GROWING:
            return self._whole
        first, last = start_row // component.rows_per_logical_page, (stop_row - 1) // component.rows_per_logical_page
        if first >= len(self._pages):
            return self._room
        if first == last:
            return int(self._pages[first])
        pages = np.arange(start_row, stop_row) // component.rows_per_logical_page - first
        seeds = np.full(last + 1 - first, self._room, dtype=np.uint64)
        known = self._pages[first : last + 1]
        seeds[: len(known)] = known
        return seeds[pages]


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows of one layer, as they are and as they should be: both uint8 [rows, lanes * row_bytes]."""

    view: RegionView
    start_row: int
    places: RowPlaces
    wanted: Rows
    held: Rows

    def mismatches(self, most: int) -> list[Mismatch]:
        component, region = self.view.component, self.view.region
        shape = (len(self.wanted), region.lanes, component.row_bytes)
        wanted, held = self.wanted.reshape(shape), self.held.reshape(shape)
        wrong = wanted != held
        found = []
        for row, lane in np.argwhere(wrong.any(axis=2))[:most]:
            byte = int(wrong[row, lane].argmax())
            found.append(
                Mismatch(
                    component=region.component,
                    layer=region.layer,
                    lane=region.lane_start + int(lane),
                    row=self.start_row + int(row),
                    page_id=int(self.places.page_ids[row]),
                    slot=int(self.places.slots[row]),
                    first_byte=byte,
                    expected=int(wanted[row, lane, byte]),
                    found=int(held[row, lane, byte]),
                    wrong_bytes=int(wrong[row, lane].sum()),
                )
            )
        return found


def _compared(view: RegionView, table: PageTable, seeds: _Seeds, rows: RowInterval) -> Iterator[_Block]:
    for start, stop in _blocks(view, rows.start, rows.stop):
        places = place_rows(view.component, table, start, stop)
        held = view.read(places).cpu().numpy()
        yield _Block(view, start, places, _expected(view, seeds, start, stop), held)


def _views(views: PoolViews, tables: Tables, layers: Sequence[int] | None) -> Iterator[RegionView]:
    for component in views.geometry.components:
        for layer in views.layers(component.kind):
            if layers is None or layer in layers:
                yield views.home(component.kind, layer, tables=tables)


def _blocks(view: RegionView, start: int, stop: int) -> Iterator[tuple[int, int]]:
    each = max(1, BLOCK_BYTES // view.row_bytes)
    for first in range(start, stop, each):
        yield first, min(stop, first + each)


def _expected(view: RegionView, seeds: _Seeds, start: int, stop: int) -> Rows:
    lanes = (view.region.lane_start, view.region.lane_stop)
    numbers = np.arange(start, stop, dtype=np.uint64)
    return _rows(view.component, view.region.layer, lanes, numbers, seeds.of_rows(view.component, start, stop))


def _rows(component: Component, layer: int, lanes: tuple[int, int], numbers: Words, seeds: int | Words) -> Rows:
    """Return the bytes of the rows of these numbers: uint8 [rows, (lanes[1] - lanes[0]) * row_bytes]."""
    words = -(-component.row_bytes // _WORD_BYTES)
    rows = np.empty((len(numbers), lanes[1] - lanes[0], component.row_bytes), dtype=np.uint8)
    place_keys = _place_keys(words)
    for position, lane in enumerate(range(*lanes)):
        row_keys = _mixed(numbers + _stream(seeds, _lane_place(component.kind, layer, lane)))
        mixed = row_keys[:, None] ^ place_keys[None, :]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        little = mixed.astype("<u8", copy=False).view(np.uint8)
        rows[:, position] = little.reshape(len(numbers), words * _WORD_BYTES)[:, : component.row_bytes]
    return rows.reshape(len(numbers), -1)


@cache
def _place_keys(words: int) -> Words:
    """A key for each word of a row; not written after that."""
    return _mixed(np.arange(words, dtype=np.uint64))


def _stream(seeds: int | Words, place: int) -> np.uint64 | Words:
    if isinstance(seeds, int):
        return np.uint64(_mixed_number(seeds ^ place))
    return _mixed(seeds ^ np.uint64(place))


@cache
def _lane_place(kind: ComponentKind, layer: int, lane: int) -> int:
    key = 0
    for number in (_KIND_NUMBERS[kind], layer, lane):
        key = _mixed_number(key ^ number)
    return key


def _mixed(numbers: Words) -> Words:
    """Mix each number well: the finaliser of splitmix64, elementwise."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _mixed_number(number: int) -> int:
    mixed = (number + 0x9E3779B97F4A7C15) & _WORD_MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return mixed ^ (mixed >> 31)
