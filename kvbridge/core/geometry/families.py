"""How the dimensions of a model family become components."""

from __future__ import annotations

from typing import Any

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


class RowForm(FrozenModel):
    """How the rows of a component are stored; fields as in `Component`."""

    encoding: Encoding
    parts: tuple[Positive, ...]
    """Of one lane, in bytes."""
    lanes: Positive = 1
    page_alignment_bytes: Positive = 1

    def component(self, kind: ComponentKind, layers: Layers, **fields: Any) -> Component:  # noqa: ANN401 - as `Component` has them
        """Return the component of that kind, with what `Component` has besides."""
        return Component(
            kind=kind,
            layers=layers,
            encoding=self.encoding,
            row_parts_bytes=self.parts,
            lanes=self.lanes,
            page_alignment_bytes=self.page_alignment_bytes,
            **fields,
        )


def _growing(
    kind: ComponentKind,
    layers: Layers,
    row: RowForm,
    *,
    tokens_per_page: int,
    tokens_per_row: int = 1,
    host_capable: bool = False,
) -> Component:
    rows, rest = divmod(tokens_per_page, tokens_per_row)
    if rest:
        raise UnsupportedError(
            f"a compression rate of {tokens_per_row} does not divide a page of {tokens_per_page} tokens, so an entry "
            f"would cross pages; choose tokens_per_page as a multiple of {tokens_per_row}"
        )
    return row.component(
        kind,
        layers,
        space=IndexSpace.FULL,
        liveness=Liveness.GROWING,
        tokens_per_row=tokens_per_row,
        slots_per_page=rows,
        rows_per_logical_page=rows,
        host_capable=host_capable,
    )


def _window(layers: Layers, row: RowForm, *, window: int, tokens_per_page: int) -> Component:
    return row.component(
        ComponentKind.SWA_KV,
        layers,
        space=IndexSpace.SWA,
        liveness=Liveness.WINDOW,
        window=window,
        slots_per_page=tokens_per_page,
        rows_per_logical_page=tokens_per_page,
    )


def _geometry(name: str, layer_count: int, tokens_per_page: int, components: list[Component]) -> ModelGeometry:
    return ModelGeometry(
        name=name, layer_count=layer_count, tokens_per_page=tokens_per_page, components=tuple(components)
    )


# ---------------------------------------------------------------------------------------------- DeepSeek-V4


class V4Dimensions(FrozenModel):
    """What decides the form of a DeepSeek-V4 model's cache.

    Every layer attends to its last `window` tokens; a sparse layer also to one compressed entry for each `sparse_rate`
    tokens that its indexer picks from, a heavy layer to one for each `heavy_rate` tokens.
    """

    layer_count: Positive
    sparse_layers: Layers
    heavy_layers: Layers
    window: Positive
    head_dim: Positive
    rope_dim: Positive
    """How many of the `head_dim` values carry the position; they are never quantised."""
    index_head_dim: Positive
    sparse_rate: Positive
    heavy_rate: Positive
    tokens_per_page: Positive


