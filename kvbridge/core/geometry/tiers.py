"""Prefixes that outlast a request: the places where prefill can continue one, and the bytes that a host copy keeps.

Rows of growing components never change. Windows and states do: they exist for a page's end only if an engine stood exactly there
and wrote them. Such a *checkpoint* is the pages of `swa` that hold live rows at that end.

A host copy of a page in `full` keeps the whole page. A host copy of a page in `swa` is a part of a checkpoint: it keeps the rows
that are live at the page's end, one lane after another, each as its *pieces*.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import HOST_COPIES, IndexSpace
from kvbridge.core.plan.operations import byte_intervals, split_rows

PIECE_ALIGNMENT_BYTES = 16
"""Bytes that a GPU copies at once: pieces begin and end at multiples of it, which may take bytes of dead rows along."""


class CheckpointCause(StrEnum):
    """The reason to write windows and states at a page's end; the first that holds."""

    PROMPT_END = "prompt_end"
    DIVERGENCE = "divergence"
    """The prompt leaves a known prefix there."""
    INTERVAL = "interval"


def why_no_prefixes(geometry: ModelGeometry) -> str:
    """Return why a prefill engine can never go on with a prefix of this model; empty when it can."""
    kinds = ", ".join(component.kind for component in _live_at_page_ends(geometry, IndexSpace.REQUEST))
    if not kinds:
        return ""
    return (
        f"model '{geometry.name}' has state in its request slot at a page's end ({kinds}), and no page can keep this state: a "
        "prefill engine cannot go on with a prefix"
    )


def needs_checkpoints(geometry: ModelGeometry) -> bool:
    """Return whether an engine can continue a prefix only at a checkpoint; otherwise it can at every page's end."""
    return bool(_live_at_page_ends(geometry, IndexSpace.SWA))


def _live_at_page_ends(geometry: ModelGeometry, space: IndexSpace) -> list[Component]:
    """Return the components of a space that have live rows at every page's end, and can change after it."""
    page = geometry.tokens_per_page
    return [
        component
        for component in geometry.components
        if component.space is space
        and component.liveness is not Liveness.GROWING
        and (component.liveness is not Liveness.TAIL or component.overlap or page % component.block)
    ]


def most_reusable_tokens(geometry: ModelGeometry, prompt_tokens: int) -> int:
    """Return the longest prefix of a prompt that an engine may go on with: whole pages, and less than the prompt."""
    return max(0, prompt_tokens - 1) // geometry.tokens_per_page * geometry.tokens_per_page


def wanted_checkpoints(
    geometry: ModelGeometry, prompt_tokens: int, *, computed_tokens: int, known_tokens: int, interval_tokens: int = 0
) -> dict[int, CheckpointCause]:
    """Return the page ends of a prompt, in tokens, ascending, at which a checkpoint is worth its pages, and why.

    They are the last page end, where the next turn goes on; the end of the known prefix (`known_tokens`), where other prompts may
    leave the prefix too; and every `interval_tokens` (0: none), rounded down to whole pages. Only ends behind `computed_tokens`
    count, since the engine passes no others.
    """
    if not needs_checkpoints(geometry):
        return {}
    page = geometry.tokens_per_page
    last = prompt_tokens // page * page
    regular = range(interval_tokens, last, interval_tokens) if interval_tokens else ()
    causes = {end // page * page: CheckpointCause.INTERVAL for end in regular}
    causes |= {min(known_tokens, last) // page * page: CheckpointCause.DIVERGENCE, last: CheckpointCause.PROMPT_END}
    return {
        end: cause
        for end, cause in sorted(causes.items())
        if end > computed_tokens and len(window_pages(geometry, end))
    }


# ------------------------------------------------------------------------------------------- host copies


class Piece(NamedTuple):
    """Bytes of a device page that a host copy keeps, and their place in the copy's page."""

    offset_bytes: int
    copy_offset_bytes: int
    length_bytes: int


def copy_space(space: IndexSpace) -> IndexSpace:
    """Return the space of the host copies of pages in `space`. Raises InvalidInputError when such pages have none."""
    if space not in HOST_COPIES:
        raise InvalidInputError(
            f"pages of '{space}' have no copies on the host; those of {', '.join(HOST_COPIES)} have"
        )
    return HOST_COPIES[space]


def copied_components(
    geometry: ModelGeometry, on_host: Collection[ComponentKind], *, checkpoints: bool
) -> tuple[Component, ...]:
    """Return the components with host copies, of `full` and, with `checkpoints`, of `swa`. Components `on_host` need none."""
    spaces = set(HOST_COPIES) if checkpoints else {IndexSpace.FULL}
    found = (one for one in geometry.components if one.space in spaces and one.kind not in on_host)
    return tuple(component for component in found if copy_page_bytes(geometry, component, component.lanes))


def copy_page_bytes(geometry: ModelGeometry, component: Component, lanes: int) -> int:
    """Return the bytes of a host copy's page of one layer with so many lanes of a component; 0 when nothing is worth keeping."""
    kept = _kept(geometry, component)
    if kept is None:
        return component.page_bytes(lanes)
    unpadded = lanes * sum(length for _, length in kept)
    return -(-unpadded // component.page_alignment_bytes) * component.page_alignment_bytes


def copy_pieces(
    geometry: ModelGeometry, component: Component, device_lanes: tuple[int, int], copy_lanes: tuple[int, int]
) -> tuple[Piece, ...]:
    """Return the pieces of a device page that its host copy keeps, for lanes [start, stop) of each. Raises InvalidInputError."""
    (start, stop), (first, last) = device_lanes, copy_lanes
    if not first <= start < stop <= last:
        raise InvalidInputError(
            f"{component.kind}: a host copy that holds the lanes [{first}, {last}) cannot keep a device page of [{start}, {stop})"
        )
    kept = _kept(geometry, component)
    if kept is None:
        whole = (start, stop) == (first, last)
        length = component.page_bytes(stop - start) if whole else (stop - start) * component.lane_block_bytes
        return (Piece(0, (start - first) * component.lane_block_bytes, length),)
    lane_bytes, pieces = sum(length for _, length in kept), []
    for lane in range(start, stop):
        copy_offset = (lane - first) * lane_bytes
        for offset, length in kept:
            pieces.append(Piece((lane - start) * component.lane_block_bytes + offset, copy_offset, length))
            copy_offset += length
    return tuple(pieces)


def _kept(geometry: ModelGeometry, component: Component) -> list[tuple[int, int]] | None:
    """Return the (offset, length) of a lane block that are kept, ascending; None for the whole page with its padding."""
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
    for offset, length in byte_intervals(component, 1, next(iter(partial.values()))):
        start = offset // PIECE_ALIGNMENT_BYTES * PIECE_ALIGNMENT_BYTES
        stop = min(limit, -(-(offset + length) // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES)
        if kept and start <= sum(kept[-1]):
            start = kept.pop()[0]
        kept.append((start, stop - start))
    return None if kept == [(0, limit)] else kept
