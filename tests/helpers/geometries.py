"""Geometries written out by hand, so that tests of what is built on them do not depend on the presets."""

from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.ids import IndexSpace

ENDLESS = 2**32
"""Ring turns in the one logical page of a request slot."""


def entries(kind: ComponentKind, layers, *, tokens_per_row: int, parts, alignment: int = 1) -> Component:
    slots = 256 // tokens_per_row
    return Component(
        kind=kind,
        layers=tuple(layers),
        space=IndexSpace.FULL,
        encoding=Encoding.FP8_INDEXER if kind is ComponentKind.C4_INDEXER else Encoding.FP8_V4,
        liveness=Liveness.GROWING,
        tokens_per_row=tokens_per_row,
        row_parts_bytes=parts,
        slots_per_page=slots,
        rows_per_logical_page=slots,
        page_alignment_bytes=alignment,
        host_capable=kind is ComponentKind.C4_KV,
    )


def window_state(kind: ComponentKind, layers, *, row_bytes: int) -> Component:
    """Compressor state of the sparse layers: a ring of 8 rows in each window page."""
    return Component(
        kind=kind,
        layers=tuple(layers),
        space=IndexSpace.SWA,
        encoding=Encoding.FP32,
        liveness=Liveness.TAIL,
        block=4,
        overlap=1,
        row_parts_bytes=(row_bytes,),
        slots_per_page=8,
        rows_per_logical_page=256,
    )


def deepseek_v4(name: str, *, layer_count: int, sparse, heavy) -> ModelGeometry:
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
            Component(
                kind=ComponentKind.C128_STATE,
                layers=tuple(heavy),
                space=IndexSpace.REQUEST,
                encoding=Encoding.FP32,
                liveness=Liveness.TAIL,
                block=128,
                row_parts_bytes=(4_096,),
                slots_per_page=128,
                rows_per_logical_page=128 * ENDLESS,
            ),
            Component(
                kind=ComponentKind.SWA_KV,
                layers=tuple(range(layer_count)),
                space=IndexSpace.SWA,
                encoding=Encoding.FP8_V4,
                liveness=Liveness.WINDOW,
                window=128,
                row_parts_bytes=(576, 8),
                slots_per_page=256,
                rows_per_logical_page=256,
                page_alignment_bytes=576,
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
    return ModelGeometry(
        name="gqa",
        layer_count=layers,
        tokens_per_page=tokens_per_page,
        components=(
            Component(
                kind=ComponentKind.MHA_KV,
                layers=tuple(range(layers)),
                space=IndexSpace.FULL,
                encoding=Encoding.BF16,
                liveness=Liveness.GROWING,
                row_parts_bytes=(row_bytes,),
                slots_per_page=tokens_per_page,
                rows_per_logical_page=tokens_per_page,
                lanes=heads,
            ),
        ),
    )
