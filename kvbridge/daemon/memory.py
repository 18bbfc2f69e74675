"""The memory of a node: which pools it has, created and shared."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvbridge.config.pools import DecodePools, DeviceLayout, HostLayout, HostPool, MemoryOwner, RankPlacement
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.tier import HostTier
from kvbridge.core.errors import ConfigError, DeadlineError, InvalidInputError, UnavailableError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.costs import sparse_component
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.tiers import copied_components, needs_checkpoints
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import DeviceAllocationRequest, SharedRegion
from kvbridge.daemon.kept_journal import KeptHeader
from kvbridge.daemon.kept_pools import KeptPools, Restored
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, copy_placement, device_placement, host_placement
from kvbridge.pool.memory.leftovers import POOL_PREFIX, ForeignFilesError, KeptFiles, discard_files
from kvbridge.pool.memory.memory_limits import why_not_memory
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.tier.copies import copy_backend

log = structlog.get_logger(__name__)

NodeConfig = PrefillConfig | DecodeConfig

KEPT_POOLS_S = 15.0
"""The processes of the daemon before let go of the pools of `pools.keep_s` within this, or the pools are made anew."""
UNREGISTERED = Chunking(extent_bytes=1 << 60)
"""No network card registers host copies, so nothing limits how long a stretch of them is."""
ADOPTED_PAGE_LIMIT = 1 << 22
"""Page ids that an adopted space may use; the planner checks them against the engine's real pools."""


@dataclass(frozen=True)
class NodeLayout:
    """What memory a node needs: decided before any of it exists."""

    parts: dict[Rank, RankPart]
    device: dict[Rank, Placement]
    """Empty when the engine brings the device memory."""
    host: Placement | None
    host_kinds: frozenset[ComponentKind]
    owned: dict[IndexSpace, int]
    """Pages of each space that this node allocates from."""
    adopted: dict[IndexSpace, int]
    orders: dict[Rank, DeviceAllocationRequest] = field(default_factory=dict)
    """The ranks whose device memory their workers make, with what they are to make."""
    twins: Placement | None = None
    """The host tier; None when it is off."""

    def book(self) -> PageBook:
        """Open the page accounts for this layout."""
        return PageBook(self.owned, adopted=self.adopted)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(placement.total_bytes for placement in (*self.device.values(), *self._hosts()))

    @property
    def kept_form(self) -> str:
        """A digest of how the pools that can be kept are laid out, with all sizes."""
        text = "\n".join(placement.model_dump_json() for placement in self._hosts())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def node_bytes(self) -> int:
        """Bytes of the pools that the node makes itself, all of them in shared memory."""
        return sum(placement.total_bytes for placement in (*self.shared_device().values(), *self._hosts()))

    def page_bytes(self, geometry: ModelGeometry) -> dict[IndexSpace, int]:
        """Bytes of a page of each space: of all components in it, over the layers and ranks of this node."""
        found: dict[IndexSpace, int] = {}
        for part in self.parts.values():
            for component, layers in part.components(geometry, self.host_kinds):
                start, stop = part.lanes(component)
                each = len(layers) * component.page_bytes(stop - start)
                found[component.space] = found.get(component.space, 0) + each
        for region in (region for placement in self._hosts() for region in placement.regions):
            found[region.space] = found.get(region.space, 0) + region.page_bytes
        return found

    def shared_device(self) -> dict[Rank, Placement]:
        """The device pools that the node makes (device: cpu)."""
        return {rank: placement for rank, placement in self.device.items() if rank not in self.orders}

    def _hosts(self) -> list[Placement]:
        return [placement for placement in (self.host, self.twins) if placement is not None]


