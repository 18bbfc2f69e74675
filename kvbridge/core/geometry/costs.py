"""The cost of a request on a decode node, in bytes and in pages, and the number of requests that fit.

Everything is reserved at admission, so this is the cost of a request's whole life. Sparse decode adds one slot of the hot buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.hot_buffer import SparseBytes, SparseSettings, sparse_component, sparse_request_bytes
from kvbridge.core.geometry.manifest import lane_interval
from kvbridge.core.geometry.pages import NO_HOST, pages_needed
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive


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
    """Pages of each index space."""
    device: dict[ComponentKind, NonNegative]
    """Bytes of its pages on the device of the rank, by component."""
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
    """The number of requests of one kind that fit, and the limit that keeps one more out."""

    requests: NonNegative
    limit: str
    """A key of the limits; empty when nothing limits."""


def request_cost(plan: DecodePlan, *, prompt_tokens: int, max_new_tokens: int) -> RequestCost:
    """Return what a request costs. Raises InvalidInputError for token counts or settings that cannot be."""
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
    """Return what one slot of the rank's hot buffer takes. Raises InvalidInputError when there is none."""
    if plan.sparse is None:
        raise InvalidInputError("no hot buffer is configured (sparse)")
    component = sparse_component(plan.geometry, plan.host)
    return sparse_request_bytes(plan.sparse, component, plan.layer_count(component.layers))


def fit_memory(plan: DecodePlan, cost: RequestCost, *, device_bytes: int, host_bytes: int) -> Fit:
    """Return how many such requests fit into memory that is not divided yet, on the rank's device and on its host.

    Each is charged its slot of the hot buffer, so the answer is also how large the buffer would have to be; `max_requests` does
    not count.
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
    if not counts:
        return Fit(requests=0, limit="")
    scarcest = min(counts, key=lambda name: counts[name])
    return Fit(requests=counts[scarcest], limit=scarcest)
