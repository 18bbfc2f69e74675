"""The order of a prompt's blocks in its room, against what vLLM's cache managers keep and what its attention reads."""

import itertools
from collections.abc import Sequence

from hypothesis import given, strategies as st

from kvbridge.engine.vllm.groups import NULL_BLOCK, CacheGroup, CacheGroups, GroupKind
from tests.helpers import examples

TOKENS = st.integers(1, 300)
SIZES = st.sampled_from([4, 8, 16, 32])


@st.composite
def group(draw: st.DrawFn) -> CacheGroup:
    kind = draw(st.sampled_from(GroupKind))
    reach = draw(st.integers(1, 70)) if kind in {GroupKind.WINDOW, GroupKind.CHUNK} else 0
    return CacheGroup(kind, draw(SIZES), reach)


GROUPS = st.lists(group(), min_size=1, max_size=4).map(tuple)


def kept(groups: Sequence[CacheGroup], tokens: int) -> list[list[int]]:
    """Return the blocks of a request after so many tokens as vLLM lists them: from the first on, null where nothing is needed.

    Blocks that a lookahead may need follow.
    """
    ids = itertools.count(1)
    skipped = {
        GroupKind.WINDOW: lambda one: max(0, tokens - one.reach + 1),
        GroupKind.CHUNK: lambda one: tokens // one.reach * one.reach,
        GroupKind.STATE: lambda _: tokens - 1,
    }
    found = []
    for one in groups:
        first = skipped.get(one.kind, lambda _: 0)(one) // one.block_tokens
        count = 1 if one.kind is GroupKind.RING else max(first, -(-tokens // one.block_tokens))
        found.append([NULL_BLOCK] * first + [next(ids) for _ in range(count - first)])
        if one.kind is not GroupKind.RING:
            found[-1].append(next(ids))
    return found


def read(one: CacheGroup, tokens: int) -> set[int]:
    """Return the tokens whose blocks the next token reads."""
    first = {GroupKind.WINDOW: max(0, tokens - one.reach + 1), GroupKind.CHUNK: tokens // max(1, one.reach) * one.reach}
    return set(range(first.get(one.kind, 0), tokens))


@given(GROUPS, TOKENS)
@examples.more(2)
def test_a_room_has_every_block_that_the_next_token_reads_once_and_no_null_block(groups, tokens):
    order, lists = CacheGroups(groups, {}).of(tokens), kept(groups, tokens)
    picked = order.pick(lists)
    assert len(picked) == len(order) == len(set(picked))
    for one, blocks in zip(groups, lists, strict=True):
        if one.holds_tokens:
            needed = {blocks[token // one.block_tokens] for token in read(one, tokens)}
        else:
            needed = {blocks[0 if one.kind is GroupKind.RING else (tokens - 1) // one.block_tokens]}
        assert needed <= set(picked)
        assert NULL_BLOCK not in needed


@given(GROUPS, TOKENS, st.data())
@examples.more(2)
def test_blocks_of_a_cached_prefix_are_the_first_ones_and_all_others_hold_later_tokens(groups, tokens, data):
    made = CacheGroups(groups, {})
    cached = data.draw(st.integers(0, tokens // made.block_tokens)) * made.block_tokens
    order, lists = made.of(tokens), kept(groups, tokens)
    prefix = order.within(cached)
    ends = {
        block: (number + 1) * one.block_tokens if one.holds_tokens else 10**9
        for one, blocks in zip(groups, lists, strict=True)
        for number, block in enumerate(blocks)
    }
    assert all(ends[block] <= cached for block in order.pick(lists, 0, prefix))
    assert all(ends[block] - cached >= 4 for block in order.pick(lists, prefix))


@given(GROUPS, TOKENS, TOKENS)
@examples.more(2)
def test_what_is_published_while_a_prompt_is_computed_is_there_and_stays(groups, some, more):
    """Blocks that end within the first tokens are in vLLM's lists when these tokens are computed, and until the last one is."""
    now, tokens = sorted((some, more))
    order = CacheGroups(groups, {}).of(tokens)
    final = order.within(now)
    assert len(order.pick(kept(groups, now), 0, final)) == final


def test_a_block_that_is_not_there_ends_what_is_picked():
    order = CacheGroups((CacheGroup(GroupKind.FULL, 4), CacheGroup(GroupKind.WINDOW, 4, 8)), {}).of(12)
    assert order.pick(([1, 2, 3], [0, 5, 6])) == (1, 2, 5, 3, 6)
    assert order.pick(([1, 2, 3], [0, 0, 6])) == (1, 2)
    assert order.pick(([1], [])) == (1,)


def test_a_last_token_is_left_out_where_there_is_a_window_or_a_state():
    full = CacheGroup(GroupKind.FULL, 16)
    plain = CacheGroups((full,), {})
    assert (plain.is_plain, plain.step_back, plain.tokens(33), plain.page_tokens, len(plain.of(33))) == (
        True,
        0,
        33,
        16,
        3,
    )
    for kind in set(GroupKind) - {GroupKind.FULL}:
        mixed = CacheGroups((CacheGroup(kind, 48, 5), full), {})
        assert (mixed.is_plain, mixed.step_back, mixed.tokens(33), mixed.tokens(1), mixed.page_tokens) == (
            False,
            1,
            32,
            0,
            1,
        )
        assert mixed.block_tokens == (48 if mixed.groups[0].holds_tokens else 16)