def plan_memory(config: NodeConfig, geometry: ModelGeometry) -> NodeLayout:
    """Decide what memory the configuration asks for. Raises ConfigError or InvalidInputError naming what does not fit."""
    sizes = config.parallelism
    parts = {placement.rank: _part(config, geometry, placement) for placement in sizes.placements()}
    host_kinds = _host_kinds(config, geometry)
    spaces = _device_spaces(geometry, host_kinds)
    host = _host(config, geometry, host_kinds)
    twins = plan_twins(config, geometry, tuple(parts.values()), host_kinds)
    owned = {} if host is None else host.page_counts()
    owned |= {} if twins is None else twins.page_counts()
    if config.pools.memory is MemoryOwner.ADOPTED:
        return NodeLayout(parts, {}, host, host_kinds, owned, dict.fromkeys(spaces, ADOPTED_PAGE_LIMIT))
    counts = {space: int(getattr(config.pools.device, space.value)) for space in spaces}
    owned |= _hot_slots(config, geometry, host_kinds, spaces)
    for space, count in counts.items():
        if count < 1:
            raise ConfigError(f"pools.device.{space}: the model needs pages of space '{space}', got {count}")
    page_first = config.pools.device_layout is DeviceLayout.PAGE_FIRST
    device = {
        rank: device_placement(geometry, part, page_counts=counts, exclude=host_kinds, page_first=page_first)
        for rank, part in parts.items()
    }
    exclude = tuple(sorted(host_kinds))
    orders = {
        rank: DeviceAllocationRequest(device=part.device, page_counts=counts, exclude=exclude, page_first=page_first)
        for rank, part in parts.items()
        if part.memory is MemoryKind.VRAM
    }
    return NodeLayout(parts, device, host, host_kinds, owned | counts, {}, orders, twins)


def _part(config: NodeConfig, geometry: ModelGeometry, placed: RankPlacement) -> RankPart:
    sizes = config.parallelism
    part = RankPart.of(
        geometry,
        placed.rank,
        pp_size=sizes.pp_size,
        tp_size=sizes.tp_size,
        boundaries=sizes.stage_boundaries or None,
    )
    ordinal = placed.cuda_ordinal
    return part if ordinal is None else part.model_copy(update={"memory": MemoryKind.VRAM, "device": ordinal})


def _host_kinds(config: NodeConfig, geometry: ModelGeometry) -> frozenset[ComponentKind]:
    if not isinstance(config.pools, DecodePools):
        return frozenset()
    for kind in config.pools.host.components:
        if not geometry.component(kind).host_capable:
            raise ConfigError(f"pools.host.components: {kind} of model '{geometry.name}' cannot live in host memory")
    return frozenset(config.pools.host.components)


def _device_spaces(geometry: ModelGeometry, host_kinds: frozenset[ComponentKind]) -> list[IndexSpace]:
    return sorted({component.space for component in geometry.components if component.kind not in host_kinds})


def _host(config: NodeConfig, geometry: ModelGeometry, kinds: frozenset[ComponentKind]) -> Placement | None:
    if not kinds or not isinstance(config.pools, DecodePools):
        return None
    asked = config.pools.host
    chunking = Chunking(extent_bytes=int(asked.extent_bytes), mapping_bytes=int(asked.mapping_bytes))
    return host_placement(
        geometry,
        kinds,
        page_count=_host_pages(asked, geometry, kinds),
        layout=HostLayout(asked.layout),
        chunking=chunking,
    )


def _hot_slots(
    config: NodeConfig,
    geometry: ModelGeometry,
    host_kinds: frozenset[ComponentKind],
    spaces: Collection[IndexSpace],
) -> dict[IndexSpace, int]:
    """Request slots to give out for the hot buffer's sake, where the model's own state does not need any."""
    if not isinstance(config, DecodeConfig) or config.sparse is None:
        return {}
    try:
        config.sparse.check_component(sparse_component(geometry, host_kinds))
    except InvalidInputError as error:
        raise ConfigError(f"sparse: {error}") from error
    return {} if IndexSpace.REQUEST in spaces else {IndexSpace.REQUEST: config.sparse.max_requests}


def _host_pages(asked: HostPool, geometry: ModelGeometry, kinds: frozenset[ComponentKind]) -> int:
    if asked.pages:
        return asked.pages
    components = [geometry.component(kind) for kind in kinds]
    page_bytes = sum(component.page_bytes() * len(component.layers) for component in components)
    pages = int(asked.size_bytes) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"pools.host.size_bytes: one page of all layers has {page_bytes} bytes, got {int(asked.size_bytes)} in all"
        )
    return pages


