"""Codecs of rows, one for each `Encoding`: numbers to bytes and back.

Codecs are pure functions: equal numbers give equal bytes, padding included. Lossy encodings refuse infinities and NaN, which would
poison the scale of a whole group; plain encodings keep every bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, Encoding
from kvbridge.core.geometry.models import FP8_INDEXER_SCALED_VALUES, FP8_SCALE_ROW_BYTES, FP8_SCALED_VALUES

E4M3_MAX = 448.0
_E4M3 = torch.float8_e4m3fn
_BIAS = 127
"""A ue8m0 byte `b` is the scale 2**(b - 127); 255 would be NaN and is never written."""
_POWERS = torch.tensor([2.0 ** (byte - _BIAS) for byte in range(255)], dtype=torch.float32)
_INVERSE_POWERS = torch.tensor([2.0 ** (_BIAS - byte) for byte in range(255)], dtype=torch.float32)


class RowCodec(ABC):
    """Numbers to rows and back."""

    row_bytes: int

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        """`width`: numbers of a row; `dtype`: that of decoded numbers."""
        self.width, self.dtype = width, dtype

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """[n, width] floating -> uint8 [n, row_bytes]. Raises InvalidInputError for numbers that the encoding cannot store."""

    @abstractmethod
    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [n, row_bytes], contiguous -> [n, width] in `dtype`, memory of its own."""


