"""SGLang's row of metadata for a request (first token, log-probabilities, hidden states) as bytes of a room.

SGLang describes its rows by addresses and widths. Prefill sends the widths too: a server with other widths would read the fields at
wrong places.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbridge.core.errors import UnsupportedError


@dataclass(frozen=True)
class MetadataRows:
    """The fields of SGLang's MetadataBuffers: for each, the address of its first row and the bytes of a row."""

    addresses: Sequence[int]
    row_bytes: Sequence[int]

    @property
    def _head(self) -> bytes:
        return np.array([len(self.row_bytes), *self.row_bytes], dtype="<u4").tobytes()

    def read(self, row: int) -> bytes:
        """Return a row: the number of fields and their widths as 32-bit integers, then the fields."""
        fields = (
            ctypes.string_at(at + row * width, width) for at, width in zip(self.addresses, self.row_bytes, strict=True)
        )
        return self._head + b"".join(fields)

    def write(self, row: int, data: bytes) -> None:
        """Write what `read` returned on the other side. Raises UnsupportedError when that side has other fields."""
        head = self._head
        if len(data) != len(head) + sum(self.row_bytes) or not data.startswith(head):
            raise UnsupportedError(
                f"prefill's metadata of a request are {len(data)} bytes with other fields than decode's {list(self.row_bytes)}: "
                "start both servers with the same model, --speculative-algorithm and SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
            )
        place = len(head)
        for address, width in zip(self.addresses, self.row_bytes, strict=True):
            ctypes.memmove(address + row * width, data[place : place + width], width)
            place += width
