"""Copies between device pages and their twins on the host: all layers and components of a rank at once.

A page of `full` and its twin are the same bytes; of a page of `swa` a twin has the rows that are live at a page's end
(`core.geometry.twins`). Both directions do the same with the sides exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConfigError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.tiers import twin_pieces, twin_space
from kvbridge.core.ids import TWINS, IndexSpace, PageIdArray, PageMoves
from kvbridge.kernels.places import PageMemory, PagePair
from kvbridge.pool.memory.layout import RankPart
from kvbridge.tier.copy_backends import DirectCopies, KernelCopies, PageCopies, ReferenceCopies, joined

DEFAULT_BLOCKS = 4
"""Blocks of the copy kernel, on as many multiprocessors, that copies beside compute use in either direction."""


class Direction(StrEnum):
    """Which way pages go."""

    BACKUP = "backup"
    """Copies from the device to its twins."""
    LOAD_BACK = "load_back"
    """Copies from twins to a device."""


def copy_backend(wish: CopyBackend | None, *, host: HostLayout, device: DeviceLayout) -> CopyBackend:
    """Return the backend for these layouts: the copy engines where a page is one stretch on both sides, else the kernel.

    Raises ConfigError with the reason when a wish cannot be met.
    """
    is_stretch = host is HostLayout.PAGE_FIRST and device is DeviceLayout.PAGE_FIRST
    if wish is CopyBackend.DIRECT and not is_stretch:
        raise ConfigError(
            f"tier.host.backend direct needs page_first on both sides, but tier.host.layout is {host} and pools.device_layout is "
            f"{device}: the copy engines take about a microsecond for each stretch of memory, and layer_first on either side makes "
            "a stretch of every layer of every page, tens of thousands for a prompt; set both to page_first, or the backend to null"
        )
    return wish or (CopyBackend.DIRECT if is_stretch else CopyBackend.KERNEL)


@dataclass(frozen=True, slots=True)
class CopyMeans:
    """The means by which copies are made."""

    backend: CopyBackend = CopyBackend.KERNEL
    device: int | None = None
    """CUDA ordinal of this process; None for the CPU, which copies before `copy` returns, by either backend's plan."""
    blocks: int = DEFAULT_BLOCKS
    """Blocks of the kernel, 1,024 threads each."""


Shares = Mapping[ComponentKind, tuple[int, int]]
"""(k, n) for a component whose pages this rank shares with n - 1 others of its node: it copies those at positions k, k + n, ..."""


def backup_shares(geometry: ModelGeometry, part: RankPart, stage_tp_ranks: Sequence[int]) -> Shares:
    """Return which pages a rank backs up, where ranks of its stage on this node hold the same lanes and share the twins."""
    shares = {}
    for component in geometry.components:
        mine = part.lanes(component)
        ranks = [part.rank.model_copy(update={"tp": tp}) for tp in sorted({*stage_tp_ranks, part.rank.tp})]
        alike = [rank.tp for rank in ranks if part.model_copy(update={"rank": rank}).lanes(component) == mine]
        shares[component.kind] = alike.index(part.rank.tp), len(alike)
    return shares


