"""What a host page keeps of a device page, so that the device page can be given up and filled again.

A twin of a page in `full` keeps all of it. Pages in `swa` are worth keeping as checkpoints only, that is as they are when a request
stands exactly at the page's end; a twin keeps the rows that are live then, one lane after another, each as its *pieces*.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import TWINS, IndexSpace
from kvbridge.core.plan.runs import byte_intervals, split_rows

PIECE_ALIGNMENT_BYTES = 16
"""What a GPU copies at once: pieces begin and end at multiples of it, which may take bytes of dead rows along."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a device page that a twin keeps, and where in the twin's page they lie."""

    offset_bytes: int
    twin_offset_bytes: int
    length_bytes: int


def twin_space(space: IndexSpace) -> IndexSpace:
    """Return the space of the twins of pages in `space`. Raises InvalidInputError when such pages have none."""
    if space not in TWINS:
        raise InvalidInputError(f"pages of '{space}' have no twins on the host; those of {', '.join(TWINS)} have")
    return TWINS[space]


def twin_components(
    geometry: ModelGeometry, on_host: Collection[ComponentKind], *, checkpoints: bool
) -> tuple[Component, ...]:
    """Return the components that have twins: those with device pages in `full`, and with `checkpoints` those in `swa` too.

    Components `on_host` live in the host pool and need none; nor do windows and states of which nothing is live at a page's end.
    """
    spaces = set(TWINS) if checkpoints else {IndexSpace.FULL}
    return tuple(
        component
        for component in geometry.components
        if component.space in spaces
        and component.kind not in on_host
        and twin_page_bytes(geometry, component, component.lanes)
    )


def twin_page_bytes(geometry: ModelGeometry, component: Component, lanes: int) -> int:
    """Return the bytes of a twin's page of one layer that holds so many lanes of a component; 0 when nothing is worth keeping."""
    kept = _kept(geometry, component)
    if kept is None:
        return component.page_bytes(lanes)
    unpadded = lanes * sum(length for _, length in kept)
    return -(-unpadded // component.page_alignment_bytes) * component.page_alignment_bytes


def twin_pieces(
    geometry: ModelGeometry, component: Component, device_lanes: tuple[int, int], twin_lanes: tuple[int, int]
) -> tuple[Piece, ...]:
    """Return what a twin's page keeps of a device page, where the two hold these lanes [start, stop) of a component.

    Only the device's lanes are named: other ranks hold the others. Raises InvalidInputError when the twin does not hold them.
    """
    (start, stop), (first, last) = device_lanes, twin_lanes
    if not first <= start < stop <= last:
        raise InvalidInputError(
            f"{component.kind}: a twin that holds the lanes [{first}, {last}) cannot keep a device page of [{start}, {stop})"
        )
    kept = _kept(geometry, component)
    if kept is None:
        whole = (start, stop) == (first, last)
        length = component.page_bytes(stop - start) if whole else (stop - start) * component.lane_block_bytes
        return (Piece(0, (start - first) * component.lane_block_bytes, length),)
    lane_bytes, pieces = sum(length for _, length in kept), []
    for lane in range(start, stop):
        twin_offset = (lane - first) * lane_bytes
        for offset, length in kept:
            pieces.append(Piece((lane - start) * component.lane_block_bytes + offset, twin_offset, length))
            twin_offset += length
    return tuple(pieces)


def _kept(geometry: ModelGeometry, component: Component) -> list[tuple[int, int]] | None:
    """Which (offset, length) of a lane block are kept, in ascending order; None for all of the page with its padding."""
    page = geometry.tokens_per_page
    regular = component.liveness is Liveness.WINDOW or (
        component.liveness is Liveness.TAIL and page % component.block == 0
    )
    if component.space is not IndexSpace.SWA or not regular or len(window_pages(geometry, 2 * page)) > 1:
        return None
    rows = component.live_rows(2 * page)
    if not rows.count:
        return []
    partial = split_rows(component, rows).partial
    if not partial:
        return None
    limit, kept = component.lane_block_bytes, list[tuple[int, int]]()
    for offset, length in byte_intervals(component, 1, partial[0].slots):
        start = offset // PIECE_ALIGNMENT_BYTES * PIECE_ALIGNMENT_BYTES
        stop = min(limit, -(-(offset + length) // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES)
        if kept and start <= sum(kept[-1]):
            start = kept.pop()[0]
        kept.append((start, stop - start))
    return None if kept == [(0, limit)] else kept
