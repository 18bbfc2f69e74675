"""Tensors of several cache groups over the same memory: whole pages cross, and nothing else of the other side changes."""

from dataclasses import dataclass

import pytest
import torch

from kvbridge.core.errors import FingerprintMismatchError, UnsupportedError
from kvbridge.core.ids import Rank
from kvbridge.engine.kit.tensors import InstanceCache, instance_cache, rank_cache
from kvbridge.engine.vllm import VLLM
from kvbridge.engine.vllm.groups import CacheGroup, CacheGroups, GroupKind
from kvbridge.engine.vllm.pages import SPLIT, rank_pages
from tests.unit.engine import test_vllm_tensors as plain

BLOCKS, TOKENS, PAGE = 7, 4, 4 * 64
FULL, WINDOW = CacheGroup(GroupKind.FULL, TOKENS), CacheGroup(GroupKind.WINDOW, TOKENS, 6)
STATE = CacheGroup(GroupKind.STATE, 1024)
Tensors = dict[str, torch.Tensor]


def name_of(layer: int, kind: str = "attn") -> str:
    return f"model.layers.{layer}.{kind}"


def pool(slots: int, row_bytes: int, *, blocks_outermost: bool = False) -> torch.Tensor:
    """The memory of all blocks: uint8 [slots, blocks, bytes of a page]."""
    sizes = (BLOCKS, slots, row_bytes) if blocks_outermost else (slots, BLOCKS, row_bytes)
    memory = torch.empty(sizes, dtype=torch.uint8).random_(0, 256)
    return memory.transpose(0, 1) if blocks_outermost else memory


