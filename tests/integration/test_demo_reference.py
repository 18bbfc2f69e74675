"""What the demo compares with: no right decode is called different, whatever the arithmetic; every wrong row is, by name."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.demo import reference
from kvbridge.demo.reference import rounding_bound
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder
from tests.helpers.cache_watch import CacheWatch, Trace, Verdict, compare_traced
from tests.helpers.foreign_processor import foreign_processor
from tests.helpers.sparse_model import C4, SparseModelPair, admitted

TOKENS, STEPS = 1031, 12
"""Both compressors have tokens that wait for their block, and there are four times as many C4 rows as are selected."""


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """One request in one encoding: its prompt, the model alone, and which C4 row is first read when."""

    def __init__(self, scene: SparseModelPair) -> None:
        self.scene = scene
        self.prefill = self.scene.prefill(TOKENS, offset=97)
        self.layer = self.scene.c4.layers[1]
        self.selected: list[set[int]] = []
        indexer = self.scene.model.model.layers[self.layer].self_attn.compressor.indexer
        noted = indexer.register_forward_hook(lambda _, __, rows: self.selected.append(set(rows[0, 0].tolist())))
        self.alone = self.scene.alone(self.prefill, STEPS)
        noted.remove()

    def first_read_in(self, step: int) -> list[int]:
        """Rows of `layer` that the prompt brought and that no step before `step` reads."""
        before = set().union(*self.selected[:step])
        return sorted(row for row in self.selected[step] - before if row < TOKENS // 4)

    def over_pages(self, pools, *, host: PageTable | None = None, tamper=lambda store: None) -> Verdict:
        """Decode from pages, and compare."""
        scene, logits, traces = self.scene, [], []
        with (
            scene.store(pools, hot_rows=64, max_tokens=TOKENS + STEPS) as store,
            SparseDecoder(scene.model, scene.codec, store) as decoder,
            closing(CacheWatch(scene.model)) as watch,
        ):
            tamper(store)
            request = admitted(decoder, pools, 0, tokens=TOKENS, host=host)
            for token in self.alone.tokens:
                logits.append(decoder.step(request, token=token))
                traces.append(watch.take())
        ours, alone = (
            torch.cat([self.prefill.logits[None], each]).numpy() for each in (torch.stack(logits), self.alone.logits)
        )
        return compare_traced(ours, alone, (Trace.joined(traces), self.alone.trace))


@pytest.fixture(scope="module", params=[Encoding.NATIVE, Encoding.FP8_V4])
def case(request):
    return Case(SparseModelPair(request.param))


@pytest.fixture(scope="module")
def former(case):
    """Pages of another request of the same length."""
    return case.scene.pools(case.scene.prefill(TOKENS, offset=1000), steps=STEPS)


def rows_of(case: Case, kind: ComponentKind, step: int) -> list[int]:
    """Two rows of a component that are read in `step` and not before."""
    if kind is C4:
        return case.first_read_in(step)[:2]
    live = case.scene.geometry.component(kind).live_rows(TOKENS)
    return [live.stop - 2, live.stop - 1]


def change(pools, kind: ComponentKind, layer: int, *, defect: str, rows: list[int], former) -> None:
    def read(of, row):
        return of.views.read_rows(kind, layer, tables=of.tables, start_row=row, stop_row=row + 1)

    def write(row, content):
        pools.views.write_rows(kind, layer, tables=pools.tables, start_row=row, rows=content)

    one, other = (read(pools, row) for row in rows)
    match defect:
        case "a bit flipped":
            one = one.clone()
            one[0, 0] ^= 1
            write(rows[0], one)
        case "two rows swapped":
            write(rows[0], other.clone())
            write(rows[1], one.clone())
        case "a stale row":  # of the request that had the page before
            write(rows[0], read(former, rows[0]))


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["a bit flipped", "two rows swapped", "a stale row"])
@pytest.mark.parametrize("kind", list(ComponentKind)[:7])
def test_a_wrong_row_is_found_when_it_is_first_read_and_named(case, former, kind, defect):
    """Rows of the C4 cache are read when they are selected, here in the second step and not in the first; others at once."""
    step = 1 if kind is C4 else 0
    layer = case.layer if "c4" in kind else case.scene.geometry.component(kind).layers[1]
    pools = case.scene.pools(case.prefill, steps=STEPS)
    change(pools, kind, layer, defect=defect, rows=rows_of(case, kind, step), former=former)
    found = case.over_pages(pools)
    assert (found.first_difference, found.component) == (1 + step, f"{kind} of layer {layer}")
    assert found.positions == 1 + STEPS


@pytest.mark.slow
def test_a_wrong_page_is_found(case):
    """Two entries of the host's page table have changed places."""
    pools = case.scene.pools(case.prefill, steps=STEPS)
    table = pools.tables[IndexSpace.HOST]
    ids = table.ids.copy()
    ids[[2, 3]] = ids[[3, 2]]
    found = case.over_pages(pools, host=PageTable(IndexSpace.HOST, ids, table.first_page))
    assert (found.first_difference, found.component) == (1, f"c4_kv of layer {case.scene.c4.layers[0]}")


