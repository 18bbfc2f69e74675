"""The pools of one instance on one node, in shared memory: views for the oracle, and paint that shows every stray byte.

Owns: the pools, their colour, the rows and paddings of a request that may differ from it. Must not know: transports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvbridge.config.pools import HostLayout
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.wire.messages import WorkerSetup
from kvbridge.engine.rows import place_rows
from kvbridge.engine.views import PoolViews, RegionView
from kvbridge.pool.device_pool import DevicePool
from kvbridge.pool.host_pool import HostPool
from kvbridge.pool.layout import Chunking, RankPart, device_placement, host_placement
from kvbridge.pool.mapped_pool import MappedPool

SCAN_WORDS = 1 << 17
NO_KINDS: frozenset[ComponentKind] = frozenset()
UNCUT = Chunking()


@dataclass(frozen=True)
class Ranks:
    """How an instance is split."""

    pp: int = 1
    tp: int = 1
    boundaries: tuple[int, ...] = ()
    """First layers of the stages but the first."""

    def __str__(self) -> str:
        return f"pp{self.pp}tp{self.tp}"

    @property
    def all(self) -> list[Rank]:
        return [Rank(pp=pp, tp=tp) for pp in range(self.pp) for tp in range(self.tp)]


@dataclass(frozen=True)
class Form:
    """What memory the node has, and how it lies."""

    pages: Mapping[IndexSpace, int]
    host: frozenset[ComponentKind] = NO_KINDS
    layout: HostLayout = HostLayout.LAYER_FIRST
    chunking: Chunking = UNCUT
    """Of the device pools."""
    host_chunking: Chunking = UNCUT


class NodePools:
    """All pools of a node; every byte has `colour` until somebody writes. A context manager."""

    def __init__(self, geometry: ModelGeometry, ranks: Ranks, form: Form, *, directory: Path, colour: int) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.form = form
        self._colour = colour
        self._parts = [
            RankPart.of(geometry, rank, pp_size=ranks.pp, tp_size=ranks.tp, boundaries=ranks.boundaries or None)
            for rank in ranks.all
        ]
        name = f"{directory.name}-{colour:x}"
        self._device = [
            DevicePool.create(
                device_placement(geometry, part, page_counts=form.pages, exclude=form.host, chunking=form.chunking),
                directory,
                name,
            )
            for part in self._parts
        ]
        self._host = (
            HostPool.create(
                host_placement(
                    geometry,
                    form.host,
                    page_count=form.pages[IndexSpace.HOST],
                    layout=form.layout,
                    chunking=form.host_chunking,
                ),
                directory,
                name,
            )
            if form.host
            else None
        )
        self.pools: list[MappedPool] = [*self._device, *([self._host] if self._host else [])]
        self.views = [PoolViews(geometry, pool.regions()) for pool in self.pools]
        """Of each rank's device pool, and of the host pool at the end."""
        if colour:  # new pools are zero
            self.paint()

    def close(self) -> None:
        self.views.clear()
        for pool in self.pools:
            pool.close()

    def layers(self, rank: Rank) -> tuple[int, ...]:
        return self._parts[self.ranks.all.index(rank)].layers

    def setups(self, transports: str, transfer_timeout_s: float) -> list[WorkerSetup]:
        """What the node would tell the worker of each rank."""
        return [
            WorkerSetup(
                geometry=self.geometry,
                rank=part.rank,
                pp_size=part.pp_size,
                tp_size=part.tp_size,
                layers=part.layers,
                device=pool.shared_regions(),
                host=self._host.shared_regions() if self._host else (),
                transports=transports,
                transfer_timeout_s=transfer_timeout_s,
            )
            for part, pool in zip(self._parts, self._device, strict=True)
        ]

    # ------------------------------------------------------------------ paint

    def paint(self) -> None:
        """Give every byte the colour."""
        for pool in self.pools:
            for mapping in pool.mappings:
                np.frombuffer(mapping.buffer, dtype=np.uint8)[:] = self._colour

    def paint_request(self, tables: Tables, *, tokens: int, prefix_tokens: int) -> None:
        """Give their colour back to the live rows of a request and to the paddings of its complete pages."""
        for views in self.views:
            for component in self.geometry.components:
                for layer in views.layers(component.kind):
                    self._paint_rows(views.home(component.kind, layer, tables=tables), tables, tokens, prefix_tokens)

    def _paint_rows(self, view: RegionView, tables: Tables, tokens: int, prefix_tokens: int) -> None:
        component, table = view.component, view.table(tables)
        rows = component.live_rows(tokens, prefix_tokens)
        if not rows.count:
            return
        colour = torch.full((rows.count, view.row_bytes), self._colour, dtype=torch.uint8)
        view.write(place_rows(component, table, rows.start, rows.stop), colour)
        padding = view.region.lanes * component.lane_block_bytes
        if padding < view.region.page_bytes:
            for page_id in complete_pages(component, table, rows.start, rows.stop):
                view.page(page_id)[padding:] = self._colour

    def stray(self) -> str | None:
        """Return where the first byte lies that does not have the colour, in words, or None."""
        word = np.uint64(int.from_bytes(bytes([self._colour]) * 8, "little"))
        for pool in self.pools:
            for mapping in pool.mappings:
                words = np.frombuffer(mapping.buffer, dtype=np.uint64)
                for start in range(0, len(words), SCAN_WORDS):
                    wrong = words[start : start + SCAN_WORDS] != word
                    if wrong.any():
                        address = mapping.address + 8 * (start + int(wrong.argmax()))
                        return _owner(pool, address)
        return None


def complete_pages(component: Component, table: PageTable, start_row: int, stop_row: int) -> list[int]:
    """Ids of the pages of which every row is in [start_row, stop_row); rings never are."""
    if component.liveness is not Liveness.GROWING:
        return []
    slots = component.slots_per_page
    return table.ids[-(-start_row // slots) : stop_row // slots].tolist()


def _owner(pool: MappedPool, address: int) -> str:
    for region in pool.regions():
        for extent, base in enumerate(region.extent_addresses):
            page, offset = divmod(address - base, region.page_stride_bytes)
            if 0 <= page < region.pages_per_extent and offset < region.page_bytes:
                number = extent * region.pages_per_extent + page
                return f"{region.label}, page {number} of '{region.space}', within 8 bytes of byte {offset} of {pool!r}"
    return f"{address:#x}, which belongs to no region of {pool!r}"
