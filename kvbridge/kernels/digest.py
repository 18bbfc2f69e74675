"""Checksums of stretches of memory, computed where the bytes lie.

On the CPU the work is done by the `crc32c` library, whose loop uses the processor's own instruction and lets go of the
interpreter lock for long stretches; a call costs about 0.1 us. Device memory is read by a kernel (`digest_device.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.digest_device import DeviceDigest

AddressArray = npt.NDArray[np.uint64]

_INVERTED = 0xFFFFFFFF
"""The library inverts the register before and after; with this as its start, the inversion before is undone."""

_lock = threading.Lock()
_devices: dict[int, DeviceDigest] = {}
"""Made on first use, kept as long as the process."""


def raw_checksums(
    addresses: AddressArray, lengths: npt.NDArray[np.int64], memory: MemoryKind, device: int = 0
) -> npt.NDArray[np.uint32]:
    """Return the raw CRC-32C (register 0 at the start, no inversion) of `lengths[i]` bytes from `addresses[i]`, for every i.

    Arrays of equal length; addresses of this process, mapped and not written while the call lasts; lengths of at least 1.
    `device`: CUDA ordinal of VRAM; whatever wrote the bytes there is done, not only submitted. Waits until the answer is
    there. Raises UnsupportedError for memory that cannot be read here, TransportError when the device fails.
    """
    if memory is MemoryKind.VRAM:
        return _of_device(device).checksums(addresses, lengths)
    values = [
        crc32c((ctypes.c_char * length).from_address(address), _INVERTED)
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array(values, dtype=np.uint32) ^ np.uint32(_INVERTED)


def checksum(addresses: Iterable[int], lengths: Iterable[int]) -> int:
    """Return the CRC-32C of stretches of this process's memory, as of one that they make together."""
    value = 0
    for address, length in zip(addresses, lengths, strict=True):
        value = crc32c((ctypes.c_char * length).from_address(address), value)
    return value


def _of_device(device: int) -> DeviceDigest:
    with _lock:
        made = _devices.get(device)
        if made is None:
            reason = runtime.reason_without_device()
            if reason:
                raise UnsupportedError(
                    f"no digest can be computed over {MemoryKind.VRAM} here: {reason}; set integrity.digest to none on the decode "
                    "daemon, or keep the pools in host memory"
                )
            made = _devices[device] = DeviceDigest(device)
        return made
