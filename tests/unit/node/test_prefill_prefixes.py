"""Prefixes that stay on a prefill node: what a room starts from, what it leaves behind, and when."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.wire.messages import Drained
from tests.helpers.node_bench import FULL, HISTORY, PrefixBench, ids
from tests.helpers.rooms import PAGE, R0, R1


def test_keys_of_another_namespace_find_neither_pages_nor_checkpoints():
    bench = PrefixBench()
    bench.cross(1, HISTORY[:1000])
    found = bench.admit(2, HISTORY[:1000], namespace="acme")
    assert (found.computed_tokens, bench.restorable(2)) == (0, (0,))
    assert list(found.checkpoint_causes) == list(found.checkpoints) == [768], "as of a prompt of which nothing is known"
    assert bench.admit(3, HISTORY[:1000]).computed_tokens == 768


def test_a_checkpoint_that_does_not_fit_is_left_out_and_one_that_nobody_asked_for_is_refused():
    bench = PrefixBench(windows=1)
    assert bench.cross(1, HISTORY[:1000]).checkpoints == ()
    assert bench.cross(2, HISTORY[:1500]).computed_tokens == 0
    bench.admit(3, HISTORY[:1000])
    bench.begin(3, HISTORY[:1000])
    bench.publish(3, HISTORY[:1000])
    with pytest.raises(InvalidInputError, match="did not ask for"):
        bench.finish(3, (512,))


def test_a_prefix_is_pinned_until_nothing_of_the_room_is_in_flight():
    """A transport that is not quiet may still read the shared pages."""
    bench = PrefixBench(pages=8)
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1100])
    bench.offer(2, HISTORY[:1100])
    bench.begin(2, HISTORY[:1100])
    bench.verbs.abort(room=2)
    bench.closed(2, quiet=False)
    assert bench.book.available_pages()[FULL] == 8 - 5, "the prefix and its own pages"
    bench.closed(2)
    assert bench.told(Drained)
    bench.all_is_back()


def test_nodes_of_one_instance_start_at_the_same_token():
    """What they have in common is not the least of what each would start from."""
    nodes = [PrefixBench(part_of_instance=True), PrefixBench(part_of_instance=True)]
    for node, turns in zip(nodes, ((300, 600, 1500), (300, 1000)), strict=True):
        for number, length in enumerate(turns):
            node.cross(1 + number, HISTORY[:length])
    tokens = HISTORY[:2000]
    for node in nodes:
        node.admit(9, tokens)
        node.offer(9, tokens)
        assert not node.orders(room=9), "the engines have yet to agree"
    assert [node.restorable(9) for node in nodes] == [(0, 256, 512, 1280), (0, 256, 768)]
    for node in nodes:
        pages = node.begin(9, tokens, at_most=256)
        assert (pages.computed_tokens, pages.restore.tokens) == (256, 256)
        assert not set(ids(pages)[1:]) & set(node.book.cached_pages()[FULL].tolist()), "it writes nobody's pages"
        assert [order.section.stop_token for order in node.orders(room=9)] == [256]
        node.publish(9, tokens)
        node.finish(9, tuple(one.tokens for one in pages.checkpoints))
        node.all_sent(9)
        assert node.report(9).computed_tokens == 256
        node.all_is_back()
        assert node.cross(10, HISTORY[:2001]).computed_tokens == 1792


def test_ranks_of_one_node_start_at_the_same_token():
    bench = PrefixBench(ranks=(R0, R1), part_of_instance=True)
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    assert bench.begin(2, HISTORY[:1500], ranks=(R0,)).computed_tokens == 768
    with pytest.raises(ConflictError, match="on another rank"):
        bench.begin(2, HISTORY[:1500], ranks=(R1,), at_most=0)
    assert bench.begin(2, HISTORY[:1500], ranks=(R1,), at_most=1000).computed_tokens == 768


@pytest.mark.parametrize("behind", [0, 1, 128])
def test_the_same_prompt_again_computes_less_than_a_page(behind: int):
    bench, tokens = PrefixBench(), HISTORY[: 3 * PAGE + behind]
    computed = [bench.cross(room, tokens).computed_tokens for room in (1, 2, 3)]
    if behind:
        assert computed == [0, 3 * PAGE, 3 * PAGE]
    else:  # the first left one at the prompt's very end, the second where it left what it knew
        assert computed == [0, 0, 2 * PAGE]
    longer = bench.cross(4, HISTORY[: 5 * PAGE])
    assert longer.computed_tokens == 3 * PAGE, "a whole prompt is a prefix, too"
    bench.all_is_back()
