"""The memory of a request on a decode node, from its admission to its end, and the number of requests that fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import lane_interval
from kvbridge.core.geometry.pages import NO_HOST, pages_needed
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive

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
        """Return the rows of the longest request, rounded up to whole pages."""
        page = component.slots_per_page
        return max(1, -(-(self.max_tokens // component.tokens_per_row) // page)) * page

    def pages_per_request(self, component: Component) -> int:
        """Return the pages of one request slot in a layer's hot region: hot rows, then the ring."""
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
    """Return the bytes of one request slot on the device of a rank that holds `layer_count` of the component's layers."""
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
    return geometry.component(kinds[0])


# ------------------------------------------------------------------------------------------- requests


class DecodePlan(FrozenModel):
    """The part of a model that one decode rank holds, and where."""

    geometry: ModelGeometry
    host: frozenset[ComponentKind] = NO_HOST
    """Components in the node's host pool."""
    sparse: SparseSettings | None = None
    layers: frozenset[NonNegative] | None = None
    """Global ids of the rank's layers; None: all."""
    tp_size: Positive = 1

    def layer_count(self, layers: Collection[int]) -> int:
        """Return the number of a component's layers that the rank holds."""
        return len(layers) if self.layers is None else len(self.layers.intersection(layers))


class RequestCost(FrozenModel):
    """The memory of one request, from its admission to its end."""

    tokens: NonNegative
    """Prompt and all that may be generated."""
    pages: dict[IndexSpace, NonNegative]
    device: dict[ComponentKind, NonNegative]
    """Bytes of its pages on the device of the rank."""
    host: dict[ComponentKind, NonNegative]
    """Bytes of its pages in the node's host pool, all layers."""
    sparse: SparseBytes | None
    """Its slot of the rank's hot buffer."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: pages and hot buffer."""
        return sum(self.device.values()) + (self.sparse.total if self.sparse else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host pool."""
        return sum(self.host.values())


class Fit(FrozenModel):
    """The number of requests of one kind that fit."""

    requests: NonNegative
    limit: str
    """The resource that keeps one more request out; empty when nothing limits."""


def request_cost(plan: DecodePlan, *, prompt_tokens: int, max_new_tokens: int) -> RequestCost:
    """Return the cost of a request. Raises InvalidInputError for token counts or settings that cannot be."""
    geometry, tokens = plan.geometry, prompt_tokens + max_new_tokens
    pages = pages_needed(geometry, tokens=tokens, prompt_tokens=prompt_tokens, host=plan.host)
    device: dict[ComponentKind, int] = {}
    host: dict[ComponentKind, int] = {}
    for component in geometry.components:
        if component.kind in plan.host:
            host[component.kind] = pages[IndexSpace.HOST] * component.page_bytes() * len(component.layers)
            continue
        start, stop = lane_interval(component, 0, plan.tp_size)
        layers = plan.layer_count(component.layers)
        device[component.kind] = pages[component.space] * component.page_bytes(stop - start) * layers
    sparse = None if plan.sparse is None else hot_slot_bytes(plan)
    return RequestCost(tokens=tokens, pages=pages, device=device, host=host, sparse=sparse)


def hot_slot_bytes(plan: DecodePlan) -> SparseBytes:
    """Return the bytes of one slot of the rank's hot buffer. Raises InvalidInputError when there is none."""
    if plan.sparse is None:
        raise InvalidInputError("no hot buffer is configured (sparse)")
    component = sparse_component(plan.geometry, plan.host)
    return sparse_request_bytes(plan.sparse, component, plan.layer_count(component.layers))


def fit_memory(plan: DecodePlan, cost: RequestCost, *, device_bytes: int, host_bytes: int) -> Fit:
    """Return how many such requests fit into memory that is not divided yet, on the rank's device and on its host.

    Each request is charged its slot of the hot buffer. The answer is also how many slots the buffer needs; `max_requests` does not
    count.
    """
    limits = {"device memory": (device_bytes, cost.device_bytes), "host memory": (host_bytes, cost.host_bytes)}
    return _fit(plan, cost, limits)


def fit_pools(plan: DecodePlan, cost: RequestCost, *, pages: Mapping[IndexSpace, int]) -> Fit:
    """Return how many such requests fit into pools of so many pages, hot buffer included; spaces without a number set no limit."""
    limits = {
        f"pages of '{space}'": (pages[space], count) for space, count in sorted(cost.pages.items()) if space in pages
    }
    if plan.sparse is not None:
        limits["sparse.max_requests"] = (plan.sparse.max_requests, 1)
    return _fit(plan, cost, limits)


def _fit(plan: DecodePlan, cost: RequestCost, limits: Mapping[str, tuple[int, int]]) -> Fit:
    """`limits`: what there is, and what one request takes of it, by name; the first of equal ones is named."""
    if plan.sparse is not None and cost.tokens > plan.sparse.max_tokens:
        return Fit(requests=0, limit="sparse.max_tokens")
    counts = {name: there // each for name, (there, each) in limits.items() if each}
    limit = min(counts, key=lambda name: counts[name], default="")
    return Fit(requests=counts.get(limit, 0), limit=limit)
