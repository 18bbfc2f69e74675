"""Geometries written out by hand, so that tests of what is built on them do not depend on the presets."""

from collections.abc import Iterable
from typing import Any

from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.ids import IndexSpace

ENDLESS = 2**32
"""Ring turns in the one logical page of a request slot."""


def new_component(
    kind: ComponentKind,
    layers: Iterable[int],
    space: IndexSpace,
    liveness: Liveness,
    parts: tuple[int, ...],
    *,
    slots: int,
    rows: int = 0,
    encoding: Encoding = Encoding.NATIVE,
    **more: Any,
) -> Component:
    """A component whose pages have `slots` rows of these parts in bytes, and no more rows (`rows`) than that unless told."""
    form = {"row_parts_bytes": parts, "slots_per_page": slots, "rows_per_logical_page": rows or slots}
    return Component(kind=kind, layers=tuple(layers), space=space, liveness=liveness, encoding=encoding, **form, **more)


def entries(kind: ComponentKind, layers, *, tokens_per_row: int, parts, alignment: int = 1) -> Component:
    encoding = Encoding.FP8_INDEXER if kind is ComponentKind.C4_INDEXER else Encoding.FP8_V4
    more = {"page_alignment_bytes": alignment, "host_capable": kind is ComponentKind.C4_KV, "encoding": encoding}
    more |= {"slots": 256 // tokens_per_row, "tokens_per_row": tokens_per_row}
    return new_component(kind, layers, IndexSpace.FULL, Liveness.GROWING, parts, **more)


def window_state(kind: ComponentKind, layers, *, row_bytes: int) -> Component:
    """Compressor state of the sparse layers: a ring of 8 rows in each window page."""
    ring = {"slots": 8, "rows": 256, "block": 4, "overlap": 1}
    return new_component(kind, layers, IndexSpace.SWA, Liveness.TAIL, (row_bytes,), encoding=Encoding.FP32, **ring)


def deepseek_v4(name: str, *, layer_count: int, sparse, heavy) -> ModelGeometry:
    state = {"slots": 128, "rows": 128 * ENDLESS, "block": 128, "encoding": Encoding.FP32}
    window = {"slots": 256, "window": 128, "encoding": Encoding.FP8_V4, "page_alignment_bytes": 576}
    return ModelGeometry(
        name=name,
        layer_count=layer_count,
        tokens_per_page=256,
        components=(
            entries(ComponentKind.C4_KV, sparse, tokens_per_row=4, parts=(576, 8), alignment=576),
            entries(ComponentKind.C4_INDEXER, sparse, tokens_per_row=4, parts=(128, 4)),
            window_state(ComponentKind.C4_STATE, sparse, row_bytes=8_192),
            window_state(ComponentKind.C4_INDEXER_STATE, sparse, row_bytes=2_048),
            entries(ComponentKind.C128_KV, heavy, tokens_per_row=128, parts=(576, 8), alignment=576),
            new_component(ComponentKind.C128_STATE, heavy, IndexSpace.REQUEST, Liveness.TAIL, (4_096,), **state),
            new_component(
                ComponentKind.SWA_KV, range(layer_count), IndexSpace.SWA, Liveness.WINDOW, (576, 8), **window
            ),
        ),
    )


def flash() -> ModelGeometry:
    """DeepSeek-V4 Flash: 43 layers, 21 sparse, 20 heavy, 2 with their window only."""
    return deepseek_v4("flash", layer_count=43, sparse=range(2, 43, 2), heavy=range(3, 42, 2))


def pro() -> ModelGeometry:
    return deepseek_v4("pro", layer_count=61, sparse=range(2, 61, 2), heavy=(0, *range(1, 60, 2)))


def gqa(*, layers: int = 3, heads: int = 4, row_bytes: int = 64, tokens_per_page: int = 16) -> ModelGeometry:
    """A model whose KV is sharded by head: one lane a KV head."""
    form = {"slots": tokens_per_page, "lanes": heads, "encoding": Encoding.BF16}
    part = new_component(ComponentKind.MHA_KV, range(layers), IndexSpace.FULL, Liveness.GROWING, (row_bytes,), **form)
    return ModelGeometry(name="gqa", layer_count=layers, tokens_per_page=tokens_per_page, components=(part,))