def one_row_off(store, layer):
    real = store.rows
    store.rows = lambda at, places: real(at, places.roll(1) if at == layer else places)


def new_rows_lost(store, layer):
    real = store.append
    store.append = lambda at, rows: real(at, torch.zeros_like(rows) if at == layer else rows)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [one_row_off, new_rows_lost])
def test_a_wrong_hot_buffer_is_found(case, defect):
    pools = case.scene.pools(case.prefill, steps=STEPS)
    found = case.over_pages(pools, tamper=lambda store: defect(store, case.layer))
    first = next(step for step, rows in enumerate(case.selected) if defect is one_row_off or max(rows) >= TOKENS // 4)
    assert (found.first_difference, found.component) == (1 + first, f"c4_kv of layer {case.layer}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_position_is_compared_and_equal_on_any_processor(case, seed):
    """Each product is rounded as badly as it can be, so ties and boundaries fall to the other side, another for each seed."""
    with foreign_processor(case.scene.model, seed):
        foreign = Case(case.scene)
        found = foreign.over_pages(case.scene.pools(foreign.prefill, steps=STEPS))
    assert found.equal, found
    assert found.positions == 1 + STEPS
    assert not torch.equal(foreign.prefill.logits, case.prefill.logits)


# ---------------------------------------------------------------------------------------------- the bound


@pytest.fixture
def attended():
    """A query of two heads, entries and sinks as the model has them: normalised."""
    generator = torch.Generator().manual_seed(5)
    return SimpleNamespace(
        query=torch.randn((2, 512), generator=generator),
        entries=torch.randn((192, 512), generator=generator),
        sinks=torch.randn(2, generator=generator),
    )


def summed(attended, order: torch.Tensor, *, block: int) -> torch.Tensor:
    """The attention in fp32, every sum in blocks of the given order and size."""
    x = attended.entries[order]
    score = sum(
        attended.query[:, start : start + block] @ x[:, start : start + block].T for start in range(0, 512, block)
    )
    logits = torch.cat([score * 512**-0.5, attended.sinks[:, None]], dim=1)
    weight = (logits - logits.amax(dim=1, keepdim=True)).exp()
    weight = (weight / weight.sum(dim=1, keepdim=True))[:, :-1]
    return sum(weight[:, start : start + block] @ x[start : start + block] for start in range(0, len(x), block))


@pytest.mark.parametrize("block", [1, 3, 64])
def test_no_order_of_summation_leaves_the_bound(attended, block):
    bound = rounding_bound(attended.query, attended.entries, 512**-0.5, attended.sinks)
    logits = torch.cat(
        [512**-0.5 * attended.query.double() @ attended.entries.double().T, attended.sinks.double()[:, None]], 1
    )
    exact = torch.softmax(logits, dim=1)[:, :-1] @ attended.entries.double()
    for seed in range(3):
        order = torch.randperm(192, generator=torch.Generator().manual_seed(seed))
        apart = (summed(attended, order, block=block) - exact).abs()
        assert bool((apart <= bound).all())
    assert float(apart.max()) > 0


def test_another_row_leaves_the_bound(attended):
    """It tells rounding from another sum: one of 192 entries replaced by its neighbour."""
    bound = rounding_bound(attended.query, attended.entries, 512**-0.5, attended.sinks)
    right = summed(attended, torch.arange(192), block=64)
    rows = torch.arange(192)
    rows[10] = 11
    apart = (summed(attended, rows, block=64) - right).abs()
    assert float((apart / (2 * bound)).max()) > 2


@pytest.mark.parametrize(("times", "right"), [(0.99, True), (2.5, False)])
def test_the_dense_sum_may_be_off_by_what_rounding_explains_and_no_more(monkeypatch, times, right):
    """Noise of the derived size in the dense model's own sum, as far as another processor's could be and beyond."""
    scene = SparseModelPair()
    prefill = scene.prefill(515)
    real, compared = reference._Layer.compare, []

    def noisy(layer, dense, selected, bound):
        sign = torch.from_numpy(np.random.default_rng(len(compared)).choice([-1.0, 1.0], tuple(dense.shape)))
        compared.append(dense)
        real(layer, dense.double() + times * bound * sign, selected, bound)

    monkeypatch.setattr(reference._Layer, "compare", noisy)
    if right:
        assert 0.4 < scene.alone(prefill, 4).share_of_rounding < 1
        assert len(compared) == 4 * 3
    else:
        with pytest.raises(ConflictError, match="times what rounding explains"):
            scene.alone(prefill, 4)
