"""A real model that decodes with a hot buffer gives the very logits of the model alone in the same arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Encoding
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.engine.adapters.deepseek_v4 import Placement
from kvbridge.engine.adapters.sparse_deepseek_v4 import IndexerHooks, SparseDecoder, SparseLayer
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT, prefill_chunks
from tests.helpers.matrices import kept
from tests.helpers.sparse_model import C4, SparseModelPair, admitted, fed
from tests.helpers.tiny_model import follow, prompt_tokens

STEPS = 320


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scene():
    return SparseModelPair()


@pytest.fixture(scope="module")
def long(scene):
    """A prompt of 512 rows and one token, and the answer of the model alone."""
    prefill = scene.prefill(2049, offset=97)
    return prefill, scene.alone(prefill, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [64, kept(128, False)])
def test_hundreds_of_steps_past_many_evictions(scene, long, hot_rows):
    prefill, alone = long
    pools = scene.pools(prefill, steps=STEPS)
    with (
        scene.store(pools, hot_rows=hot_rows, max_tokens=2049 + STEPS) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        request = admitted(decoder, pools, 1, tokens=2049)
        logits = fed(decoder, request, alone.tokens)
        store.check()
        counts = store.counts(1)
    assert torch.equal(logits, alone.logits)
    assert 0 < alone.share_of_rounding < 1
    assert counts.evicted > 30 * hot_rows
    assert counts.hits > 0
    # Pages that became complete are on the host, byte for byte; what the prompt brought is untouched.
    complete = (2049 + STEPS) // 4 // 64 * 64
    assert complete > 2049 // 4
    for layer in scene.c4.layers:
        entries = scene.host_entries(pools, layer, pools.tables, start=0, stop=complete)
        assert torch.equal(entries, alone.entries(layer)[:complete])


@pytest.mark.slow
def test_quantised_rows(long):
    scene = SparseModelPair(Encoding.FP8_V4)
    prefill = scene.prefill(2049, offset=97)
    alone = scene.alone(prefill, 80)
    pools = scene.pools(prefill, steps=80)
    with (
        scene.store(pools, hot_rows=64, max_tokens=2200) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        logits = fed(decoder, admitted(decoder, pools, 0, tokens=2049), alone.tokens)
    assert torch.equal(logits, alone.logits)
    assert not torch.equal(logits, long[1].logits[:80]), "nothing was quantised"


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 127, 252, 253, 255, 256, 257, 258, 259, 260, 511, 514])
def test_the_newest_rows_are_right_from_the_first_step(scene, tokens):
    """At every remainder of a block and of a page; with as few hot rows as there can be, and nothing loaded before."""
    prefill = scene.prefill(tokens, offset=tokens)
    alone = scene.alone(prefill, 9)
    pools = scene.pools(prefill, steps=9)
    with (
        scene.store(pools, hot_rows=64, max_tokens=1024, preload_rows=0) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        logits = fed(decoder, admitted(decoder, pools, 0, tokens=tokens), alone.tokens)
        store.check()
    assert torch.equal(logits, alone.logits)


@pytest.mark.slow
def test_requests_in_turn_share_a_buffer_and_grow(scene):
    """Two requests take turns, get host pages as they grow, and a third takes over a slot and its host pages."""
    lengths, steps = (1020, 770, 515), 40
    prefills = [scene.prefill(tokens, offset=tokens) for tokens in lengths]
    answers = [scene.alone(prefill, steps) for prefill in prefills]
    pools = [scene.pools(prefill, steps=steps, seed=seed) for seed, prefill in enumerate(prefills)]
    host = scene.pools(scene.prefill(4), steps=4 * 1024, seed=9)
    ids = host.tables[IndexSpace.HOST].ids
    tables = [PageTable(IndexSpace.HOST, ids[start:stop], 0) for start, stop in pairwise([0, 5, 9])]
    tables.append(PageTable(IndexSpace.HOST, ids[1:4], 0))
    held_pages = [tokens // 256 for tokens in lengths]
    with (
        scene.store(host, hot_rows=64, max_tokens=2048) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):

        def arrive(number: int, slot: int):
            rows = lengths[number] // 4
            for layer in scene.c4.layers:
                moved = pools[number].views.read_rows(
                    C4, layer, tables=pools[number].tables, start_row=0, stop_row=rows
                )
                host.views.write_rows(C4, layer, tables={IndexSpace.HOST: tables[number]}, start_row=0, rows=moved)
            table = tables[number]
            first = PageTable(IndexSpace.HOST, table.ids[: -(-rows // 64)], 0)
            return admitted(decoder, pools[number], slot, tokens=lengths[number], host=first)

        first, second = arrive(0, 1), arrive(1, 0)
        assert store.requests.slots() == (1, 0)
        got = [[], [], []]
        for step in range(steps):
            for number, request in ((0, first), (1, second)):
                if step == 3:
                    decoder.extend(request, {IndexSpace.HOST: tables[number]})
                got[number].append(decoder.step(request, token=answers[number].tokens[step]))
        assert decoder.release(first).reached()
        third = arrive(2, 1)
        got[2] = list(fed(decoder, third, answers[2].tokens))
        store.check()
    assert held_pages == [3, 3, 2]
    for number in range(3):
        assert torch.equal(torch.stack(got[number]), answers[number].logits), f"request {number}"


@pytest.mark.slow
def test_without_a_host_page_a_step_is_refused_before_it_begins(scene):
    prefill = scene.prefill(3)
    pools = scene.pools(prefill, steps=300)
    table = pools.tables[IndexSpace.HOST]
    none = PageTable(IndexSpace.HOST, table.ids[:0], 0)
    tokens = prompt_tokens(253, offset=50)  # as good as any
    with (
        scene.store(pools, hot_rows=64, max_tokens=512) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        request = admitted(decoder, pools, 0, tokens=3, host=none)
        fed(decoder, request, tokens[:252])
        with pytest.raises(InvalidInputError, match="extend the request first"):
            decoder.step(request, token=tokens[252])
        assert request.tokens == request.cache.get_seq_length() == 255
        decoder.extend(request, {IndexSpace.HOST: table})
        decoder.step(request, token=tokens[252])
        assert request.tokens == 256
    written = pools.views.read_rows(C4, scene.c4.layers[0], tables=pools.tables, start_row=0, stop_row=64)
    assert (written != 0xA5).any(dim=1).all()


def test_dense_caches_pass_through_hooks_untouched(scene, long):
    prefill, _ = long
    before = scene.dense(prefill, 4)
    hooks = IndexerHooks(scene.model)
    again = scene.dense(prefill, 4)
    hooks.remove()
    assert torch.equal(again.logits, before.logits)
    tokens = prompt_tokens(300)
    assert follow(scene.model, prefill_chunks(scene.model, tokens, chunk_tokens=100).cache, tokens=[1]).logits.any()


def test_a_release_that_selects_before_it_makes_room_is_refused(scene):
    layer = SparseLayer(scene.model.config, rows=None)
    with pytest.raises(ConflictError, match="another order"):
        layer.select(torch.zeros((1, 1, 4), dtype=torch.long))


def test_a_sparse_layer_does_not_become_the_librarys_own(scene):
    cache = scene.prefill(5).cache
    assert {type(layer).__name__ for layer in cache.layers} == {
        "DynamicSlidingWindowLayer",
        "DeepseekV4CSACache",
        "DeepseekV4HCACache",
    }


def test_what_does_not_fit_is_refused(scene):
    prefill = scene.prefill(300)
    pools = scene.pools(prefill, steps=4)
    with scene.store(pools, hot_rows=64, max_tokens=512) as store:
        with SparseDecoder(scene.model, scene.codec, store) as decoder:
            device_only = {space: table for space, table in pools.tables.items() if space is not IndexSpace.HOST}
            with pytest.raises(InvalidInputError, match="no pages in the host pool"):
                decoder.admit(0, [Placement(pools.views, device_only)], tokens=300)
            request = admitted(decoder, pools, 0, tokens=300)
            with pytest.raises(InvalidInputError, match="one token of one request"):
                follow_two(scene, request.cache)
        store.layers = store.layers[:-1]
        with pytest.raises(InvalidInputError, match="the model has C4 layers"):
            SparseDecoder(scene.model, scene.codec, store)


def follow_two(scene, cache):
    with torch.no_grad():
        scene.model(torch.tensor([[1] * 8]), **{CACHE_ARGUMENT: cache}, use_cache=True)
