"""A prompt that is continued from shared pages and a checkpoint gives the very logits of one that is computed from its start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Liveness
from kvbridge.core.geometry.huggingface import geometry_from_config
from kvbridge.core.geometry.pages import first_window_page
from kvbridge.core.ids import IndexSpace, PageTable
from tests.helpers.torch_pools import Form, Pools, make_pools

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, PrefillPacker, append, unpack
from kvbridge.engine.adapters.transformers import Prefill, generate, load_model, prefill_chunks
from tests.helpers.tiny_model import load_config, prompt_tokens

PAGE = 256
CHUNK = 384
"""Neither divides a page nor is divided by one, so the ends of pages are cuts because they are wanted."""
ENDS = (PAGE, 2 * PAGE)
STEPS = 6
CHANGED = 0x5C


class Node:
    """A prefill node of two pipeline stages: pages of its own numbering, given out once each, and the model."""

    def __init__(self) -> None:
        facts = load_config()
        self.model = load_model(facts, seed=3)
        self.geometry = geometry_from_config(facts)
        self.codec = CacheCodec(self.geometry, self.model.config)
        half = self.geometry.layer_count // 2
        layers = (range(half), range(half, self.geometry.layer_count))
        self.stages = [self._pools(seed, of_stage) for seed, of_stage in enumerate(layers)]

    def _pools(self, seed: int, layers: range) -> Pools:
        return make_pools(self.geometry, tokens=8 * PAGE, seed=seed, form=Form(layers=list(layers)))

    def full(self, pages: slice) -> list[PageTable]:
        """Some of the growing pages of each stage, as a table that begins at the prompt's start."""
        return [PageTable(IndexSpace.FULL, stage.tables[IndexSpace.FULL].ids[pages], 0) for stage in self.stages]

    def window(self, ids: list[int], tokens: int) -> PageTable:
        return PageTable(IndexSpace.SWA, np.array(ids, np.int32), first_window_page(self.geometry, tokens))

    def placements(self, full: list[PageTable], window: PageTable) -> list[Placement]:
        return [
            Placement(stage.views, {**stage.tables, IndexSpace.FULL: table, IndexSpace.SWA: window})
            for stage, table in zip(self.stages, full, strict=True)
        ]

    def prefill(self, tokens, placements, *, checkpoints, computed_tokens=0, cuts=ENDS) -> Prefill:
        """Compute into pages; from a checkpoint of `computed_tokens` if that is not 0."""
        packers = [
            PrefillPacker(
                self.codec,
                placement,
                prompt_tokens=len(tokens),
                computed_tokens=computed_tokens,
                checkpoints={end: _with(placement, window).tables for end, window in checkpoints.items()},
            )
            for placement in placements
        ]
        cache = None
        if computed_tokens:
            restored = [_with(placement, checkpoints[computed_tokens]) for placement in placements]
            cache = unpack(self.codec, restored, tokens=computed_tokens)
        result = prefill_chunks(
            self.model,
            tokens,
            chunk_tokens=CHUNK,
            on_chunk=lambda cache, _: [packer.advance(cache) for packer in packers] and None,
            cache=cache,
            cuts=cuts,
        )
        reached = [end for end in checkpoints if computed_tokens < end and end in cuts]
        assert [packer.checkpointed for packer in packers] == [reached] * len(packers)
        return result

    def rows(self, placements: list[Placement], tokens: int) -> list[torch.Tensor]:
        """All live rows of a request, in the order of components and layers."""
        return [
            placement.views.read_rows(
                component.kind, layer, tables=placement.tables, start_row=live.start, stop_row=live.stop
            )
            for component in self.geometry.components
            for live in [component.live_rows(tokens)]
            for placement in placements
            for layer in placement.views.layers(component.kind)
        ]


@pytest.fixture(scope="module")
def node():
    before = torch.get_num_threads()
    yield Node()
    torch.set_num_threads(before)


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("beyond", [0, 1, 3, 128, 255])
def test_a_hit_equals_a_cold_run(node, beyond):
    """Every logit and every row, whichever page end it starts at; the shared pages stay as they were."""
    tokens = prompt_tokens(2 * PAGE + (beyond or PAGE), offset=13 * beyond)
    length = len(tokens)
    window = node.window([0, 1], length)
    checkpoints = {end: node.window([2 + index], end) for index, end in enumerate(ENDS)}
    cold_places = node.placements(node.full(slice(0, 3)), window)
    cold = node.prefill(tokens, cold_places, checkpoints=checkpoints)
    cold_rows = node.rows(cold_places, length)
    cold_answer = generate(node.model, cold.cache, first_token=cold.first_token, steps=STEPS)
    for end in ENDS:
        held = end // PAGE
        shared, own = node.full(slice(0, held)), node.full(slice(3, 6 - held))
        tables = [_joined(*both) for both in zip(shared, own, strict=True)]
        places = node.placements(tables, window)
        for place in places:
            _overwrite(place, window)
        hit = node.prefill(tokens, places, checkpoints=checkpoints, computed_tokens=end)
        assert torch.equal(hit.logits, cold.logits)
        assert_same_bits(node.rows(places, length), cold_rows)
        answer = generate(node.model, hit.cache, first_token=hit.first_token, steps=STEPS)
        assert answer.tokens == cold_answer.tokens
        assert torch.equal(answer.logits, cold_answer.logits)


