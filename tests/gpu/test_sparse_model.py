"""A real model on a GPU that decodes with a hot buffer gives the very logits of the model alone in the same arithmetic."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import torch

from kvbridge.core.geometry.components import Encoding
from kvbridge.engine.adapters.transformers import SparseDecoder
from tests.helpers import torch_pools
from tests.helpers.sparse_model import SparseModelPair, admitted
from tests.helpers.sparse_simulation import check_tables

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def pages_that_a_gpu_reads(monkeypatch):
    """Host pages in page-locked memory, as a registered host pool is."""

    def garbage(size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8, pin_memory=True)

    monkeypatch.setattr(torch_pools, "_garbage", garbage)


@pytest.mark.parametrize(("encoding", "hot_rows"), [(Encoding.NATIVE, 64), (Encoding.FP8_V4, 128)])
def test_past_many_evictions(device, encoding, hot_rows):
    steps, tokens = 150, 2049
    scene = SparseModelPair(encoding, f"cuda:{device}")
    prefill = scene.prefill(tokens, offset=97)
    alone = scene.alone(prefill, steps)
    pools = scene.pools(prefill, steps=steps)
    with (
        scene.store(pools, hot_rows=hot_rows, max_tokens=tokens + steps) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        request = admitted(decoder, pools, 1, tokens=tokens)
        logits = request.feed(alone.tokens)
        check_tables(store)
        counts = store.counts(1)
    print(f"{encoding}, hot_rows {hot_rows}: {counts}")
    assert torch.equal(logits, alone.logits)
    assert counts.evicted > 20 * hot_rows
    complete = (tokens + steps) // 4 // 64 * 64
    for layer in scene.c4.layers:
        entries = scene.host_entries(pools, layer, pools.tables, start=0, stop=complete)
        assert torch.equal(entries, alone.entries(layer)[:complete])


@pytest.mark.parametrize("tokens", [3, 255, 514])
def test_the_newest_rows_are_right_from_the_first_step(device, tokens):
    scene = SparseModelPair(device=f"cuda:{device}")
    prefill = scene.prefill(tokens, offset=tokens)
    alone = scene.alone(prefill, 9)
    pools = scene.pools(prefill, steps=9)
    with (
        scene.store(pools, hot_rows=64, max_tokens=1024, preload_rows=0) as store,
        SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        logits = admitted(decoder, pools, 0, tokens=tokens).feed(alone.tokens)
    assert torch.equal(logits, alone.logits)


def test_weights_are_the_same_on_every_device(device):
    here, there = (SparseModelPair(device=each).model.state_dict() for each in ("cpu", f"cuda:{device}"))
    assert all(torch.equal(tensor, there[name].cpu()) for name, tensor in here.items())