def plan_twins(
    config: NodeConfig,
    geometry: ModelGeometry,
    parts: Sequence[RankPart],
    host_kinds: frozenset[ComponentKind],
) -> Placement | None:
    """Lay out the twins that the configuration asks for; None when it asks for none. Raises ConfigError, InvalidInputError."""
    asked = config.tier.host
    if asked is None:
        if config.pools.keep_s:
            raise ConfigError(
                "pools.keep_s is set but tier.host is null: nothing in host memory is worth keeping; set it to 0"
            )
        return None
    if config.pools.memory is MemoryOwner.ADOPTED:
        raise ConfigError(
            "tier.host is set but pools.memory is adopted: the engine gives out its pages itself and has a prefix cache of its "
            "own, so nothing here decides what moves to the host; set tier.host to null"
        )
    copy_backend(asked.backend, host=asked.layout, device=config.pools.device_layout)
    prefill = isinstance(config, PrefillConfig)
    components = copied_components(geometry, host_kinds, checkpoints=prefill)
    if not any(component.space is IndexSpace.FULL for component in components):
        raise ConfigError(
            f"tier.host: all pages of a prefix of '{geometry.name}' live in the host pool of this node; set tier.host to null"
        )
    _check_checkpoints(asked, geometry, prefill=prefill)
    counts = {IndexSpace.FULL_COPY: _pages(asked, _page_bytes(geometry, parts, components))}
    if asked.checkpoint_pages:
        counts[IndexSpace.SWA_COPY] = asked.checkpoint_pages
    return copy_placement(geometry, parts, components, page_counts=counts, layout=asked.layout, chunking=UNREGISTERED)


def _check_checkpoints(asked: HostTier, geometry: ModelGeometry, *, prefill: bool) -> None:
    wanted = prefill and needs_checkpoints(geometry)
    if wanted and not asked.checkpoint_pages:
        raise ConfigError(
            f"tier.host.checkpoint_pages is 0: a prefill engine goes on with a prefix of '{geometry.name}' only where windows and "
            "states were kept; say how many checkpoints the host is to keep"
        )
    if asked.checkpoint_pages and not wanted:
        why = (
            f"'{geometry.name}' needs none"
            if prefill
            else "a decode node keeps none, windows and states always come anew"
        )
        raise ConfigError(f"tier.host.checkpoint_pages is {asked.checkpoint_pages}: {why}; set it to 0")


def _page_bytes(
    geometry: ModelGeometry, parts: Sequence[RankPart], components: Sequence[Component]
) -> dict[IndexSpace, int]:
    """Bytes of one page of each space of twins."""
    one = dict.fromkeys((IndexSpace.FULL_COPY, IndexSpace.SWA_COPY), 1)
    found = dict.fromkeys(one, 0)
    for region in copy_placement(geometry, parts, components, page_counts=one).regions:
        found[region.space] += region.page_bytes
    return found


def _pages(asked: HostTier, page_bytes: dict[IndexSpace, int]) -> int:
    if asked.pages:
        return asked.pages
    checkpoints, each = asked.checkpoint_pages * page_bytes[IndexSpace.SWA_COPY], page_bytes[IndexSpace.FULL_COPY]
    pages = (int(asked.size_bytes) - checkpoints) // each
    if pages < 1:
        raise ConfigError(
            f"tier.host.size_bytes: {asked.checkpoint_pages} checkpoints take {checkpoints} bytes, one page of all layers {each}; "
            f"got {int(asked.size_bytes)} in all"
        )
    return pages


class _CancelledError(Exception):
    """The creation was told to stop."""


