"""A real model that decodes with a hot buffer gives the tokens of the dense one, and its logits within the rounding of sums."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Encoding
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.engine.adapters.deepseek_v4 import Placement
from kvbridge.engine.adapters.selection_watch import SelectionWatch
from kvbridge.engine.adapters.sparse_deepseek_v4 import IndexerHooks, SparseDecoder, SparseLayer
from kvbridge.engine.adapters.transformers import follow, prefill_chunks, prompt_tokens
from tests.helpers.sparse_scene import C4, HeldRows, SparseScene, admitted, comparable_steps, fed

TOLERANCE = 1e-5
"""Between sparse and dense, in fp32, for logits below 4 in size; measured: 2.5e-6."""
STEPS = 320


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scene():
    return SparseScene()


@pytest.fixture(scope="module")
def long(scene):
    """A prompt of 512 rows and one token, and the dense model's answer."""
    prefill = scene.prefill(2049, offset=97)
    dense, selections = scene.dense_and_selections(prefill, STEPS)
    return prefill, dense, selections


@pytest.fixture(scope="module")
def held(scene, long):
    """The same with its rows in plain lists."""
    prefill, dense, _ = long
    return scene.held(prefill, dense.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [64, 128])
def test_hundreds_of_steps_past_many_evictions(scene, long, held, hot_rows):
    prefill, dense, selections = long
    pools = scene.pools(prefill, steps=STEPS)
    with (
        scene.store(pools, hot_rows=hot_rows, max_tokens=2049 + STEPS) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        request = admitted(decoder, pools, 1, tokens=2049)
        logits = fed(decoder, request, dense.tokens)
        store.check()
        counts = store.counts(1)
    assert torch.equal(logits, held.generated.logits), "not the very rows"
    steps = comparable_steps(selections, held.selections)
    apart = (logits[:steps] - dense.logits[:steps]).abs().max()
    print(f"hot_rows {hot_rows}: at most {apart:.2e} apart in {steps} of {STEPS} steps, {counts}")
    assert apart <= TOLERANCE
    assert torch.equal(logits[:steps].argmax(dim=1), dense.logits[:steps].argmax(dim=1))
    assert counts.evicted > 30 * hot_rows
    assert counts.hits > 0
    # Pages that became complete are on the host, byte for byte; what the prompt brought is untouched.
    complete = (2049 + STEPS) // 4 // 64 * 64
    assert complete > 2049 // 4
    for layer in scene.c4.layers:
        rows = scene.host_rows(pools, layer, pools.tables, start=0, stop=complete)
        assert torch.equal(rows, held.rows[layer].rows[:complete])


@pytest.mark.slow
def test_quantised_rows(long):
    scene = SparseScene(Encoding.FP8_V4)
    prefill = scene.prefill(2049, offset=97)
    dense, selections = scene.dense_and_selections(prefill, 80)
    pools = scene.pools(prefill, steps=80)
    with (
        scene.store(pools, hot_rows=64, max_tokens=2200) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        logits = fed(decoder, admitted(decoder, pools, 0, tokens=2049), dense.tokens)
    held = scene.held(prefill, dense.tokens)
    assert torch.equal(logits, held.generated.logits)
    steps = comparable_steps(selections, held.selections)
    assert (logits[:steps] - dense.logits[:steps]).abs().max() <= TOLERANCE
    assert not torch.allclose(logits, long[1].logits[:80], atol=TOLERANCE, rtol=0), "nothing was quantised"


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 127, 252, 253, 255, 256, 257, 258, 259, 260, 511, 514])
def test_the_newest_rows_are_right_from_the_first_step(scene, tokens):
    """At every remainder of a block and of a page; with as few hot rows as there can be, and nothing loaded before."""
    prefill = scene.prefill(tokens, offset=tokens)
    dense = scene.dense(prefill, 9)
    pools = scene.pools(prefill, steps=9)
    with (
        scene.store(pools, hot_rows=64, max_tokens=1024, preload_rows=0) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        logits = fed(decoder, admitted(decoder, pools, 0, tokens=tokens), dense.tokens)
        store.check()
    assert torch.equal(logits, scene.held(prefill, dense.tokens).generated.logits)
    assert (logits - dense.logits).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_requests_in_turn_share_a_buffer_and_grow(scene):
    """Two requests take turns, get host pages as they grow, and a third takes over a slot and its host pages."""
    lengths, steps = (1020, 770, 515), 40
    prefills = [scene.prefill(tokens, offset=tokens) for tokens in lengths]
    answers = [scene.dense(prefill, steps) for prefill in prefills]
    held = [scene.held(prefill, answer.tokens).generated for prefill, answer in zip(prefills, answers, strict=True)]
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
        assert torch.equal(torch.stack(got[number]), held[number].logits), f"request {number}"


def test_a_wrong_row_shows(scene, long, monkeypatch):
    """One row of one layer of one step is another row of the same request: what a defect would do at its smallest."""
    prefill, dense, _ = long
    pools = scene.pools(prefill, steps=8)
    with (
        scene.store(pools, hot_rows=64, max_tokens=2304) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        request = admitted(decoder, pools, 0, tokens=2049)
        good = decoder.step(request, token=dense.tokens[0])
        assert (good - dense.logits[0]).abs().max() <= TOLERANCE
        last = scene.c4.layers[-1]
        real = store.rows

        def tampered(layer, places):
            rows = real(layer, places)
            if layer == last:
                rows[10] = rows[11]
            return rows

        monkeypatch.setattr(store, "rows", tampered)
        bad = decoder.step(request, token=dense.tokens[1])
    assert (bad - dense.logits[1]).abs().max() > 10 * TOLERANCE


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
    written = scene.host_rows(pools, scene.c4.layers[0], pools.tables, start=0, stop=64)
    assert (written != 0xA5).any(dim=1).all()


def test_dense_caches_pass_through_hooks_untouched(scene, long):
    prefill, dense, _ = long
    hooks = IndexerHooks(scene.model)
    again = scene.dense(prefill, 4)
    hooks.remove()
    assert torch.equal(again.logits, dense.logits[:4])
    tokens = prompt_tokens(300)
    assert follow(scene.model, prefill_chunks(scene.model, tokens, chunk_tokens=100).cache, tokens=[1]).logits.any()


def test_a_release_that_selects_before_it_makes_room_is_refused(scene):
    codec = scene.codec.row_codec(C4)
    layer = SparseLayer(scene.model.config, HeldRows(codec, torch.zeros((0, 512))))
    with pytest.raises(ConflictError, match="another order"):
        layer.select(torch.zeros((1, 1, 4), dtype=torch.long))


def test_sparse_and_dense_select_the_same_rows_and_it_is_seen(scene):
    """The watch sees what the indexer says, whether or not a hook then replaces it; and how near it was."""
    prefill = scene.prefill(515)
    scores: list[torch.Tensor] = []
    scorer = next(module for name, module in scene.model.named_modules() if name.endswith("indexer.scorer"))
    noted = scorer.register_forward_hook(lambda _, __, found: scores.append(found[0, 0]))
    watch = SelectionWatch(scene.model)
    tokens = scene.dense(prefill, 5).tokens
    dense = watch.take()
    assert dense.rows.shape == (5, 3, 64)
    for step in range(5):
        best = scores[step].sort(descending=True).values
        mine = scores[step][torch.from_numpy(dense.rows[step, 0]).long()]  # rows of equal scores may be either
        assert torch.equal(mine.sort(descending=True).values, best[:64])
        assert dense.scores[step, 0].tolist() == best[:65].tolist()
    noted.remove()
    pools = scene.pools(prefill, steps=5)
    with (
        scene.store(pools, hot_rows=64, max_tokens=1024) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        watch.remove()
        watch = SelectionWatch(scene.model)  # after the decoder's own hooks
        fed(decoder, admitted(decoder, pools, 0, tokens=515), tokens)
        sparse = watch.take()
    assert (sparse.rows == dense.rows).all()
    assert abs(sparse.scores - dense.scores).max() < 1e-5
    assert watch.take().rows.shape == (0, 3, 64)
    watch.remove()
    short = SelectionWatch(scene.model)
    scene.dense(scene.prefill(6), 1)
    found = short.take()
    assert found.rows[0, 0].tolist() == [0] + [-1] * 63
    assert np.isneginf(found.scores[0, 0, 1:]).all()
    short.remove()


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
        scene.model(torch.tensor([[1] * 8]), past_key_values=cache, use_cache=True)
