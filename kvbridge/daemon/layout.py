"""The plan of a node's memory: the geometry of its model, and the pools that its configuration asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvbridge.config.pools import (
    DecodePools,
    DeviceLayout,
    HostLayout,
    MemoryOwner,
    ModelConfig,
    RankPlacement,
)
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.tier import HostTier
from kvbridge.core.errors import ConfigError, InvalidInputError, UnavailableError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.costs import sparse_component
from kvbridge.core.geometry.models import geometry_from_config, preset
from kvbridge.core.geometry.tiers import copied_components, needs_checkpoints
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.messages import DeviceAllocationRequest
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, copy_placement, device_placement, host_placement
from kvbridge.tier.copies import copy_backend

NodeConfig = PrefillConfig | DecodeConfig

UNREGISTERED = Chunking(extent_bytes=1 << 60)
"""No network card registers host copies, so nothing limits the length of their stretches."""
ADOPTED_PAGE_LIMIT = 1 << 22
"""Limit of page ids in an adopted space; the planner checks the ids against the engine's real pools."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def load_geometry(config: ModelConfig) -> ModelGeometry:
    """Return the model's geometry. Raises ConfigError for an unreadable file, InvalidInputError for wrong content."""
    if config.geometry is not None:
        return _read_geometry(config.geometry)
    if config.hf_config is None:
        return preset(config.preset)
    facts = read_hf_config(config.hf_config)
    extra: dict[str, int] = {} if config.tokens_per_page is None else {"tokens_per_page": config.tokens_per_page}
    return geometry_from_config(
        facts,
        encoding=config.encoding,
        native_dtype_bytes=native_dtype_bytes(facts),
        name=_model_name(config.hf_config),
        **extra,
    )


def _model_name(config: Path) -> str:
    """Return the name of a configuration's file, or of its directory when the file is called `config`."""
    return config.resolve().parent.name if config.stem == "config" else config.stem


def _read_geometry(path: Path) -> ModelGeometry:
    try:
        return ModelGeometry.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UnavailableError(f"model.geometry: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"model.geometry: {path} does not hold a geometry{f' ({where})' if where else ''}: {first['msg']}; have the engine "
            "write it again"
        ) from None


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face `config.json`. Raises ConfigError."""
    try:
        facts = json.loads(path.read_text())
    except OSError as error:
        raise UnavailableError(f"model.hf_config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.hf_config: {path} is not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"model.hf_config: {path} does not hold a JSON object")
    return facts


def native_dtype_bytes(facts: dict[str, Any]) -> int:
    """Return the width of the model's own numbers in bytes: key `dtype` or `torch_dtype`, else 4."""
    name = facts.get("dtype") or facts.get("torch_dtype") or "float32"
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"model.hf_config: dtype '{name}' is not one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


@dataclass(frozen=True)
class NodeLayout:
    """The memory that a node needs, before any of it exists."""

    parts: dict[Rank, RankPart]
    device: dict[Rank, Placement]
    """Empty: the engine brings the device memory."""
    host: Placement | None
    host_kinds: frozenset[ComponentKind]
    owned: dict[IndexSpace, int]
    """Pages of each space that this node gives out."""
    adopted: dict[IndexSpace, int]
    """Spaces whose pages engines name, in memory that they bring."""
    orders: dict[Rank, DeviceAllocationRequest] = field(default_factory=dict)
    """By rank, the device memory that its worker makes."""
    copies: Placement | None = None
    """Host copies of device pages; None without a host tier."""

    def book(self) -> PageBook:
        """Open the page accounts for this layout."""
        return PageBook(self.owned, adopted=self.adopted)

    @property
    def own_host(self) -> frozenset[ComponentKind]:
        """Components that each rank's engine brings in host memory."""
        return self.host_kinds if IndexSpace.HOST in self.adopted else frozenset()

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(placement.total_bytes for placement in (*self.device.values(), *self._hosts()))

    @property
    def kept_form(self) -> str:
        """Digest of the layout and the sizes of the pools that can be kept."""
        text = "\n".join(placement.model_dump_json() for placement in self._hosts())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def node_bytes(self) -> int:
        """Bytes of the node's own pools, all of them in shared memory."""
        return sum(placement.total_bytes for placement in (*self.shared_device().values(), *self._hosts()))

    def shared_device(self) -> dict[Rank, Placement]:
        """The device pools that the node makes (device: cpu)."""
        return {rank: placement for rank, placement in self.device.items() if rank not in self.orders}

    def _hosts(self) -> list[Placement]:
        return [placement for placement in (self.host, self.copies) if placement is not None]