class PlainCodec(RowCodec):
    """Numbers unchanged, in `stored`; bit-exact if both dtypes are the numbers' own."""

    def __init__(self, width: int, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(width, dtype)
        self.stored, self.row_bytes = stored, width * stored.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        _check_shape(values, self.width)
        return values.to(self.stored, copy=True).contiguous().view(torch.uint8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone().view(self.stored).to(self.dtype)


class Fp8V4Codec(RowCodec):
    """The DeepSeek-V4 row: e4m3 in groups of 64 under a power-of-two scale, then `rope` values in bf16; scales apart.

    A row is [width - rope e4m3][rope bf16][one ue8m0 byte a group][pad to 8 scale bytes, zero]. The last group may be shorter.
    Values that are too large for bf16 become its largest. A group's scale is the smallest power of two that brings its largest
    value to 448 or less, so a value v of a group whose largest is m is off by at most max(|v| / 16, m / 2**17). A group of zeros
    has scale 1. A scale byte of 255 is refused.
    """

    def __init__(self, width: int, dtype: torch.dtype, rope: int) -> None:
        super().__init__(width, dtype)
        self.rope, self.plain = rope, width - rope
        self.groups = -(-self.plain // FP8_SCALED_VALUES)
        scale_bytes = -(-self.groups // FP8_SCALE_ROW_BYTES) * FP8_SCALE_ROW_BYTES
        self.row_bytes = self.plain + 2 * rope + scale_bytes

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        numbers = _finite(values, self.width, "fp8_v4")
        count = len(numbers)
        grouped = _grouped(numbers[:, : self.plain], FP8_SCALED_VALUES)
        exponent = _scale_exponent(grouped.abs().amax(dim=2))
        quantised = _to_e4m3(grouped * _INVERSE_POWERS.to(exponent.device)[exponent].unsqueeze(2)).flatten(1)[
            :, : self.plain
        ]
        largest = torch.finfo(torch.bfloat16).max
        rope = numbers[:, self.plain :].clamp(-largest, largest).to(torch.bfloat16).contiguous()
        row = torch.zeros((count, self.row_bytes), dtype=torch.uint8, device=numbers.device)
        row[:, : self.plain] = quantised
        row[:, self.plain : self.plain + 2 * self.rope] = rope.view(torch.uint8)
        scales = self.plain + 2 * self.rope
        row[:, scales : scales + self.groups] = exponent.to(torch.uint8)
        return row

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        scales = self.plain + 2 * self.rope
        exponent = rows[:, scales : scales + self.groups].to(torch.int64)
        if bool((exponent > len(_POWERS) - 1).any()):
            raise InvalidInputError(
                "fp8_v4: a scale byte of 255 (NaN) is in a row; these bytes were never encoded here"
            )
        quantised = rows[:, : self.plain].contiguous().view(_E4M3).to(torch.float32)
        plain = _grouped(quantised, FP8_SCALED_VALUES) * _POWERS.to(exponent.device)[exponent].unsqueeze(2)
        rope = rows[:, self.plain : scales].contiguous().view(torch.bfloat16)
        flat = plain.flatten(1)[:, : self.plain]
        return _within(torch.cat([flat, rope.to(torch.float32)], dim=1), self.dtype)


class Fp8IndexerCodec(RowCodec):
    """An indexer key: e4m3 values, then one fp32 scale for each 128 of them (a shorter rest is a group too).

    The scale is the group's largest value / 448, so no value saturates. A group of zeros has scale 1.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self.row_bytes = width + 4 * -(-width // FP8_INDEXER_SCALED_VALUES)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        grouped = _grouped(_finite(values, self.width, "fp8_indexer"), FP8_INDEXER_SCALED_VALUES)
        largest = grouped.abs().amax(dim=2)
        # A subnormal scale could round to zero, and dividing by it would not be finite.
        scale = (largest / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(largest > 0, scale, torch.ones_like(scale))
        quantised = _to_e4m3(grouped / scale.unsqueeze(2)).flatten(1)[:, : self.width]
        return torch.cat([quantised, scale.contiguous().view(torch.uint8)], dim=1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows[:, self.width :].clone().view(torch.float32)
        quantised = rows[:, : self.width].contiguous().view(_E4M3).to(torch.float32)
        values = _grouped(quantised, FP8_INDEXER_SCALED_VALUES) * scale.unsqueeze(2)
        return _within(values.flatten(1)[:, : self.width], self.dtype)


def row_codec(component: Component, *, width: int, dtype: torch.dtype, rope: int = 0) -> RowCodec:
    """Return the codec for rows of `width` numbers of a model that computes in `dtype`.

    `rope` trailing numbers of an fp8_v4 row stay in bf16. Raises InvalidInputError when the component's rows have another
    length.
    """
    codec: RowCodec
    match component.encoding:
        case Encoding.FP8_V4:
            codec = Fp8V4Codec(width=width, rope=rope, dtype=dtype)
        case Encoding.FP8_INDEXER:
            codec = Fp8IndexerCodec(width=width, dtype=dtype)
        case Encoding.BF16 | Encoding.FP32 | Encoding.NATIVE as plain:
            stored = {Encoding.BF16: torch.bfloat16, Encoding.FP32: torch.float32}.get(plain, dtype)
            codec = PlainCodec(width=width, stored=stored, dtype=dtype)
    if codec.row_bytes != component.row_bytes:
        raise InvalidInputError(
            f"{component.kind}: {width} values as {component.encoding} are {codec.row_bytes} bytes, the geometry says "
            f"{component.row_bytes}; it was made for another model or dtype (here {dtype})"
        )
    return codec


def _check_shape(values: torch.Tensor, width: int) -> None:
    if values.ndim != 2 or values.shape[1] != width or not values.dtype.is_floating_point:
        raise InvalidInputError(
            f"need floating values of shape [n, {width}], got {values.dtype} of shape {tuple(values.shape)}"
        )


def _finite(values: torch.Tensor, width: int, name: str) -> torch.Tensor:
    """Return `values` as fp32. Raises InvalidInputError, which names the first row that is not finite."""
    _check_shape(values, width)
    numbers = values.to(torch.float32)
    bad = ~torch.isfinite(numbers).all(dim=1)
    if bool(bad.any()):
        raise InvalidInputError(
            f"{name}: row {int(bad.nonzero()[0])} of {len(values)} holds an infinity or NaN; the cache was broken "
            "before the bridge touched it"
        )
    return numbers


def _grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    """[n, width] -> [n, groups, group], with zeros at the end of the last group."""
    count, width = values.shape
    groups = -(-width // group)
    if width < groups * group:
        values = torch.nn.functional.pad(values, (0, groups * group - width))
    return values.reshape(count, groups, group)


def _scale_exponent(largest: torch.Tensor) -> torch.Tensor:
    """Return the ue8m0 byte of the smallest power of two s with largest / s <= 448, as int64; 127 for 0."""
    mantissa, exponent = torch.frexp(largest / E4M3_MAX)
    # frexp gives x = mantissa * 2**exponent with mantissa in [0.5, 1): only an exact power of two rounds down.
    power = torch.where(mantissa > 0.5, exponent, exponent - 1)
    power = torch.where(largest > 0, power, torch.zeros_like(power))
    return power.clamp(-_BIAS, len(_POWERS) - 1 - _BIAS).to(torch.int64) + _BIAS


def _within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` in `dtype`, limited to its largest number: rounding may have lifted values beyond it."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    # torch turns numbers beyond e4m3 into NaN, and a rounded scale may leave 448 * (1 + 2**-24).
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(_E4M3).view(torch.uint8)
