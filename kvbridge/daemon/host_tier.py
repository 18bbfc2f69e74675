"""The host tier of a node: how much memory it takes, and how that is laid out."""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge.config.pools import MemoryOwner
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.tier import HostTier
from kvbridge.core.errors import ConfigError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.tiers import copied_components, needs_checkpoints
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, twin_placement
from kvbridge.tier.copies import copy_backend

UNREGISTERED = Chunking(extent_bytes=1 << 60)
"""No network card registers twins, so nothing limits how long a stretch of them is."""


def plan_twins(
    config: PrefillConfig | DecodeConfig,
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
    return twin_placement(geometry, parts, components, page_counts=counts, layout=asked.layout, chunking=UNREGISTERED)


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
    for region in twin_placement(geometry, parts, components, page_counts=one).regions:
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
