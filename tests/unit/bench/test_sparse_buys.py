"""The benchmark of what sparse decode buys: its arithmetic, its choices of rows, and a small batch by the reference."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import part_sparse_buys, step_model
from tests.bench.gpu.decode_step import Weights
from tests.bench.gpu.memory import PAGE_BYTES
from tests.bench.gpu.part_sparse_buys import CONTEXTS, NEW_ROWS, Bench, HostPages
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.selection_model import Batch, RecordedSelections, SelectionsAtARate
from tests.bench.gpu.step_model import C4, TOP_K

CPU = torch.device("cpu")
TOKENS = 32_768


def test_the_rows_of_a_request_are_what_the_hot_buffer_replaces() -> None:
    for tokens in CONTEXTS:
        whole, sparse = (step_model.request_bytes(tokens, sparse=sparse) for sparse in (False, True))
        assert whole.host == 0
        assert sparse.host == tokens // 256 * C4.page_bytes() * 21
        hot = step_model.sparse_request_bytes(step_model.settings(tokens, 1), C4, 21).total
        assert whole.device - sparse.device == sparse.host - hot
        assert step_model.fit(tokens, sparse=True) > step_model.fit(tokens, sparse=False) > 30


def test_layers_read_what_their_kind_does() -> None:
    reads = step_model.layer_reads(131_072)
    assert [layer.number for layer in reads if layer.indexer] == list(C4.layers)
    assert {layer.indexer for layer in reads} == {0, 32_768 * 132}
    assert {layer.whole for layer in reads} == {128 * 584, (128 + 1024) * 584}


@pytest.mark.parametrize("new_rows", NEW_ROWS.values())
def test_so_many_rows_of_each_step_are_new(new_rows: int) -> None:
    choice = SelectionsAtARate(Batch(2, 3, 8192, TOP_K, CPU), new_rows)
    steps = [choice.step(number).reshape(6, TOP_K).tolist() for number in range(5)]
    for before, after in pairwise(steps):
        for former, present in zip(before, after, strict=True):
            assert len(set(present)) == TOP_K
            assert len(set(present) - set(former)) == new_rows
    assert steps[0][0] != steps[0][1], "requests select different rows"


def test_a_recording_keeps_what_it_keeps() -> None:
    """Eight times the rows, and of the next step's as large a share is new as in the recording."""
    choice = RecordedSelections(Batch(3, 4, 32_768, TOP_K, CPU), 8_000)
    one, other = choice.step(100), choice.step(101)
    assert one.shape == (3, 4, TOP_K)
    for layer in range(3):
        for request in range(4):
            rows = set(one[layer, request].tolist())
            assert len(rows) == TOP_K
            assert max(rows) < 32_768
            kept = len(rows & set(other[layer, request].tolist()))
            assert kept % 8 == 0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Two layers with a choice, two without; a pool of random bytes."""
    component = C4.model_copy(update={"layers": (2, 4)})
    for module in (part_sparse_buys, step_model):
        monkeypatch.setattr(module, "C4", component)
    monkeypatch.setattr(step_model, "layer_reads", _reads)
    monkeypatch.setattr(step_model, "expert_tokens", lambda _: 8)
    pool = torch.randint(-(1 << 62), 1 << 62, (400 * PAGE_BYTES // 8,))
    made = Bench(Recorder(tmp_path / "cases"), Weights.on(CPU, small=True), HostPages(pool.data_ptr(), 400), replays=2)
    made.pool = pool  # type: ignore[attr-defined]
    return made


_all_reads = step_model.layer_reads


def _reads(tokens: int) -> tuple[step_model.LayerReads, ...]:
    return tuple(step_model.LayerReads(layer.number, min(64, layer.indexer), 64) for layer in _all_reads(tokens)[1:5])


def test_a_small_batch_on_the_processor(bench: Bench) -> None:
    bench.sparse(TOKENS, 2, ("0 %", "2 %"), overlapped=(False,))
    bench.on_device(TOKENS, 2)
    cases = bench._recorder.cases
    assert [case["selections"] for case in cases] == ["0 %", "2 %", ""]
    assert [case.get("wrong", "") for case in cases] == ["", "", ""]
    assert cases[0]["missing_percent"] == 0
    assert cases[1]["missing_percent"] == pytest.approx(100 * 10 / TOP_K)
    assert all(case["ms"] > 0 and case["tokens_s"] > 0 for case in cases)


def test_wrong_rows_are_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        part_sparse_buys, "row_words", lambda pool, rows: torch.zeros((len(rows), 73), dtype=torch.int64)
    )
    bench.sparse(TOKENS, 1, ("2 %",), overlapped=(False,))
    assert "rows have wrong bytes" in bench._recorder.cases[0]["wrong"]
