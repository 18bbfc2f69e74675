"""A real model that decodes with a hot buffer gives the very logits of the model alone in the same arithmetic."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Encoding
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT, SparseDecoder, SparseLayer
from tests.helpers.matrices import kept, one_in
from tests.helpers.sparse_model import (
    C4,
    SparseModelPair,
    admitted,
    check_newest_rows,
    check_past_many_evictions,
    decoding,
)
from tests.helpers.sparse_reference import foreign_processor
from tests.helpers.sparse_simulation import check_tables
from tests.helpers.torch_pools import follow, part, prompt_tokens


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scene():
    return SparseModelPair()


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [64, kept(128, False)])
def test_a_hundred_steps_past_many_evictions(scene, hot_rows):
    check_past_many_evictions(scene, 120, hot_rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, kept(2, False)])
def test_quantised_rows_on_any_processor(seed):
    """Each product is rounded as badly as it can be, so ties and boundaries fall to the other side, another for each seed."""
    scene, ours = SparseModelPair(Encoding.FP8_V4), []
    for number in (0, seed):
        with foreign_processor(scene.model, number):
            prefill = scene.prefill(1031, offset=97)
            alone = scene.alone(prefill, 12)
            pools = scene.pools(prefill, steps=12)
            with decoding(scene, pools) as decoder:
                logits = admitted(decoder, pools, 0, tokens=1031).feed(alone.tokens)
        assert torch.equal(logits, alone.logits)
        ours.append(prefill.logits)
    assert not torch.equal(*ours)


@pytest.mark.parametrize("tokens", one_in(3, [1, 2, 5, 3, 4, 7, 252, 127, 253, 255, 256, 511, 257, 258, 514, 260, 259]))
def test_the_newest_rows_are_right_from_the_first_step(scene, tokens):
    """At every remainder of a block and of a page."""
    check_newest_rows(scene, tokens)


@pytest.mark.slow
def test_requests_in_turn_share_a_buffer_and_grow(scene):
    """Two requests take turns, get host pages as they grow, and a third takes over a slot and its host pages."""
    lengths, steps = (1020, 770, 515), 12
    prefills = [scene.prefill(tokens, offset=tokens) for tokens in lengths]
    answers = [scene.alone(prefill, steps) for prefill in prefills]
    pools = [scene.pools(prefill, steps=steps, seed=seed) for seed, prefill in enumerate(prefills)]
    host = scene.pools(scene.prefill(4), steps=4 * 1024, seed=9)
    ids = host.tables[IndexSpace.HOST].ids
    tables = [ids[start:stop] for start, stop in (*pairwise([0, 5, 9]), (1, 4))]
    with decoding(scene, host) as decoder:

        def arrive(number: int, slot: int):
            rows, of = lengths[number] // 4, pools[number]
            for layer in scene.c4.layers:
                moved = part(of.views, of.tables, C4, layer, 0, rows).read()
                table = PageTable(IndexSpace.HOST, tables[number], 0)
                part(host.views, {IndexSpace.HOST: table}, C4, layer, 0, rows).write(moved)
            first = PageTable(IndexSpace.HOST, tables[number][: -(-rows // 64)], 0)
            return admitted(decoder, of, slot, tokens=lengths[number], host=first)

        first, second = arrive(0, 1), arrive(1, 0)
        got = [[], [], []]
        for step in range(steps):
            for number, request in ((0, first), (1, second)):
                if step == 3:
                    decoder.store.extend(request.slot, tables[number])
                got[number].append(request.step(answers[number].tokens[step]))
        assert decoder.store.release(first.slot).reached()
        got[2] = list(arrive(2, 1).feed(answers[2].tokens))
        check_tables(decoder.store)
    for number in range(3):
        assert torch.equal(torch.stack(got[number]), answers[number].logits), f"request {number}"


@pytest.mark.thorough
@pytest.mark.slow
def test_without_a_host_page_a_step_is_refused_before_it_begins(scene):
    pools = scene.pools(scene.prefill(3), steps=20)
    table = pools.tables[IndexSpace.HOST].ids
    with decoding(scene, pools) as decoder:
        request = admitted(decoder, pools, 0, tokens=3, host=PageTable(IndexSpace.HOST, table[:0], 0))
        tokens = prompt_tokens(260, offset=50)  # as good as any
        request.feed(tokens[:252])
        with pytest.raises(InvalidInputError, match="extend the request first"):
            request.step(tokens[252])
        assert request.cache.get_seq_length() == 255
        decoder.store.extend(0, table)
        request.step(tokens[252])
        assert request.cache.get_seq_length() == 256
    written = part(pools.views, pools.tables, C4, scene.c4.layers[0], 0, 64).read()
    assert (written != 0xA5).any(dim=1).all()


def test_dense_caches_pass_through_hooks_untouched(scene):
    prefill = scene.prefill(300)
    before = scene.alone(prefill, 4)
    with decoding(scene, scene.pools(prefill, steps=4)):
        again = scene.alone(prefill, 4)
        assert follow(scene.model, prefill.cache, tokens=before.tokens).isfinite().all()
    assert torch.equal(again.logits, before.logits)
    kinds = {type(layer).__name__ for layer in scene.prefill(5).cache.layers}
    assert kinds == {"DynamicSlidingWindowLayer", "DeepseekV4CSACache", "DeepseekV4HCACache"}, "the library's own"


def test_what_does_not_fit_is_refused(scene):
    pools = scene.pools(scene.prefill(300), steps=4)
    with pytest.raises(ConflictError, match="another order"):
        SparseLayer(scene.model.config, None, 0, None).select(torch.zeros((1, 1, 4), dtype=torch.long))
    with decoding(scene, pools) as decoder:
        device_only = {space: table for space, table in pools.tables.items() if space is not IndexSpace.HOST}
        with pytest.raises(InvalidInputError, match="no pages in the host pool"):
            decoder.admit(0, device_only, None, tokens=300)
        request = admitted(decoder, pools, 0, tokens=300)
        with pytest.raises(InvalidInputError, match="one token of one request"), torch.no_grad():
            scene.model(torch.tensor([[1] * 8]), **{CACHE_ARGUMENT: request.cache}, use_cache=True)
        decoder.store.layers = decoder.store.layers[:-1]
        with pytest.raises(InvalidInputError, match="the model has C4 layers"):
            SparseDecoder(scene.model, scene.codec, decoder.store)