def fp8_indexer_row(index_head_dim: int) -> RowForm:
    """Return the form of fp8 indexer keys: their values, then one fp32 scale for each 128 of them."""
    if index_head_dim % FP8_INDEXER_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_indexer scales groups of {FP8_INDEXER_SCALED_VALUES} values, but index_head_dim is {index_head_dim}; "
            "use the native encoding"
        )
    return RowForm(
        encoding=Encoding.FP8_INDEXER, parts=(index_head_dim, 4 * (index_head_dim // FP8_INDEXER_SCALED_VALUES))
    )


def v4_geometry(
    name: str, dimensions: V4Dimensions, *, encoding: Encoding, native_dtype_bytes: int = 4
) -> ModelGeometry:
    """Return the geometry of a DeepSeek-V4 model.

    `fp8_v4` is the production form: fp8 values with scales apart, fp8 indexer keys, fp32 compressor states. `native` is the form in
    which the model itself computes: plain rows of `native_dtype_bytes` a value, nothing padded. Raises UnsupportedError for another
    encoding, for dimensions that are not whole numbers of scaled groups, and for a compression rate that does not divide the page.
    """
    value_bytes, state_encoding = native_dtype_bytes, encoding
    match encoding:
        case Encoding.NATIVE:
            row = RowForm(encoding=encoding, parts=(dimensions.head_dim * value_bytes,))
            index = RowForm(encoding=encoding, parts=(dimensions.index_head_dim * value_bytes,))
        case Encoding.FP8_V4:
            row, index = _fp8_row(dimensions), fp8_indexer_row(dimensions.index_head_dim)
            value_bytes, state_encoding = 4, Encoding.FP32
        case _:
            raise UnsupportedError(f"encoding '{encoding}' does not exist for DeepSeek-V4: use native or fp8_v4")

    def state(kind: ComponentKind, layers: Layers, values: int, **fields: Any) -> Component:  # noqa: ANN401
        form = RowForm(encoding=state_encoding, parts=(values * value_bytes,))
        return form.component(kind, layers, liveness=Liveness.TAIL, **fields)

    page, sparse, heavy = dimensions.tokens_per_page, dimensions.sparse_layers, dimensions.heavy_layers
    rate, components = dimensions.sparse_rate, []
    if sparse:
        # An entry is pooled from its own block and the one before it, each with its own half of the features, so a state row is
        # [kv a | kv b | score a | score b].
        ring: dict[str, Any] = {"space": IndexSpace.SWA, "block": rate, "overlap": 1}
        ring |= {"slots_per_page": min(2 * rate, page), "rows_per_logical_page": page}
        components += [
            # Decode reads only the entries that the indexer picks, so these alone can be far away.
            _growing(ComponentKind.C4_KV, sparse, row, tokens_per_page=page, tokens_per_row=rate, host_capable=True),
            _growing(ComponentKind.C4_INDEXER, sparse, index, tokens_per_page=page, tokens_per_row=rate),
            state(ComponentKind.C4_STATE, sparse, 4 * dimensions.head_dim, **ring),
            state(ComponentKind.C4_INDEXER_STATE, sparse, 4 * dimensions.index_head_dim, **ring),
        ]
    rate = dimensions.heavy_rate
    if heavy:
        # Blocks do not overlap, so a state row is [kv | score].
        slot: dict[str, Any] = {"space": IndexSpace.REQUEST, "block": rate}
        slot |= {"slots_per_page": rate, "rows_per_logical_page": rate * ENDLESS_PAGES}
        components += [
            _growing(ComponentKind.C128_KV, heavy, row, tokens_per_page=page, tokens_per_row=rate),
            state(ComponentKind.C128_STATE, heavy, 2 * dimensions.head_dim, **slot),
        ]
    everywhere = tuple(range(dimensions.layer_count))
    components.append(_window(everywhere, row, window=dimensions.window, tokens_per_page=page))
    return _geometry(name, dimensions.layer_count, page, components)


def _fp8_row(dimensions: V4Dimensions) -> RowForm:
    """With head_dim 512 and rope_dim 64 a row is 576 + 8 bytes."""
    plain = dimensions.head_dim - dimensions.rope_dim
    if plain <= 0 or plain % FP8_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_v4 scales groups of {FP8_SCALED_VALUES} values, but head_dim {dimensions.head_dim} - rope "
            f"{dimensions.rope_dim} leaves {plain}; use the native encoding"
        )
    value_bytes = plain + 2 * dimensions.rope_dim
    scale_bytes = -(-(plain // FP8_SCALED_VALUES) // FP8_SCALE_ROW_BYTES) * FP8_SCALE_ROW_BYTES
    return RowForm(encoding=Encoding.FP8_V4, parts=(value_bytes, scale_bytes), page_alignment_bytes=value_bytes)


# ---------------------------------------------------------------------------------------------- others


def latent_geometry(
    name: str, *, layer_count: int, latent: RowForm, indexer: RowForm | None, tokens_per_page: int
) -> ModelGeometry:
    """Return the geometry of a latent-attention model (DeepSeek-V2, V3), with `indexer` of a sparse one (V3.2).

    Only a sparse model's latents can live in the host pool: a dense one reads all of them at each step.
    """
    layers, sparse = tuple(range(layer_count)), indexer is not None
    components = [_growing(ComponentKind.MLA_KV, layers, latent, tokens_per_page=tokens_per_page, host_capable=sparse)]
    if indexer is not None:
        components.append(_growing(ComponentKind.DSA_INDEXER, layers, indexer, tokens_per_page=tokens_per_page))
    return _geometry(name, layer_count, tokens_per_page, components)


def grouped_geometry(
    name: str, layer_count: int, *, sliding: Layers, window: int, row: RowForm, tokens_per_page: int
) -> ModelGeometry:
    """Return the geometry of a model whose KV is sharded by head: one lane a KV head, `row` is K then V of one head.

    `sliding`: the layers that keep only their last `window` tokens.
    """
    full = tuple(sorted(set(range(layer_count)) - set(sliding)))
    components = [_growing(ComponentKind.MHA_KV, full, row, tokens_per_page=tokens_per_page)] if full else []
    if sliding:
        components.append(_window(sliding, row, window=window, tokens_per_page=tokens_per_page))
    return _geometry(name, layer_count, tokens_per_page, components)