def plan_memory(config: NodeConfig, geometry: ModelGeometry) -> NodeLayout:
    """Plan the memory that the configuration asks for. Raises ConfigError or InvalidInputError, which name the fault."""
    sizes = config.parallelism
    parts = {placement.rank: _part(config, geometry, placement) for placement in sizes.placements()}
    host_kinds = _host_kinds(config, geometry)
    spaces = sorted({component.space for component in geometry.components if component.kind not in host_kinds})
    host = _host(config, geometry, host_kinds)
    copies = _plan_copies(config, geometry, tuple(parts.values()), host_kinds)
    owned = {} if host is None else host.page_counts()
    owned |= {} if copies is None else copies.page_counts()
    if config.pools.memory is MemoryOwner.ADOPTED:
        spaces += [IndexSpace.HOST] if host_kinds and host is None else []
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
    return NodeLayout(parts, device, host, host_kinds, owned | counts, {}, orders, copies)


def _part(config: NodeConfig, geometry: ModelGeometry, placed: RankPlacement) -> RankPart:
    sizes, ordinal = config.parallelism, placed.cuda_ordinal
    part = RankPart.of(
        geometry, placed.rank, pp_size=sizes.pp_size, tp_size=sizes.tp_size, boundaries=sizes.stage_boundaries or None
    )
    return part if ordinal is None else part.model_copy(update={"memory": MemoryKind.VRAM, "device": ordinal})


def _host_kinds(config: NodeConfig, geometry: ModelGeometry) -> frozenset[ComponentKind]:
    if not isinstance(config.pools, DecodePools):
        return frozenset()
    for kind in config.pools.host.components:
        if not geometry.component(kind).host_capable:
            raise ConfigError(f"pools.host.components: {kind} of model '{geometry.name}' cannot live in host memory")
    return frozenset(config.pools.host.components)


def _host(config: NodeConfig, geometry: ModelGeometry, kinds: frozenset[ComponentKind]) -> Placement | None:
    if not kinds or not isinstance(config.pools, DecodePools) or config.pools.host.memory is MemoryOwner.ADOPTED:
        return None
    asked = config.pools.host
    components = [geometry.component(kind) for kind in kinds]
    each_bytes = sum(component.page_bytes() * len(component.layers) for component in components)
    pages = asked.pages or int(asked.size_bytes) // each_bytes
    if pages < 1:
        raise ConfigError(
            f"pools.host.size_bytes: one page of all layers has {each_bytes} bytes, got {int(asked.size_bytes)} in all"
        )
    chunking = Chunking(extent_bytes=int(asked.extent_bytes), mapping_bytes=int(asked.mapping_bytes))
    return host_placement(geometry, kinds, page_count=pages, layout=HostLayout(asked.layout), chunking=chunking)


def _hot_slots(
    config: NodeConfig,
    geometry: ModelGeometry,
    host_kinds: frozenset[ComponentKind],
    spaces: Collection[IndexSpace],
) -> dict[IndexSpace, int]:
    """Return the request slots of the hot buffer, unless the model's own state has request slots."""
    if not isinstance(config, DecodeConfig) or config.sparse is None:
        return {}
    try:
        config.sparse.check_component(sparse_component(geometry, host_kinds))
    except InvalidInputError as error:
        raise ConfigError(f"sparse: {error}") from error
    return {} if IndexSpace.REQUEST in spaces else {IndexSpace.REQUEST: config.sparse.max_requests}


def _plan_copies(
    config: NodeConfig,
    geometry: ModelGeometry,
    parts: Sequence[RankPart],
    host_kinds: frozenset[ComponentKind],
) -> Placement | None:
    """Lay out the configured host copies, if any. Raises ConfigError, InvalidInputError."""
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
    counts = {IndexSpace.FULL_COPY: asked.pages or _pages_in(asked, geometry, parts, components)}
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
        no_need = f"'{geometry.name}' needs none"
        why = no_need if prefill else "a decode node keeps none, because windows and states always come anew"
        raise ConfigError(f"tier.host.checkpoint_pages is {asked.checkpoint_pages}: {why}; set it to 0")


def _pages_in(
    asked: HostTier, geometry: ModelGeometry, parts: Sequence[RankPart], components: Sequence[Component]
) -> int:
    """Return the pages in `size_bytes` beside the checkpoints."""
    page_bytes = dict.fromkeys((IndexSpace.FULL_COPY, IndexSpace.SWA_COPY), 0)
    for region in copy_placement(geometry, parts, components, page_counts=dict.fromkeys(page_bytes, 1)).regions:
        page_bytes[region.space] += region.page_bytes
    checkpoints, each = asked.checkpoint_pages * page_bytes[IndexSpace.SWA_COPY], page_bytes[IndexSpace.FULL_COPY]
    pages = (int(asked.size_bytes) - checkpoints) // each
    if pages < 1:
        raise ConfigError(
            f"tier.host.size_bytes: {asked.checkpoint_pages} checkpoints take {checkpoints} bytes, one page of all layers {each}; "
            f"got {int(asked.size_bytes)} in all"
        )
    return pages
