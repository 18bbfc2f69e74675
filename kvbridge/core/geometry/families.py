"""How the dimensions of a model family become components.

Owns: the rules of each family: DeepSeek-V4, latent attention (MLA), grouped-query attention. Must not know: where the
dimensions come from (a preset, a `config.json`), addresses, ranks.
"""

from __future__ import annotations

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive

Layers = tuple[NonNegative, ...]

ENDLESS_PAGES = 2**32
"""Ring turns in the one logical page of a request slot: more than any request has, so that page 0 is the only one."""

FP8_SCALED_VALUES = 64
"""Values that share one ue8m0 scale in a DeepSeek-V4 row."""
FP8_SCALE_ROW_BYTES = 8
"""A DeepSeek-V4 scale row is padded to a multiple of this."""
FP8_INDEXER_SCALED_VALUES = 128
"""Values that share one fp32 scale in an indexer key."""


class V4Dimensions(FrozenModel):
    """What decides the form of a DeepSeek-V4 model's cache.

    Every layer attends to its last `window` tokens; a sparse layer also to one compressed entry for each `sparse_rate`
    tokens that its indexer picks from, a heavy layer to one for each `heavy_rate` tokens.
    """

    layer_count: Positive
    sparse_layers: Layers
    heavy_layers: Layers
    window: Positive = 128
    head_dim: Positive = 512
    rope_dim: Positive = 64
    """How many of the `head_dim` values carry the position; they are never quantised."""
    index_head_dim: Positive = 128
    sparse_rate: Positive = 4
    heavy_rate: Positive = 128
    tokens_per_page: Positive = 256


class V4Rows(FrozenModel):
    """How a DeepSeek-V4 model's rows are stored: parts in bytes, as in `Component.row_parts_bytes`."""

    kv_encoding: Encoding
    kv_parts: tuple[Positive, ...]
    kv_alignment_bytes: Positive
    index_encoding: Encoding
    index_parts: tuple[Positive, ...]
    state_encoding: Encoding
    state_value_bytes: Positive


