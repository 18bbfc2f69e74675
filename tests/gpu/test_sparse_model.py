"""A real model on a GPU that decodes with a hot buffer gives the very logits of the model alone in the same arithmetic."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import torch

from kvbridge.core.geometry.components import Encoding
from tests.helpers import torch_pools
from tests.helpers.sparse_model import SparseModelPair, check_newest_rows, check_past_many_evictions

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def pages_that_a_gpu_reads(monkeypatch):
    """Host pages in page-locked memory, as a registered host pool is."""

    def garbage(size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8, pin_memory=True)

    monkeypatch.setattr(torch_pools, "_garbage", garbage)


@pytest.mark.parametrize(("encoding", "hot_rows"), [(Encoding.NATIVE, 64), (Encoding.FP8_V4, 128)])
def test_past_many_evictions(device, encoding, hot_rows):
    check_past_many_evictions(SparseModelPair(encoding, f"cuda:{device}"), 150, hot_rows)


@pytest.mark.parametrize("tokens", [3, 255, 514])
def test_the_newest_rows_are_right_from_the_first_step(device, tokens):
    check_newest_rows(SparseModelPair(device=f"cuda:{device}"), tokens)


def test_weights_are_the_same_on_every_device(device):
    here, there = (SparseModelPair(device=each).model.state_dict() for each in ("cpu", f"cuda:{device}"))
    assert all(torch.equal(tensor, there[name].cpu()) for name, tensor in here.items())