def seen(page: torch.Tensor, heads: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One layer's cache over a slot: [blocks, heads, tokens, content]."""
    width = torch.empty(0, dtype=dtype).element_size()
    content = page.shape[1] // (heads * tokens * width)
    dense = page[:, : heads * tokens * content * width]
    strides = (page.stride(0) // width, tokens * content, content, 1)
    return dense.view(dtype).as_strided((BLOCKS, heads, tokens, content), strides)


def windows(tp: int, *, tokens: int = TOKENS) -> Tensors:
    """Layers 0, 2 with windows and 1, 3 without, in two slots."""
    memory = pool(2, PAGE // tp)
    return {name_of(2 * slot + of): seen(memory[slot], 4 // tp, tokens) for slot in range(2) for of in range(2)}


def states(tp: int) -> Tensors:
    """Layers 0, 1 and 2 with padded states, and layer 3 with attention, all in one slot."""
    [page] = pool(1, PAGE)
    state = page.view(torch.int8).as_strided((BLOCKS, 1, 1, PAGE - 10), (PAGE, PAGE - 10, PAGE - 10, 1))
    return {**{name_of(layer, "mamba"): state for layer in range(3)}, name_of(3): seen(page, 2 // tp, TOKENS)}


def rows(tp: int) -> Tensors:
    """Blocks are outermost: two layers of one size, and over them three of other sizes."""
    memory = pool(1, 200, blocks_outermost=True)[0]
    at = lambda start, size: memory[:, start:].as_strided((BLOCKS, 1, 1, size), (200, size, size, 1), start)  # noqa: E731
    large = {name_of(layer): at(90 * layer, 90) for layer in range(2)}
    return large | {name_of(layer, "small"): at(60 * layer, 60) for layer in range(3)}


@dataclass
class Instance(plain.Instance):
    @classmethod
    def of(cls, make, groups, tp: int, *, kv_heads: int = 4, latent: bool = False) -> "Instance":
        made = CacheGroups(groups, {"kv_groups": "alike"}, BLOCKS)
        ranks = [Rank(pp=0, tp=number) for number in range(tp)]
        pages = {rank: rank_pages(make(tp), made, kv_heads=kv_heads, latent=latent, tp_size=tp) for rank in ranks}
        told = {
            rank: rank_cache(one.tensors, block_tokens=made.page_tokens, product=VLLM) for rank, one in pages.items()
        }
        first = pages[ranks[0]]
        cache: InstanceCache = instance_cache(
            told, name="m", kv_heads=first.kv_heads, latent=first.latent, facts={**made.facts, **first.facts}
        )
        return cls({rank: dict(one.tensors) for rank, one in pages.items()}, cache, tp, 1)

    @property
    def split(self) -> str:
        return self.cache.geometry.facts[SPLIT]


SHAPES = {
    "windows": (windows, (WINDOW, FULL), {}, "by heads", 2),
    "states": (
        states,
        (STATE, STATE, STATE, FULL),
        {"kv_heads": 2},
        "whole pages of each of 1 tensor-parallel ranks",
        1,
    ),
    "rows": (rows, (FULL, WINDOW), {"kv_heads": 1, "latent": True}, "the same on all ranks", 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_all_bytes_of_a_room_cross_whoever_owns_its_blocks_and_no_others(shape: str) -> None:
    make, groups, model, split, regions = SHAPES[shape]
    source, target = (Instance.of(make, groups, 1, **model) for _ in range(2))
    assert source.split == split
    assert source.cache == target.cache
    before = [tensor.clone() for held in target.tensors.values() for tensor in held.values()]
    assert len(before) == regions
    plain.move(source, target, tokens=3, prefix_tokens=1, chunk=1)
    [sent], [arrived] = source.tensors.values(), target.tensors.values()
    for (name, theirs), old in zip(sent.items(), before, strict=True):
        for number in range(BLOCKS):
            moved = dict(zip(plain.TARGET_PAGES[1:], plain.SOURCE_PAGES[1:], strict=True))
            expected = theirs[moved[number]] if number in moved else old[number]
            assert torch.equal(arrived[name][number], expected), f"{name}, block {number}"


def test_heads_of_all_groups_are_split_otherwise_and_whole_pages_are_not() -> None:
    source, target = Instance.of(windows, (WINDOW, FULL), 2), Instance.of(windows, (WINDOW, FULL), 1)
    assert source.cache.geometry == target.cache.geometry
    plain.move(source, target, tokens=3)
    [whole] = target.tensors.values()
    for name, tensor in whole.items():
        for theirs, ours in zip(plain.SOURCE_PAGES, plain.TARGET_PAGES, strict=True):
            assert torch.equal(torch.cat([held[name][theirs] for held in source.tensors.values()]), tensor[ours])
    halves = [Instance.of(states, (STATE,) * 3 + (FULL,), tp, kv_heads=2) for tp in (1, 2)]
    with pytest.raises(FingerprintMismatchError):
        plain.move(*halves, tokens=3)
    assert [one.split[:19] for one in halves] == ["whole pages of each"] * 2
    assert halves[0].split != halves[1].split, "the difference is told in words"


def test_one_group_of_layers_that_differ_is_moved_as_rows_of_so_many_tokens() -> None:
    made = CacheGroups((CacheGroup(GroupKind.FULL, 5),), {}, BLOCKS)
    pages = rank_pages(rows(1), made, kv_heads=1, latent=True, tp_size=1)
    assert [tuple(tensor.shape) for tensor in pages.tensors.values()] == [(BLOCKS, 1, 5, 36)]
    with pytest.raises(UnsupportedError, match="pages of 180 bytes are not 7 tokens"):
        rank_pages(
            rows(1), CacheGroups((CacheGroup(GroupKind.FULL, 7),), {}, BLOCKS), kv_heads=1, latent=True, tp_size=1
        )


def test_the_tensors_of_one_group_are_as_they_are() -> None:
    held, made = windows(1), CacheGroups((FULL,), {}, BLOCKS)
    assert rank_pages(held, made, kv_heads=4, latent=False, tp_size=1).tensors is held


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda held: held | {name_of(3): held[name_of(3)][:-1]}, "has 6 blocks in memory, and 7 for the scheduler"),
        (lambda held: held | {name_of(3): torch.empty(BLOCKS, 4, TOKENS, 9)}, "bytes apart in memory"),
        (
            lambda held: held | {name_of(3): held[name_of(0)].as_strided((BLOCKS, 4, TOKENS, 8), (128, 32, 8, 1), 128)},
            "overlap in part",
        ),
    ],
)
def test_tensors_that_do_not_share_blocks_are_refused_in_words(change, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        rank_pages(change(windows(1)), CacheGroups((WINDOW, FULL), {}, BLOCKS), kv_heads=4, latent=False, tp_size=1)


def test_pages_are_named_by_the_first_layer_of_their_slot() -> None:
    made = CacheGroups((WINDOW, FULL), {}, BLOCKS)
    pages = rank_pages(windows(1), made, kv_heads=4, latent=False, tp_size=1)
    assert sorted(pages.tensors) == [name_of(0), name_of(2)]
    assert {tuple(tensor.shape) for tensor in pages.tensors.values()} == {(BLOCKS, 4, 1, PAGE // 4)}