def v4_fp8_rows(dimensions: V4Dimensions) -> V4Rows:
    """Return the production form: fp8 values with scales apart, fp8 indexer keys, fp32 compressor states.

    With head_dim 512 and rope_dim 64 a row is 576 + 8 bytes. Raises UnsupportedError when the dimensions are not whole
    numbers of scaled groups.
    """
    plain = dimensions.head_dim - dimensions.rope_dim
    if plain <= 0 or plain % FP8_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_v4 scales groups of {FP8_SCALED_VALUES} values, but head_dim {dimensions.head_dim} - rope "
            f"{dimensions.rope_dim} leaves {plain}; use the native encoding"
        )
    value_bytes = plain + 2 * dimensions.rope_dim
    scale_bytes = -(-(plain // FP8_SCALED_VALUES) // FP8_SCALE_ROW_BYTES) * FP8_SCALE_ROW_BYTES
    return V4Rows(
        kv_encoding=Encoding.FP8_V4,
        kv_parts=(value_bytes, scale_bytes),
        kv_alignment_bytes=value_bytes,
        index_encoding=Encoding.FP8_INDEXER,
        index_parts=fp8_indexer_parts(dimensions.index_head_dim),
        state_encoding=Encoding.FP32,
        state_value_bytes=4,
    )


def v4_native_rows(dimensions: V4Dimensions, dtype_bytes: int) -> V4Rows:
    """Return the form in which the model itself computes: plain rows of `dtype_bytes` a value, nothing padded."""
    return V4Rows(
        kv_encoding=Encoding.NATIVE,
        kv_parts=(dimensions.head_dim * dtype_bytes,),
        kv_alignment_bytes=1,
        index_encoding=Encoding.NATIVE,
        index_parts=(dimensions.index_head_dim * dtype_bytes,),
        state_encoding=Encoding.NATIVE,
        state_value_bytes=dtype_bytes,
    )


def fp8_indexer_parts(index_head_dim: int) -> tuple[int, int]:
    """Return the parts of an fp8 indexer key: its values, then one fp32 scale for each 128 of them."""
    if index_head_dim % FP8_INDEXER_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_indexer scales groups of {FP8_INDEXER_SCALED_VALUES} values, but index_head_dim is {index_head_dim}; "
            "use the native encoding"
        )
    return index_head_dim, 4 * (index_head_dim // FP8_INDEXER_SCALED_VALUES)


def v4_geometry(name: str, dimensions: V4Dimensions, *, rows: V4Rows) -> ModelGeometry:
    """Return the geometry of a DeepSeek-V4 model.

    Raises UnsupportedError when a compression rate does not divide the page.
    """
    components = [*_v4_sparse(dimensions, rows), *_v4_heavy(dimensions, rows)]
    components.append(
        Component(
            kind=ComponentKind.SWA_KV,
            layers=tuple(range(dimensions.layer_count)),
            space=IndexSpace.SWA,
            encoding=rows.kv_encoding,
            liveness=Liveness.WINDOW,
            window=dimensions.window,
            row_parts_bytes=rows.kv_parts,
            slots_per_page=dimensions.tokens_per_page,
            rows_per_logical_page=dimensions.tokens_per_page,
            page_alignment_bytes=rows.kv_alignment_bytes,
        )
    )
    return ModelGeometry(
        name=name,
        layer_count=dimensions.layer_count,
        tokens_per_page=dimensions.tokens_per_page,
        components=tuple(components),
    )


def _entries_per_page(dimensions: V4Dimensions, rate: int) -> int:
    entries, rest = divmod(dimensions.tokens_per_page, rate)
    if rest:
        raise UnsupportedError(
            f"a compression rate of {rate} does not divide a page of {dimensions.tokens_per_page} tokens, so an entry "
            f"would cross pages; choose tokens_per_page as a multiple of {rate}"
        )
    return entries


def _v4_sparse(dimensions: V4Dimensions, rows: V4Rows) -> list[Component]:
    """Entries and indexer keys of the sparse layers, and the states of the two compressors that make them."""
    if not dimensions.sparse_layers:
        return []
    entries = _entries_per_page(dimensions, dimensions.sparse_rate)
    # An entry is pooled from its own block and the one before it, each with its own half of the features, so a state
    # row is [kv a | kv b | score a | score b].
    values_per_dim = 4

    def entry(kind: ComponentKind, encoding: Encoding, parts: tuple[int, ...], alignment_bytes: int) -> Component:
        return Component(
            kind=kind,
            layers=dimensions.sparse_layers,
            space=IndexSpace.FULL,
            encoding=encoding,
            liveness=Liveness.GROWING,
            tokens_per_row=dimensions.sparse_rate,
            row_parts_bytes=parts,
            slots_per_page=entries,
            rows_per_logical_page=entries,
            page_alignment_bytes=alignment_bytes,
            # Decode reads only the entries that the indexer picks, so these alone can be far away.
            host_capable=kind is ComponentKind.C4_KV,
        )

    def state(kind: ComponentKind, dim: int) -> Component:
        return Component(
            kind=kind,
            layers=dimensions.sparse_layers,
            space=IndexSpace.SWA,
            encoding=rows.state_encoding,
            liveness=Liveness.TAIL,
            block=dimensions.sparse_rate,
            overlap=1,
            row_parts_bytes=(values_per_dim * dim * rows.state_value_bytes,),
            slots_per_page=min(2 * dimensions.sparse_rate, dimensions.tokens_per_page),
            rows_per_logical_page=dimensions.tokens_per_page,
        )

    return [
        entry(ComponentKind.C4_KV, rows.kv_encoding, rows.kv_parts, rows.kv_alignment_bytes),
        entry(ComponentKind.C4_INDEXER, rows.index_encoding, rows.index_parts, 1),
        state(ComponentKind.C4_STATE, dimensions.head_dim),
        state(ComponentKind.C4_INDEXER_STATE, dimensions.index_head_dim),
    ]


def _v4_heavy(dimensions: V4Dimensions, rows: V4Rows) -> list[Component]:
    """Entries of the heavy layers, and the state of the compressor that makes them."""
    if not dimensions.heavy_layers:
        return []
    entries = _entries_per_page(dimensions, dimensions.heavy_rate)
    return [
        Component(
            kind=ComponentKind.C128_KV,
            layers=dimensions.heavy_layers,
            space=IndexSpace.FULL,
            encoding=rows.kv_encoding,
            liveness=Liveness.GROWING,
            tokens_per_row=dimensions.heavy_rate,
            row_parts_bytes=rows.kv_parts,
            slots_per_page=entries,
            rows_per_logical_page=entries,
            page_alignment_bytes=rows.kv_alignment_bytes,
        ),
        Component(
            kind=ComponentKind.C128_STATE,
            layers=dimensions.heavy_layers,
            space=IndexSpace.REQUEST,
            encoding=rows.state_encoding,
            liveness=Liveness.TAIL,
            block=dimensions.heavy_rate,
            overlap=0,
            # Blocks do not overlap, so a state row is [kv | score].
            row_parts_bytes=(2 * dimensions.head_dim * rows.state_value_bytes,),
            slots_per_page=dimensions.heavy_rate,
            rows_per_logical_page=dimensions.heavy_rate * ENDLESS_PAGES,
        ),
    ]


class TokenRow(FrozenModel):
    """One row a token of a growing component."""

    encoding: Encoding
    parts: tuple[Positive, ...]


def latent_geometry(
    name: str, *, layer_count: int, latent: TokenRow, indexer: TokenRow | None, tokens_per_page: int
) -> ModelGeometry:
    """Return the geometry of a latent-attention model (DeepSeek-V2, V3), with `indexer` of a sparse one (V3.2).

    Only a sparse model's latents can live in the host pool: a dense one reads all of them at each step.
    """
    layers = tuple(range(layer_count))
    components = [
        _token_component(
            ComponentKind.MLA_KV, layers, row=latent, tokens_per_page=tokens_per_page, host_capable=indexer is not None
        )
    ]
    if indexer is not None:
        components.append(
            _token_component(ComponentKind.DSA_INDEXER, layers, row=indexer, tokens_per_page=tokens_per_page)
        )
    return ModelGeometry(
        name=name, layer_count=layer_count, tokens_per_page=tokens_per_page, components=tuple(components)
    )


class GroupedLayers(FrozenModel):
    """Which layers of a grouped-query model keep everything, and which only their last `window` tokens."""

    full: Layers
    sliding: Layers = ()
    window: NonNegative = 0

    @property
    def count(self) -> int:
        """How many layers."""
        return len(self.full) + len(self.sliding)


def grouped_geometry(
    name: str, layers: GroupedLayers, *, heads: int, row: TokenRow, tokens_per_page: int
) -> ModelGeometry:
    """Return the geometry of a model whose KV is sharded by head: one lane a KV head, `row` is K then V of one head."""
    components = []
    if layers.full:
        components.append(
            _token_component(ComponentKind.MHA_KV, layers.full, row=row, tokens_per_page=tokens_per_page, lanes=heads)
        )
    if layers.sliding:
        components.append(
            Component(
                kind=ComponentKind.SWA_KV,
                layers=layers.sliding,
                space=IndexSpace.SWA,
                encoding=row.encoding,
                liveness=Liveness.WINDOW,
                window=layers.window,
                row_parts_bytes=row.parts,
                slots_per_page=tokens_per_page,
                rows_per_logical_page=tokens_per_page,
                lanes=heads,
            )
        )
    return ModelGeometry(
        name=name, layer_count=layers.count, tokens_per_page=tokens_per_page, components=tuple(components)
    )


def _token_component(
    kind: ComponentKind,
    layers: Layers,
    *,
    row: TokenRow,
    tokens_per_page: int,
    lanes: int = 1,
    host_capable: bool = False,
) -> Component:
    return Component(
        kind=kind,
        layers=layers,
        space=IndexSpace.FULL,
        encoding=row.encoding,
        liveness=Liveness.GROWING,
        row_parts_bytes=row.parts,
        slots_per_page=tokens_per_page,
        rows_per_logical_page=tokens_per_page,
        lanes=lanes,
        host_capable=host_capable,
    )
