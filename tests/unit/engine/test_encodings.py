import pytest
import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness
from kvbridge.core.ids import IndexSpace
from kvbridge.engine.encodings import Fp8IndexerCodec, Fp8V4Codec, PlainCodec, row_codec
from tests.helpers.geometries import new_component

V4 = Fp8V4Codec(width=512, rope=64, dtype=torch.float32)


def values_of(count: int, width: int, spread: float = 8.0) -> torch.Tensor:
    """Random values whose groups differ in size by up to 2**(2 * spread)."""
    generator = torch.Generator().manual_seed(count * 1000 + width)
    sizes = torch.exp2((torch.rand((count, 1), generator=generator) * 2 - 1) * spread)
    return torch.randn((count, width), generator=generator) * sizes


@pytest.mark.parametrize(("width", "rope"), [(512, 64), (80, 16), (96, 0), (200, 8), (64, 63)])
def test_fp8_v4_error_is_bounded(width, rope):
    codec = Fp8V4Codec(width=width, rope=rope, dtype=torch.float32)
    values = values_of(300, width)
    decoded = codec.decode(codec.encode(values))
    plain = width - rope
    for start in range(0, plain, 64):
        ours, theirs = values[:, start : min(start + 64, plain)], decoded[:, start : min(start + 64, plain)]
        largest = ours.abs().amax(dim=1, keepdim=True)
        assert bool(((ours - theirs).abs() <= torch.maximum(ours.abs() / 16, largest / 2**17)).all())
    assert torch.equal(decoded[:, plain:], values[:, plain:].to(torch.bfloat16).float())


@pytest.mark.parametrize("codec", [V4, Fp8IndexerCodec(128, torch.float32)])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, -1])
def test_what_is_not_finite_is_refused_by_row(codec, bad, column):
    values = torch.zeros((5, codec.width))
    values[3, column] = bad
    with pytest.raises(InvalidInputError, match="row 3 of 5"):
        codec.encode(values)


def test_a_scale_byte_that_is_no_number_is_refused():
    rows = V4.encode(torch.ones((2, 512)))
    rows[1, 580] = 255
    with pytest.raises(InvalidInputError, match="scale byte of 255"):
        V4.decode(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_keep_every_bit(dtype):
    codec = PlainCodec(width=6, stored=dtype, dtype=dtype)
    values = torch.tensor([[0.1, -0.0, float("inf"), float("-inf"), 1e30, -3.0]], dtype=dtype)
    rows = codec.encode(values)
    assert torch.equal(codec.decode(rows).view(torch.uint8), values.view(torch.uint8))
    decoded = codec.decode(rows)
    rows.zero_()
    assert float(values[0, 5]) == float(decoded[0, 5]) == -3.0, "rows, values and decoded values share no memory"


def component(encoding: Encoding, parts: tuple[int, ...]) -> Component:
    form = {"encoding": encoding, "slots": 64, "tokens_per_row": 4}
    return new_component(ComponentKind.C4_KV, (0,), IndexSpace.FULL, Liveness.GROWING, parts, **form)


@pytest.mark.parametrize(
    ("encoding", "parts"),
    [
        (Encoding.FP8_V4, (576, 8)),
        (Encoding.FP8_INDEXER, (512, 16)),
        (Encoding.BF16, (1024,)),
        (Encoding.FP32, (2048,)),
        (Encoding.NATIVE, (2048,)),
    ],
)
def test_a_codec_fits_its_component(encoding, parts):
    codec = row_codec(component(encoding, parts), width=512, rope=64, dtype=torch.float32)
    values = values_of(4, 512, spread=0)
    assert float((codec.decode(codec.encode(values)) - values).norm() / values.norm()) < 0.04
    with pytest.raises(InvalidInputError, match="the geometry says"):
        row_codec(component(encoding, parts), width=256, rope=64, dtype=torch.float32)
