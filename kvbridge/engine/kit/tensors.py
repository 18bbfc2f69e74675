"""An engine's KV cache tensors: a geometry from their shapes and strides, and regions at their addresses.

The engine has one tensor for each attention layer of a rank, logically [blocks, KV heads, tokens of a block, content], in any order
of memory, which the strides show. A block is a page. When the heads are outermost in a block, a head is a lane, and the other side
may split ranks otherwise. When they are not, a rank's part of a block is one lane, and both sides need as many tensor-parallel
ranks. Blocks are moved whole: facts in the fingerprint must tell the order inside one head's part of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import Region, lane_interval
from kvbridge.core.ids import FrozenModel, IndexSpace, Positive, Rank
from kvbridge.engine.kit import Product
from kvbridge.engine.memory import adopted_region

BLOCKS, HEADS, TOKENS, CONTENT = range(4)


class BlockForm(FrozenModel):
    """The form of all blocks of a rank's layers; the same on every rank of an instance."""

    heads: Positive
    """KV heads of this rank; 1 for latent attention."""
    tokens: Positive
    content_bytes: Positive
    """Bytes of key and value of one token and head, or of the latent vector of one token."""
    heads_outermost: bool
    dtype: str

    @property
    def bytes(self) -> int:
        return self.heads * self.tokens * self.content_bytes


class RankCache(FrozenModel):
    """The cache of one rank, as its worker describes it to the scheduler's process."""

    form: BlockForm
    layers: tuple[int, ...]
    """Global layer numbers, ascending."""


@dataclass(frozen=True)
class InstanceCache:
    """The cache of a whole instance."""

    geometry: ModelGeometry
    stage_boundaries: tuple[int, ...]
    """First layer of each pipeline stage but the first."""
    in_host: frozenset[ComponentKind] = frozenset()
    """Components that the engine keeps in host memory on decode."""


