"""From booked page ids to the tables of a request, in one place for both sides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import first_window_page
from kvbridge.core.ids import IndexSpace, PageIdArray, PageTable, Tables


def request_tables(geometry: ModelGeometry, ids: Mapping[IndexSpace, PageIdArray], *, prompt_tokens: int) -> Tables:
    """Build the tables of a request of `prompt_tokens` tokens; window tables begin at the first page of its last window."""
    return {
        space: PageTable(
            space,
            np.ascontiguousarray(pages, dtype=np.int32),
            first_window_page(geometry, prompt_tokens) if space is IndexSpace.SWA else 0,
        )
        for space, pages in ids.items()
    }


def same_tables(left: Tables, right: Tables) -> bool:
    """Whether two sets of tables name the same pages."""
    return left.keys() == right.keys() and all(
        left[space].first_page == right[space].first_page and np.array_equal(left[space].ids, right[space].ids) for space in left
    )
