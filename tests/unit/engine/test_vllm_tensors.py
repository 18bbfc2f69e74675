"""Tensors of vLLM's shapes: read, planned between instances that are split otherwise, and compared byte by byte."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.manifest import RankManifest, check_manifest, fingerprint
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Section, add_amounts
from kvbridge.core.plan.pairing import Demand, Pairing
from kvbridge.core.plan.planner import plan
from kvbridge.engine.kit.tensors import (
    InstanceCache,
    block_bytes,
    instance_cache,
    layer_number,
    rank_cache,
    rank_regions,
)
from kvbridge.engine.vllm import VLLM
from kvbridge.pool.memory.layout import RankPart
from kvbridge.pool.memory.pools import MemoryPool
from tests.helpers.vllm_links import BLOCKS, TOKENS, caches, name_of

LAYERS = 4
HND, NHD, BLOCKS_OUTERMOST = "LBHNC", "LBNHC", "BLHNC"
FACTS = {"attention_backend": "CPU_ATTN"}
SOURCE_PAGES, TARGET_PAGES = [5, 0, 3], [2, 6, 1]


@dataclass
class Instance:
    """All ranks of an instance: their tensors and its description."""

    tensors: dict[Rank, dict[str, torch.Tensor]]
    cache: InstanceCache
    tp: int
    pp: int

    @classmethod
    def make(cls, *, tp, pp=1, kv_heads=4, content=6, order=HND, latent=False):
        each = LAYERS // pp
        heads = 1 if latent else max(1, kv_heads // tp)
        ranks = [Rank(pp=stage, tp=number) for stage in range(pp) for number in range(tp)]
        tensors = {rank: caches(range(rank.pp * each, (rank.pp + 1) * each), heads, content, order) for rank in ranks}
        for rank in ranks:  # ranks that hold the same heads hold the same bytes
            shared = 0 if latent else rank.tp * kv_heads // tp * max(1, tp // kv_heads)
            if latent or tp > kv_heads:
                for name, tensor in tensors[rank].items():
                    tensor.copy_(tensors[Rank(pp=rank.pp, tp=shared)][name])
        told = {rank: rank_cache(held, block_tokens=TOKENS, product=VLLM) for rank, held in tensors.items()}
        cache = instance_cache(told, name="tiny", kv_heads=kv_heads, latent=latent, facts=FACTS)
        return cls(tensors, cache, tp, pp)

    def manifest(self, rank: Rank) -> RankManifest:
        geometry, boundaries = self.cache.geometry, self.cache.stage_boundaries
        part = RankPart.of(geometry, rank, pp_size=self.pp, tp_size=self.tp, boundaries=boundaries)
        regions = MemoryPool.adopted(
            geometry, part, rank_regions(geometry.components[0], self.tensors[rank], rank, tp_size=self.tp)
        ).regions
        manifest = RankManifest(
            fingerprint=fingerprint(geometry), rank=rank, pp_size=self.pp, tp_size=self.tp, regions=regions
        )
        check_manifest(manifest, geometry)
        return manifest

    def manifests(self) -> list[RankManifest]:
        return [self.manifest(rank) for rank in self.tensors]

    def whole(self, layer: int, block: int, *, latent: bool, kv_heads: int) -> torch.Tensor:
        """Return a block of a layer with the heads of all ranks: [heads, tokens, content]."""
        found = [held[name_of(layer)][block] for held in self.tensors.values() if name_of(layer) in held]
        copies = self.tp if latent else max(1, self.tp // kv_heads)
        for first in range(0, len(found), copies):
            for replica in found[first : first + copies]:
                assert torch.equal(replica.view(torch.int16), found[first].view(torch.int16)), "replicas differ"
        return torch.cat(found[::copies])


def table(ids: list[int]) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32))}


def move(source: Instance, target: Instance, *, tokens: int, prefix_tokens: int = 0, chunk: int | None = None) -> None:
    """Carry out the plans of all source ranks for all target ranks, and check that they cover all that is due."""
    geometry, targets = source.cache.geometry, target.manifests()
    sent: dict = {}
    for giving in source.manifests():
        for ordinal, taking in enumerate(targets):
            pairing = Pairing.create(
                geometry, giving, taking, destination_ordinal=ordinal, destination_count=len(targets)
            )
            for start in range(0, tokens, chunk or tokens):
                section = Section(
                    prompt_tokens=tokens,
                    prefix_tokens=prefix_tokens,
                    start_token=start,
                    stop_token=min(tokens, start + (chunk or tokens)),
                )
                made = plan(pairing, section, table(SOURCE_PAGES), table(TARGET_PAGES), max_operation_bytes=1 << 20)
                sent = add_amounts(sent, made.amounts)
                operations = made.operations
                for at, to, length in zip(operations.source, operations.destination, operations.length, strict=True):
                    ctypes.memmove(int(to), int(at), int(length))
    [component] = geometry.components
    due = component.live_rows(tokens, prefix_tokens).count * Demand(geometry, targets).lanes()[component.kind]
    assert sent[component.kind].lane_rows == due


GQA, FEW_HEADS = {"kv_heads": 4, "content": 6}, {"kv_heads": 2, "content": 6}
LATENT = {"kv_heads": 1, "content": 9, "latent": True}
CASES = [
    (1, 1, 1, GQA, (HND, HND)),
    (1, 4, 1, GQA, (HND, BLOCKS_OUTERMOST)),
    (4, 1, 1, GQA, (BLOCKS_OUTERMOST, HND)),
    (4, 2, 1, GQA, (HND, HND)),
    (1, 1, 2, GQA, (HND, HND)),
    (2, 4, 2, GQA, (HND, BLOCKS_OUTERMOST)),
    (2, 4, 1, FEW_HEADS, (HND, HND)),
    (4, 1, 1, FEW_HEADS, (BLOCKS_OUTERMOST, HND)),
    (4, 4, 1, FEW_HEADS, (HND, HND)),
    (2, 2, 1, GQA, (NHD, NHD)),
    (1, 2, 1, LATENT, (HND, BLOCKS_OUTERMOST)),
    (4, 1, 1, LATENT, (HND, HND)),
    (2, 1, 2, LATENT, (HND, HND)),
]
"""Tensor-parallel ranks of either side, pipeline stages of the source, the model, and how either side lays its blocks out."""


@pytest.mark.parametrize(("theirs", "ours", "pp", "model", "orders"), CASES)
def test_every_byte_of_a_prompt_crosses_between_instances_that_are_split_otherwise(theirs, ours, pp, model, orders):
    source = Instance.make(tp=theirs, pp=pp, order=orders[0], **model)
    target = Instance.make(tp=ours, order=orders[1], **model)
    assert source.cache.geometry == target.cache.geometry
    assert source.cache.stage_boundaries == ((2,) if pp == 2 else ())
    before = {rank: {name: tensor.clone() for name, tensor in held.items()} for rank, held in target.tensors.items()}
    move(source, target, tokens=3 * TOKENS, prefix_tokens=TOKENS, chunk=TOKENS)
    facts = {"latent": model.get("latent", False), "kv_heads": model["kv_heads"]}
    for layer in range(LAYERS):
        for theirs_page, ours_page in list(zip(SOURCE_PAGES, TARGET_PAGES, strict=True))[1:]:
            sent, arrived = source.whole(layer, theirs_page, **facts), target.whole(layer, ours_page, **facts)
            assert torch.equal(sent.view(torch.int16), arrived.view(torch.int16)), f"layer {layer}, block {ours_page}"
    untouched = [block for block in range(BLOCKS) if block not in TARGET_PAGES[1:]]
    for rank, held in target.tensors.items():
        for name, tensor in held.items():
            same = torch.equal(tensor[untouched].view(torch.int16), before[rank][name][untouched].view(torch.int16))
            assert same, f"{rank} {name}: something else was written"


@pytest.mark.parametrize(("tp", "order"), [(4, NHD), (2, HND)])
def test_blocks_with_tokens_outermost_cross_between_equal_splits_only(tp, order):
    with pytest.raises(FingerprintMismatchError):
        move(Instance.make(tp=2, order=NHD, **GQA), Instance.make(tp=tp, order=order, **GQA), tokens=3 * TOKENS)


def replaced(tensors: Mapping[str, torch.Tensor], layer: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tensors, name_of(layer): tensor}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda held: {}, "has registered no KV cache"),
        (lambda held: replaced(held, 1, torch.empty(BLOCKS, 4, TOKENS, 8)), "are not all alike"),
        (
            lambda held: replaced(held, 1, torch.empty(BLOCKS + 1, 4, TOKENS, 6, dtype=torch.bfloat16)),
            "are not all alike",
        ),
        (lambda held: replaced(held, 1, torch.empty(BLOCKS, 64)), "state space layers"),
        (lambda held: {**held, "model.layers.1.mtp.attn": held[name_of(1)]}, "more than one KV cache"),
        (lambda held: {"lm.attn": held[name_of(1)]}, "has 0 numbers in its name"),
        (lambda held: {"a.1.b.2": held[name_of(1)]}, "has 2 numbers in its name"),
        (lambda held: {name: tensor[:, :, ::2] for name, tensor in held.items()}, "--block-size 2"),
        (lambda held: caches(range(2), 4, 6, "BHLNC"), "is not one stretch of memory.*VLLM_KV_CACHE_LAYOUT=HND"),
        (lambda held: caches(range(2), 4, 6, "LHBNC"), "is not one stretch of memory"),
    ],
)
def test_what_cannot_be_moved_block_by_block_is_refused_in_words(change, complaint):
    with pytest.raises(UnsupportedError, match=complaint):
        rank_cache(change(caches(range(2), 4, 6, HND)), block_tokens=TOKENS, product=VLLM)


def test_ranks_that_are_no_whole_instance_are_refused():
    told = {
        rank: rank_cache(held, block_tokens=TOKENS, product=VLLM)
        for rank, held in Instance.make(tp=2, pp=2).tensors.items()
    }
    last = Rank(pp=1, tp=1)
    with pytest.raises(InvalidInputError, match="of pipeline stage 1 1 of 2 ranks"):
        instance_cache({rank: cache for rank, cache in told.items() if rank != last}, name="m", kv_heads=4, facts={})
    with pytest.raises(InvalidInputError, match="with the same layers"):
        instance_cache(told | {last: told[Rank(pp=0, tp=1)]}, name="m", kv_heads=4, facts={})
    same = {rank: told[Rank(pp=0, tp=0)] for rank in told}
    with pytest.raises(UnsupportedError, match="overlap or are not in order"):
        instance_cache(same, name="m", kv_heads=4, facts={})
    with pytest.raises(UnsupportedError, match="which are not 8 KV heads over 2"):
        instance_cache(told, name="m", kv_heads=8, facts={})
    other = told[last].model_copy(update={"form": told[last].form.model_copy(update={"content_bytes": 14})})
    with pytest.raises(UnsupportedError, match="blocks are not alike"):
        instance_cache(told | {last: other}, name="m", kv_heads=4, facts={})


def test_a_block_is_seen_as_bytes_where_it_lies():
    for order in (HND, NHD, BLOCKS_OUTERMOST):
        [tensor] = caches(range(1), 3, 5, order).values()
        seen = block_bytes(tensor)
        assert (seen.shape, seen.data_ptr()) == ((BLOCKS, 3 * TOKENS * 5 * 2), tensor.data_ptr())
        assert seen.stride(0) == tensor.stride(0) * 2
    assert layer_number("model.layers.12.self_attn.attn") == 12
