"""Where a prefill engine can go on with a prefix, and what has to be kept of windows and states for that.

Rows of growing components stay as they are. Windows and states do not: those at a page's end are there only if an engine stood
exactly at that end and wrote them down. Such a *checkpoint* is the pages of `swa` that hold live rows there.
"""

from __future__ import annotations

from enum import StrEnum

from kvbridge.core.geometry.components import Component, Liveness, ModelGeometry
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import IndexSpace


class CheckpointCause(StrEnum):
    """Why windows and states are wanted at a page's end; the first that holds."""

    PROMPT_END = "prompt_end"
    DIVERGENCE = "divergence"
    """The prompt leaves a known prefix there."""
    INTERVAL = "interval"


def why_no_prefixes(geometry: ModelGeometry) -> str:
    """Return why a prefill engine can never go on with a prefix of this model; empty when it can."""
    lasting = [
        component
        for component in geometry.components
        if component.space is IndexSpace.REQUEST and _is_live_at_page_ends(component, geometry.tokens_per_page)
    ]
    if not lasting:
        return ""
    kinds = ", ".join(component.kind for component in lasting)
    return (
        f"model '{geometry.name}' has state in its request slot that is not empty at a page's end ({kinds}), and no page can keep "
        "it: a prefill engine cannot go on with a prefix"
    )


def needs_checkpoints(geometry: ModelGeometry) -> bool:
    """Whether an engine can go on with a prefix only where windows and states were kept; otherwise it can at every page's end."""
    return any(
        component.space is IndexSpace.SWA and _is_live_at_page_ends(component, geometry.tokens_per_page)
        for component in geometry.components
    )


def most_reusable_tokens(geometry: ModelGeometry, prompt_tokens: int) -> int:
    """Return the longest prefix of a prompt that an engine may go on with: whole pages, and less than the prompt."""
    return max(0, prompt_tokens - 1) // geometry.tokens_per_page * geometry.tokens_per_page


def wanted_checkpoints(
    geometry: ModelGeometry, prompt_tokens: int, *, computed_tokens: int, known_tokens: int, interval_tokens: int = 0
) -> dict[int, CheckpointCause]:
    """Return at which page ends of a prompt checkpoints are worth their pages, in tokens, ascending, and why.

    At its last one, where the next turn goes on; where it leaves a prefix that is known here (`known_tokens`), since others may do
    so, too; and every `interval_tokens`, rounded down to whole pages (0: nowhere else). The engine comes by those behind
    `computed_tokens` only.
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


def _is_live_at_page_ends(component: Component, tokens_per_page: int) -> bool:
    match component.liveness:
        case Liveness.GROWING:
            return False
        case Liveness.TAIL:
            return bool(component.overlap or tokens_per_page % component.block)
        case _:
            return True
