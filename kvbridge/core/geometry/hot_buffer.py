"""The size of the device memory of sparse decode, as data."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive

MOST_HOT_ROWS = 32_704
"""Slots are numbered by 16-bit integers."""
AGE_PLANES = 4
"""Bits of a hot slot that say in which of the latest generations it was used."""
TALLIES = 4
"""Counters of a request and layer: slots in the present generation, distinct rows hit, rows loaded, blocks at work now."""


class SparseSettings(FrozenModel):
    """The device memory of sparse decode. All of it is allocated at start, by every engine rank."""

    max_requests: Positive
    """Requests that may decode at once: each takes one slot of everything below."""
    hot_rows: Annotated[int, Field(ge=32, le=MOST_HOT_ROWS)] = 4096
    """Rows of a request that a layer keeps on the device; a multiple of a page's rows, at least top_k."""
    ring_pages: Annotated[int, Field(ge=2, le=64)] = 2
    """Pages of newly written rows that are kept on the device beside the hot rows, until they are in host memory."""
    top_k: Annotated[int, Field(ge=1, le=MOST_HOT_ROWS)] = 512
    """Rows that the indexer selects in a step."""
    max_tokens: Positive = 131_072
    """Longest request, prompt and answer together; the tables of every request are made for it."""
    preload_rows: NonNegative | None = None
    """Requests of at most so many rows are loaded whole at admission; null: as many as fit into the hot rows; 0: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.hot_rows:
            raise ValueError(
                f"hot_rows is {self.hot_rows}, less than top_k {self.top_k}: the rows of one step must fit together"
            )
        if self.preload_rows is not None and self.preload_rows > self.hot_rows:
            raise ValueError(f"preload_rows is {self.preload_rows}, more than the {self.hot_rows} hot rows")
        return self

    @property
    def preload_limit_rows(self) -> int:
        """The longest request that is loaded whole at admission, in rows."""
        return self.hot_rows if self.preload_rows is None else self.preload_rows

    def max_rows(self, component: Component) -> int:
        """Rows of the longest request, rounded up to whole pages."""
        page = component.slots_per_page
        return max(1, -(-(self.max_tokens // component.tokens_per_row) // page)) * page

    def pages_per_request(self, component: Component) -> int:
        """Pages of one request slot in a layer's hot region: hot rows, then the ring."""
        return self.hot_rows // component.slots_per_page + self.ring_pages

    def check_component(self, component: Component) -> None:
        """Raise InvalidInputError, naming the key, when these settings do not suit a component."""
        if component.liveness is not Liveness.GROWING or not component.host_capable or component.lanes != 1:
            raise InvalidInputError(
                f"{component.kind} cannot be decoded sparsely: it does not grow row by row on the host"
            )
        page = component.slots_per_page
        if page % 32:
            raise InvalidInputError(f"sparse decode needs pages of a multiple of 32 rows, {component.kind} has {page}")
        if self.hot_rows % page:
            raise InvalidInputError(
                f"hot_rows (sparse.hot_rows) is {self.hot_rows}, which is not a multiple of the {page} rows of a page"
            )


class SparseBytes(FrozenModel):
    """Bytes of device memory by part. Tables are 16- and 32-bit integers; see `kernels/swap_in.py`."""

    hot_rows: NonNegative
    """Pages of the hot slots."""
    ring: NonNegative
    """Pages of newly written rows."""
    residency: NonNegative
    """The row of each slot, and the slot of each row."""
    ages: NonNegative
    """The time of each slot's last use, and counters."""
    page_tables: NonNegative
    """Host pages of each request."""
    steps: NonNegative
    """Inputs and outputs of a step."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.model_dump().values())


def sparse_request_bytes(settings: SparseSettings, component: Component, layer_count: int) -> SparseBytes:
    """Return what one request slot takes on the device of a rank that holds `layer_count` of the component's layers."""
    settings.check_component(component)
    page_bytes, rows_per_page = component.page_bytes(), component.slots_per_page
    max_rows = settings.max_rows(component)
    return SparseBytes(
        hot_rows=layer_count * settings.hot_rows // rows_per_page * page_bytes,
        ring=layer_count * settings.ring_pages * page_bytes,
        residency=layer_count * (2 * max_rows + 4 * settings.hot_rows),
        ages=layer_count * (4 * AGE_PLANES * settings.hot_rows // 32 + 4 * TALLIES),
        page_tables=8 * (max_rows // rows_per_page) + 4,
        steps=3 * 4 + 4 * settings.top_k,
    )


def sparse_component(geometry: ModelGeometry, host: frozenset[ComponentKind]) -> Component:
    """Return the component that is decoded sparsely: the one in the host pool. Raises InvalidInputError unless there is one."""
    kinds = sorted(host)
    if len(kinds) != 1:
        raise InvalidInputError(
            f"sparse decode needs exactly one component in the host pool (pools.host.components), got {kinds or 'none'}"
        )
    return geometry.component(ComponentKind(kinds[0]))