@dataclass
class NodeMemory:
    """The pools that a node makes, in memory."""

    layout: NodeLayout
    problem: str = "memory is being created"
    """Why it is not there yet; empty when it is."""
    device: dict[Rank, tuple[SharedRegion, ...]] = field(default_factory=dict)
    host: tuple[SharedRegion, ...] = ()
    twins: tuple[SharedRegion, ...] = ()
    regions: tuple[Region, ...] = ()
    """Those of the host pool and of the twins, in this process."""
    group: int | None = None
    """Whose members may map the pools besides this user."""
    kept: KeptPools | None = None
    """The host pool and the twins outlive this process by it; None: they do not."""
    _not_kept: Restored | None = None
    """Why they do not although they should."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def keep(self, config: NodeConfig, prefix: str, header: KeptHeader | None) -> None:
        """Get the kept pools of a node whose shared files' names begin with `prefix`.

        Without a header this process keeps none, and those of an earlier one are removed. With one, it waits for a daemon of the
        same name that is ending, and raises RegistrationError when that does not end. Where something else has one of the names,
        nothing is kept: any user of the host can take one, and nobody can keep this daemon from starting by it.
        """
        directory, name = memory_directory(config), f"{prefix}keep"
        keep_s, wait_s = config.pools.keep_s, KEPT_POOLS_S
        if header is None:
            discard_files(directory, name)
            return
        try:
            files = KeptFiles.lock_files(directory, name, keep_s=keep_s, wait_s=wait_s)
        except ForeignFilesError as error:
            log.warning("kept_pools_refused", pages=0, reason=str(error))
            self._not_kept = Restored(refused=str(error))
            return
        self.kept = KeptPools.read(files, header, wait_s)

    @property
    def restored(self) -> Restored | None:
        """Return the pools that the daemon before has left; None where none are to be kept."""
        return self._not_kept if self.kept is None else self.kept.restored

    async def create(
        self, directory: Path, prefix: str, *, cancel_s: float, on_progress: Progress = ignore_progress
    ) -> None:
        """Create every pool in `directory`, in a thread, in files whose names begin with `prefix`.

        Raises RegistrationError, leaving nothing. When it is cancelled, the thread stops after the chunks at hand and
        removes what it has made, and only then the cancellation goes on; DeadlineError when that takes longer than
        `cancel_s` (the thread goes on removing).
        """
        work = asyncio.create_task(asyncio.to_thread(self._create, directory, prefix, on_progress))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._cancelled.set()
            done, _ = await asyncio.wait({work}, timeout=cancel_s)
            if not done:
                raise DeadlineError(
                    f"the pools in {directory} were being made and could not be removed within {cancel_s:g} s "
                    "(timeouts.shutdown_close_s): the machine is short of memory or of time"
                ) from None
            work.exception()  # says no more than that it was told to stop
            self.close()
            raise
        self.problem = ""

    def _create(self, directory: Path, prefix: str, on_progress: Progress) -> None:
        done = 0
        total = self.layout.node_bytes

        def report(pool_bytes: int, _: int) -> None:
            if self._cancelled.is_set():
                raise _CancelledError
            share = (done + pool_bytes) / max(1, total)
            self.problem = f"memory is being created ({share:.0%} of {total} bytes)"
            on_progress(done + pool_bytes, total)

        wanted: list[tuple[Rank | str, Placement | None]] = [
            *self.layout.shared_device().items(),
            ("host", self.layout.host),
            ("twins", self.layout.twins),
        ]
        try:
            for whose, placement in wanted:
                if placement is not None:
                    self._have(whose, self._make(placement, str(whose), directory / prefix, report))
                    done += placement.total_bytes
        except BaseException:
            self.close()
            raise

    def _make(self, placement: Placement, name: str, prefix: Path, report: Progress) -> MemoryPool:
        if self.kept is not None and placement in (self.layout.host, self.layout.twins):
            return self.kept.pool(placement, name, report)
        return MemoryPool.in_files(placement, prefix.parent, f"{prefix.name}.{name}", on_progress=report)

    def _have(self, whose: Rank | str, pool: MemoryPool) -> None:
        self._stack.callback(pool.close)
        self._share(pool)
        if isinstance(whose, Rank):
            self.device[whose] = pool.shared_regions()
            return
        self.regions += pool.regions()
        if whose == "host":
            self.host = pool.shared_regions()
        else:
            self.twins = pool.shared_regions()

    def _share(self, pool: MemoryPool) -> None:
        if self.group is not None:
            for mapping in pool.mappings:
                mapping.share(self.group)

    def close(self) -> None:
        """Remove every pool but those that are kept. Nothing writes to them any more."""
        self._stack.close()
        if self.kept is not None:
            self.kept.close()
        self.device.clear()
        self.host = self.twins = ()
        self.regions = ()


def memory_directory(config: NodeConfig) -> Path:
    """Return where a node's shared files are made."""
    return config.pools.host.directory if isinstance(config.pools, DecodePools) else DEFAULT_DIRECTORY


def require_memory_directory(config: NodeConfig, layout: NodeLayout) -> None:
    """Raise UnavailableError when the node makes shared files and they would not be in memory."""
    directory = memory_directory(config)
    if layout.node_bytes and (problem := why_not_memory(directory)):
        key = "pools.host.directory" if isinstance(config.pools, DecodePools) else "the pools' directory"
        raise UnavailableError(f"{key}: {problem}; the pools need a directory in memory, such as {DEFAULT_DIRECTORY}")


def file_prefix(instance: str, node: str) -> str:
    """What the names of a node's shared files begin with: equal for all lives of the node, and for no other node."""
    digest = hashlib.blake2b(f"{instance}/{node}".encode(), digest_size=6).hexdigest()
    return f"{POOL_PREFIX}{digest}-"
