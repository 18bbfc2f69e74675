"""The tensors of several KV cache groups, as tensors of whole pages.

vLLM lays groups over each other: a block id has one owner at a time, and the owner's layers use the block's bytes as they like. A
page is therefore moved as bytes, whichever group it belongs to. Where layers are outermost in memory, the layers of all groups that
begin at one address are a *slot*, and a page has a part in each slot. Where blocks are outermost, a page is one *row* of all
layers.

The heads of a block can be split otherwise on the other side only if the blocks of all groups are made of equally many heads,
outermost in memory. Otherwise a page belongs to one tensor-parallel rank as a whole, like the states of Mamba, which each rank
keeps a part of; or to all of them, like latent vectors, which each rank has.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kvbridge.engine.kit.node import refuse
from kvbridge.engine.kit.tensors import BLOCKS, HEADS, TOKENS, layer_number
from kvbridge.engine.vllm.groups import CacheGroups

SPLIT = "kv_cache_split"
"""Fact: how pages are spread over tensor-parallel ranks."""


class Pages(NamedTuple):
    """The KV cache of a rank, as `kit.tensors` takes it."""

    tensors: Mapping[str, torch.Tensor]
    kv_heads: int
    """Heads of the pages of all ranks."""
    latent: bool
    """Whether every rank has the same pages."""
    facts: Mapping[str, str]


def rank_pages(
    tensors: Mapping[str, torch.Tensor], groups: CacheGroups, *, kv_heads: int, latent: bool, tp_size: int
) -> Pages:
    """Read the tensors of a rank, by layer name. `kv_heads` and `latent`: of the model.

    The tensors of one group of full attention are returned as they are. Others become uint8 [blocks, heads, page tokens, bytes]
    over the same memory, named by the first layer of their slot. Raises UnsupportedError for tensors that are laid out otherwise.
    """
    forms = {(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors.values()}
    if not tensors or (groups.is_plain and len(forms) == 1):
        return Pages(tensors, kv_heads, latent, {})
    slots, page_bytes = _slots(tensors, groups.blocks)
    latent = latent and not groups.has_states
    heads = _heads(tensors, page_bytes)
    if not latent and not groups.has_states and heads == max(1, kv_heads // tp_size):
        split = "by heads"
    elif latent:
        heads, split = 1, "the same on all ranks"
    else:
        heads, kv_heads, split = 1, tp_size, f"whole pages of each of {tp_size} tensor-parallel ranks"
    tokens = groups.page_tokens
    content, rest = divmod(page_bytes, heads * tokens)
    if rest:
        refuse(f"pages of {page_bytes} bytes are not {tokens} tokens of {heads} heads")
    shape = (groups.blocks, heads, tokens, content)
    pages = {name: _bytes_at(tensor, shape) for name, tensor in slots.items()}
    return Pages(pages, kv_heads, latent, {SPLIT: split})


def _slots(tensors: Mapping[str, torch.Tensor], blocks: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return a tensor at the beginning of each slot, by the slot's first layer, and the bytes of a page in each slot."""
    strides, ends = set[int](), list[int]()
    starting = defaultdict[int, list[str]](list)
    for name, tensor in tensors.items():
        if tensor.shape[BLOCKS] != blocks:
            refuse(
                f"the KV cache '{name}' has {tensor.shape[BLOCKS]} blocks in memory, and {blocks} for the scheduler: set "
                "--block-size to the tokens of a block that its attention backend computes with"
            )
        strides.add(tensor.stride(BLOCKS) * tensor.element_size())
        starting[tensor.data_ptr()].append(name)
        ends.append(tensor.data_ptr() + _span(tensor))
    stride, starts = min(strides), sorted(starting)
    if len(strides) > 1:
        refuse(
            f"blocks of its layers are {sorted(strides)} bytes apart in memory, where all layers have to share them: set "
            "VLLM_KV_CACHE_LAYOUT=BLHNC"
        )
    if max(ends) - starts[0] <= stride:  # blocks are outermost
        return {min(tensors, key=layer_number): tensors[starting[starts[0]][0]]}, max(ends) - starts[0]
    for start, following in itertools.pairwise(starts):
        if following - start < stride * blocks:
            names = ", ".join(sorted(starting[start] + starting[following]))
            refuse(f"the KV caches {names} overlap in part: set VLLM_KV_CACHE_LAYOUT=LBHNC or BLHNC")
    return {min(names, key=layer_number): tensors[names[0]] for names in starting.values()}, stride


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes of memory from the beginning of a block to its end."""
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in inner)) * tensor.element_size()


def _heads(tensors: Mapping[str, torch.Tensor], page_bytes: int) -> int:
    """Return of how many heads, one after another, the pages of all layers are made; 0 when they are not."""
    found = set[int]()
    for tensor in tensors.values():
        heads = tensor.shape[HEADS]
        is_whole = tensor[0].numel() * tensor.element_size() == _span(tensor) == page_bytes
        is_outermost = heads == 1 or tensor.stride(HEADS) > tensor.stride(TOKENS)
        found.add(heads if is_whole and is_outermost else 0)
    return found.pop() if len(found) == 1 else 0


def _bytes_at(tensor: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Return uint8 of this shape from the tensor's address on, its blocks as far apart as the tensor's."""
    _, _, tokens, content = shape
    width = tensor.element_size()
    strides = (tensor.stride(BLOCKS) * width, tokens * content, content if tokens > 1 else 1, 1)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided(shape, strides, tensor.storage_offset() * width)
