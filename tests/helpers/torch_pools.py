"""Pools in this process's own memory, with permuted page ids and garbage in every page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region, lane_interval
from kvbridge.core.geometry.pages import NO_HOST, first_window_page, pages_needed
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.demo.plan import prose
from kvbridge.engine.adapters.transformers import forward
from kvbridge.engine.streams import StreamOrder
from kvbridge.engine.views import Part, PoolViews
from tests.helpers.manifests import new_region

SPARE_PAGES = 3


@dataclass
class Pools:
    """One rank's pools and one request's pages in them; the memory lives as long as this object."""

    geometry: ModelGeometry
    views: PoolViews
    tables: Tables
    regions: list[Region]
    memory: list[torch.Tensor] = field(repr=False)


@dataclass(frozen=True)
class Form:
    layers: Sequence[int] | None = None
    host: frozenset[ComponentKind] = NO_HOST
    page_first: bool = False
    extent_pages: int | None = None
    tp: tuple[int, int] = (0, 1)


def make_pools(
    geometry: ModelGeometry, *, tokens: int, prompt_tokens: int | None = None, seed: int = 0, form: Form | None = None
) -> Pools:
    form = form or Form()
    needed = pages_needed(geometry, tokens=tokens, prompt_tokens=prompt_tokens, host=form.host)
    counts = {space: count + SPARE_PAGES for space, count in needed.items()}
    generator = np.random.default_rng(seed)
    memory: list[torch.Tensor] = []
    regions: list[Region] = []
    for component in geometry.components:
        space = IndexSpace.HOST if component.kind in form.host else component.space
        layers = [layer for layer in component.layers if form.layers is None or layer in form.layers]
        if layers:
            made, held = _regions(component, layers, space, counts[space], form)
            regions += made
            memory += held
    return Pools(
        geometry=geometry,
        views=PoolViews(geometry, regions),
        tables={space: _table(geometry, space, needed, generator, prompt_tokens or tokens) for space in needed},
        regions=regions,
        memory=memory,
    )


def copy_request(geometry: ModelGeometry, source: Pools, target: Pools, *, tokens: int) -> None:
    for component in geometry.components:
        rows = component.live_rows(tokens)
        for layer in source.views.layers(component.kind):
            place = component.kind, layer, rows.start, rows.stop
            part(target.views, target.tables, *place).write(part(source.views, source.tables, *place).read())


def part(views: PoolViews, tables: Tables, kind: ComponentKind, layer: int, start: int, stop: int) -> Part:
    view = views.home(kind, layer, tables=tables)
    return Part(Rank(pp=0, tp=0), kind, layer, slice(start, stop), view, view.table(tables))


def engine_of(*stages: Pools) -> Any:
    """An engine with these pools as pipeline stages, and no node: for rooms whose parts are written and read."""
    views = {Rank(pp=number, tp=0): stage.views for number, stage in enumerate(stages)}
    return SimpleNamespace(views=views, say=lambda *_, **__: None, _order=StreamOrder({}))


def _regions(
    component: Component, layers: Sequence[int], space: IndexSpace, page_count: int, form: Form
) -> tuple[list[Region], list[torch.Tensor]]:
    lanes = lane_interval(component, *form.tp)
    page_bytes = component.page_bytes(lanes[1] - lanes[0])
    per_extent = min(form.extent_pages or page_count, page_count)
    extents = -(-page_count // per_extent)
    stride = page_bytes * len(layers) if form.page_first else page_bytes
    regions, memory = [], []
    shared = [_garbage(per_extent * stride) for _ in range(extents)] if form.page_first else []
    memory += shared
    for index, layer in enumerate(layers):
        own = shared or [_garbage(per_extent * stride) for _ in range(extents)]
        memory += own if not form.page_first else []
        offset = index * page_bytes if form.page_first else 0
        sizes = {"pages": page_count, "page_bytes": page_bytes, "per_extent": per_extent, "stride": stride}
        starts = (extent.data_ptr() + offset for extent in own)
        regions.append(new_region(component.kind, layer, starts, space=space, lanes=lanes, **sizes))
    return regions, memory


def _garbage(size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)


def _table(
    geometry: ModelGeometry,
    space: IndexSpace,
    needed: dict[IndexSpace, int],
    generator: np.random.Generator,
    prompt_tokens: int,
) -> PageTable:
    ids = generator.permutation(needed[space] + SPARE_PAGES)[: needed[space]].astype(np.int32)
    return PageTable(space, ids, first_window_page(geometry, prompt_tokens) if space is IndexSpace.SWA else 0)


def load_config() -> dict[str, Any]:
    text = resources.files("kvbridge.engine.adapters").joinpath("tiny_deepseek_v4.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def prompt_tokens(count: int, *, offset: int = 0) -> list[int]:
    return list(prose(count, offset))


def follow(model: Any, cache: Any, *, tokens: Sequence[int]) -> torch.Tensor:
    """Feed given tokens one by one, those of another run: logits [steps, vocabulary]."""
    return torch.stack([forward(model, cache, [token]) for token in tokens])