class TwinCopier(Closing):
    """Copies pages of one rank to their twins, or back: all layers and components of them in one launch or one batch.

    The caller orders its copies among themselves, by one stream. Used by one thread; not under graph capture.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        device_regions: Sequence[Region],
        twins: Sequence[Region],
        *,
        direction: Direction,
        means: CopyMeans | None = None,
        shares: Shares | None = None,
    ) -> None:
        """`device_regions`: the rank's; those without twins are left alone. `twins`: the node's. `shares`: which pages, else all.

        All regions are at addresses of this process and, for a GPU, on it or registered with CUDA, until `close`. Raises
        InvalidInputError when nothing of the rank has twins, UnsupportedError for what the GPU cannot copy.
        """
        means = means or CopyMeans()
        self._direction = direction
        self._lists: list[tuple[IndexSpace, int, int]] = []
        """The lists of ids that pairs name by their position: of a space, from position k on every n-th."""
        self._page_counts: dict[IndexSpace, tuple[int, int]] = {}
        """Pages of the device and of the twins."""
        matched = _matched(device_regions, twins)
        if not matched:
            raise InvalidInputError("no component of this rank has twins among the regions that were given")
        # Only the kernel tells how far it is, and only loads are waited for layer by layer.
        kernel = means.device is not None and means.backend is CopyBackend.KERNEL
        by_layer = kernel and direction is Direction.LOAD_BACK
        layers = sorted({region.layer for region, _ in matched})
        self._groups = {layer: group if by_layer else 0 for group, layer in enumerate(layers)}
        pairs: list[PagePair] = []
        for region, twin in matched:
            named = (region.space, *(shares or {}).get(region.component, (0, 1)))
            if named not in self._lists:
                self._lists.append(named)
            self._page_counts[region.space] = region.page_count, twin.page_count
            both = (region, twin) if direction is Direction.BACKUP else (twin, region)
            pairs += _pairs(geometry, *both, group=self._groups[region.layer], table=self._lists.index(named))
        self._copies = _copies(joined(pairs), means, signals=by_layer)

    def copy(self, moves: PageMoves, *, stream: int = 0) -> int:
        """Begin to copy pages, and return a ticket; the arrays may be written again at once. No destination occurs twice.

        `stream`: the handle of a stream of the GPU, not the default one with `direct`. Raises InvalidInputError for arrays of two
        lengths and for spaces without twins here, PageOutOfBoundsError for ids that do not exist; then nothing is copied.
        """
        for space, ids in moves.items():
            self._check(space, *ids)
        nothing = np.empty(0, dtype=np.int32)
        lists = []
        for space, first, step in self._lists:
            device, twins = moves.get(space, (nothing, nothing))
            if step > 1:
                device, twins = device[first::step], twins[first::step]
            lists.append((device, twins) if self._direction is Direction.BACKUP else (twins, device))
        return self._copies.copy(lists, stream=stream)

    def wait_layer(self, layer: int, ticket: int, *, stream: int = 0) -> None:
        """Have a stream wait until a copy is done with what a layer (its global id) needs; the host does not wait.

        That is when the whole copy is done, for backups and with `direct`. A layer of which nothing is copied needs nothing.
        """
        group = self._groups.get(layer)
        if group is not None:
            self._copies.wait_group(group, ticket, stream=stream)

    def wait(self, ticket: int, *, stream: int = 0) -> None:
        """Have a stream wait until a copy is done; the host does not wait."""
        self._copies.wait(ticket, stream=stream)

    def done(self, ticket: int) -> bool:
        """Return whether a copy is done; never waits. Raises TransportError when the GPU has failed."""
        return self._copies.done(ticket)

    def close(self) -> None:
        """Wait for the copies that were begun, and give back what they needed. Harmless when closed."""
        self._copies.close()

    def _check(self, space: IndexSpace, device: PageIdArray, twins: PageIdArray) -> None:
        if space not in self._page_counts:
            raise InvalidInputError(
                f"pages of space '{space}' have no twins here, only those of {sorted(self._page_counts)}"
            )
        if len(device) != len(twins):
            raise InvalidInputError(f"{len(device)} pages of '{space}' cannot have {len(twins)} twins")
        for ids, count, what in zip((device, twins), self._page_counts[space], (space, TWINS[space]), strict=True):
            if ids.dtype != np.int32:
                raise InvalidInputError(f"page ids are int32, got {ids.dtype} for '{what}'")
            if len(ids) and np.maximum.reduce(ids.view(np.uint32)) >= count:  # negative ones are larger still
                raise PageOutOfBoundsError(
                    f"pages {ids.min()} to {ids.max()} of '{what}' do not all exist among {count}"
                )


# ------------------------------------------------------------------------------------------- inside


def _matched(device_regions: Sequence[Region], twins: Sequence[Region]) -> list[tuple[Region, Region]]:
    """The regions of a device that have twins, each with it."""
    homes = {(region.component, region.layer, region.space): region for region in twins}
    found = []
    for region in device_regions:
        if region.space in TWINS:
            twin = homes.get((region.component, region.layer, twin_space(region.space)))
            found += [] if twin is None else [(region, twin)]
    return found


def _pairs(geometry: ModelGeometry, source: Region, destination: Region, *, group: int, table: int) -> list[PagePair]:
    """The parts of each page that are copied between a device region and its twin, whichever of the two is the source."""
    backup = source.space in TWINS
    region, twin = (source, destination) if backup else (destination, source)
    component = geometry.component(region.component)
    lanes = [(each.lane_start, each.lane_stop) for each in (region, twin)]
    found = []
    for piece in twin_pieces(geometry, component, *lanes):
        device = PageMemory.of(_shifted(region, piece.offset_bytes))
        host = PageMemory.of(_shifted(twin, piece.twin_offset_bytes))
        both = (device, host) if backup else (host, device)
        found.append(PagePair(*both, piece.length_bytes, group, table))
    return found


def _shifted(region: Region, offset_bytes: int) -> Region:
    addresses = tuple(address + offset_bytes for address in region.extent_addresses)
    return region.model_copy(update={"extent_addresses": addresses})


def _copies(pairs: Sequence[PagePair], means: CopyMeans, *, signals: bool) -> PageCopies:
    if means.device is None:
        return ReferenceCopies(pairs)
    if means.backend is CopyBackend.DIRECT:
        return DirectCopies(means.device, pairs)
    return KernelCopies(means.device, pairs, blocks=means.blocks, signals=signals)