def _with(placement: Placement, checkpoint: PageTable) -> Placement:
    return Placement(placement.views, {**placement.tables, IndexSpace.SWA: checkpoint})


def _overwrite(placement: Placement, window: PageTable) -> None:
    """Put other bytes into a request's own windows: a checkpoint must not be in them."""
    for component in placement.views.geometry.components:
        for layer in placement.views.layers(component.kind):
            if component.space is IndexSpace.SWA:
                for page in window.ids:
                    placement.views.page(component.kind, layer, space=component.space, page_id=int(page)).fill_(CHANGED)


def test_another_prompt_continues_the_same_prefix(node):
    """Two prompts that share two pages: the second equals itself computed alone, whatever the first said after them."""
    first, second = (prompt_tokens(2 * PAGE)[: 2 * PAGE] + prompt_tokens(77, offset=offset) for offset in (900, 1700))
    checkpoints = {2 * PAGE: node.window([2], 2 * PAGE)}
    window = node.window([0, 1], len(first))
    node.prefill(first, node.placements(node.full(slice(0, 3)), window), checkpoints=checkpoints)
    alone = prefill_chunks(node.model, second, chunk_tokens=CHUNK, cuts=ENDS)
    places = node.placements(
        [_joined(shared, own) for shared, own in zip(node.full(slice(0, 2)), node.full(slice(5, 6)), strict=True)],
        window,
    )
    hit = node.prefill(second, places, checkpoints=checkpoints, computed_tokens=2 * PAGE)
    assert torch.equal(hit.logits, alone.logits)


def _joined(shared: PageTable, own: PageTable) -> PageTable:
    return PageTable(shared.space, np.concatenate([shared.ids, own.ids]))


def test_a_checkpoint_is_left_out_where_the_cache_never_stood(node):
    tokens = prompt_tokens(PAGE + 9)
    places = node.placements(node.full(slice(0, 2)), node.window([0, 1], len(tokens)))
    wanted = {PAGE: node.window([2], PAGE)}
    assert node.prefill(tokens, places, checkpoints=wanted, cuts=()).logits.any()  # asserts that none was written


def test_a_prefix_ends_at_a_page_and_leaves_a_token_to_compute(node):
    places = node.placements(node.full(slice(0, 2)), node.window([0, 1], PAGE))
    with pytest.raises(InvalidInputError, match="prefix of 100 tokens ends inside a page of 256"):
        PrefillPacker(node.codec, places[0], prompt_tokens=300, computed_tokens=100)
    tokens = prompt_tokens(PAGE)
    cache = prefill_chunks(node.model, tokens, chunk_tokens=CHUNK).cache
    with pytest.raises(InvalidInputError, match="longer than the 256 tokens that are computed"):
        prefill_chunks(node.model, tokens, chunk_tokens=CHUNK, cache=cache)


@pytest.mark.parametrize(("length", "steps"), [(249, 9), (253, 3)])
def test_whole_pages_of_an_answer_hold_what_the_cache_holds(node, length, steps):
    """Also of an answer that ends exactly on a page: decode's growing pages, with C4 in the host pool."""
    form = Form(host=frozenset({ComponentKind.C4_KV}), page_first=True, extent_pages=2)
    pools = make_pools(node.geometry, tokens=length + steps, prompt_tokens=length, seed=9, form=form)
    placement = Placement(pools.views, pools.tables)
    prompt = prefill_chunks(node.model, prompt_tokens(length), chunk_tokens=CHUNK)
    PrefillPacker(node.codec, placement, prompt_tokens=length).advance(prompt.cache)
    before = _growing(node, placement, length)
    generate(node.model, prompt.cache, first_token=prompt.first_token, steps=steps)
    append(node.codec, prompt.cache, placement=placement, from_token=length)
    for component, layer, rows in _growing(node, placement, length + steps):
        held = node.codec.encode(prompt.cache, component, layer, start=0, stop=len(rows))
        assert torch.equal(rows, held)
    for (_, _, then), (_, _, now) in zip(before, _growing(node, placement, length), strict=True):
        assert torch.equal(then, now)


def _growing(node, placement, tokens):
    return [
        (
            component,
            layer,
            placement.views.read_rows(
                component.kind, layer, tables=placement.tables, start_row=0, stop_row=component.live_rows(tokens).stop
            ),
        )
        for component in node.geometry.components
        if component.liveness is Liveness.GROWING
        for layer in component.layers
    ]