def layer_number(name: str) -> int:
    """Return the global number of a layer named as `model.layers.12.self_attn.attn`. Raises UnsupportedError."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedError(f"the KV cache '{name}' has {len(numbers)} numbers in its name: its layer is not known")
    return numbers[0]


def rank_cache(tensors: Mapping[str, torch.Tensor], *, block_tokens: int, product: Product) -> RankCache:
    """Read a rank's tensors, by layer name. `block_tokens`: the block size of the engine's scheduler.

    Raises UnsupportedError, in words for the person who starts the engine, for tensors that cannot be moved block by block.
    """
    if not tensors:
        raise UnsupportedError(f"{product.name} has registered no KV cache: there is nothing to transfer")
    layers = sorted((layer_number(name), name) for name in tensors)
    forms = {name: _form(name, tensor, block_tokens, product) for name, tensor in tensors.items()}
    counts = {name: tensor.shape[BLOCKS] for name, tensor in tensors.items()}
    first = layers[0][1]
    for number, name in layers:
        if (forms[name], counts[name]) != (forms[first], counts[first]):
            raise UnsupportedError(
                f"the KV caches of layers are not all alike: '{first}' has {counts[first]} blocks of {forms[first]}, '{name}' has "
                f"{counts[name]} of {forms[name]}; models with several kinds of KV cache are not supported"
            )
        if sum(number == other for other, _ in layers) > 1:
            raise UnsupportedError(f"layer {number} has more than one KV cache, '{name}' among them: not supported")
    return RankCache(form=forms[first], layers=tuple(number for number, _ in layers))


def _form(name: str, tensor: torch.Tensor, block_tokens: int, product: Product) -> BlockForm:
    if tensor.ndim != 4:
        raise UnsupportedError(
            f"the KV cache '{name}' has the shape {tuple(tensor.shape)}, where attention has [blocks, KV heads, tokens, content]; "
            "state space layers and the like are not supported"
        )
    _, heads, tokens, content = tensor.shape
    if tokens != block_tokens:
        raise UnsupportedError(
            f"the blocks of KV cache '{name}' have {tokens} tokens in memory, and {block_tokens} for the scheduler; start "
            f"{product.name} with {product.block_option} {tokens}"
        )
    form = BlockForm(
        heads=heads,
        tokens=tokens,
        content_bytes=content * tensor.element_size(),
        heads_outermost=heads == 1 or tensor.stride(HEADS) > tensor.stride(TOKENS),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
    inner = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in (HEADS, TOKENS, CONTENT) if tensor.shape[dim] > 1)
    dense = 1
    for stride, size in inner:
        if stride != dense:
            break
        dense *= size
    if dense != heads * tokens * content or tensor.stride(BLOCKS) < dense:
        raise UnsupportedError(
            f"a block of the KV cache '{name}' is not one stretch of memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}); set {product.layout_option}"
        )
    return form


def instance_cache(
    ranks: Mapping[Rank, RankCache], *, name: str, kv_heads: int, latent: bool = False, facts: Mapping[str, str]
) -> InstanceCache:
    """Build the geometry of an instance from the caches of all its ranks.

    `kv_heads`: those of the whole model. `latent`: each token has one vector for all heads, the same on every rank. `facts`: what
    else must be equal on both sides, by name. Raises UnsupportedError, InvalidInputError when the ranks are no whole instance.
    """
    pp_size, tp_size = (1 + max(getattr(rank, axis) for rank in ranks) for axis in ("pp", "tp"))
    stages = [_stage(ranks, pp, tp_size) for pp in range(pp_size)]
    form = ranks[Rank(pp=0, tp=0)].form
    for rank, cache in ranks.items():
        if cache.form != form:
            raise UnsupportedError(f"blocks are not alike: rank {rank} has {cache.form}, rank pp0.tp0 {form}")
    layers = tuple(layer for stage in stages for layer in stage)
    if list(layers) != sorted(set(layers)):
        raise UnsupportedError(f"the layers of the pipeline stages overlap or are not in order: {stages}")
    component = cache_component(form, layers, kv_heads=kv_heads, latent=latent, tp_size=tp_size)
    order = "outermost in a block" if form.heads_outermost or latent else "of one rank only"
    return InstanceCache(
        ModelGeometry(
            name=name,
            layer_count=layers[-1] + 1,
            tokens_per_page=form.tokens,
            components=(component,),
            facts={**facts, "kv_dtype": form.dtype, "kv_heads": f"{kv_heads}, {order}"},
        ),
        stage_boundaries=tuple(stage[0] for stage in stages[1:]),
    )


def cache_component(
    form: BlockForm, layers: tuple[int, ...], *, kv_heads: int, latent: bool, tp_size: int
) -> Component:
    """Return the component of these layers. `kv_heads` and `latent`: as for `instance_cache`. Raises UnsupportedError."""
    by_heads = form.heads_outermost or latent
    component = Component(
        kind=ComponentKind.MLA_KV if latent else ComponentKind.MHA_KV,
        layers=layers,
        space=IndexSpace.FULL,
        encoding=Encoding.NATIVE,
        liveness=Liveness.GROWING,
        row_parts_bytes=(form.content_bytes if by_heads else form.heads * form.content_bytes,),
        slots_per_page=form.tokens,
        rows_per_logical_page=form.tokens,
        lanes=1 if latent else kv_heads if by_heads else tp_size,
    )
    start, stop = lane_interval(component, 0, tp_size)
    if component.page_bytes(stop - start) != form.bytes:
        raise UnsupportedError(
            f"a rank has blocks of {form}, which are not {kv_heads} KV heads over {tp_size} tensor-parallel ranks"
        )
    return component


def _stage(ranks: Mapping[Rank, RankCache], pp: int, tp_size: int) -> tuple[int, ...]:
    found = {ranks[rank].layers for rank in (Rank(pp=pp, tp=tp) for tp in range(tp_size)) if rank in ranks}
    present = sum(rank.pp == pp for rank in ranks)
    if present != tp_size or len(found) != 1:
        raise InvalidInputError(
            f"of pipeline stage {pp} {present} of {tp_size} ranks have told of their caches, with layers {sorted(found)}: all of "
            "them have to, with the same layers"
        )
    return found.pop()


def rank_regions(
    component: Component, tensors: Mapping[str, torch.Tensor], rank: Rank, *, tp_size: int
) -> list[Region]:
    """Describe the tensors of a rank. `component`: the geometry's, or the rank's own `cache_component`."""
    lanes = lane_interval(component, rank.tp, tp_size)
    return [
        adopted_region(component, layer_number(name), block_bytes(tensor), lanes=lanes)
        for name, tensor in sorted(tensors.items(), key=lambda item: layer_number(item[0]))
    ]


def block_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a KV cache as uint8 [blocks, bytes of a block] over the same memory, whatever the order inside a block."""
    width, storage = tensor.element_size(), tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    size = (tensor.shape[BLOCKS], tensor[0].numel() * width)
    return flat.as_strided(size, (tensor.stride(BLOCKS) * width, 1), tensor.storage_offset() * width)
