"""Checksums of stretches of memory, computed where the bytes lie.

On the CPU the work is done by the `crc32c` library, whose loop uses the processor's own instruction and lets go of the interpreter
lock for long stretches; a call costs about 0.1 us. Device memory is read by a kernel.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.digests import ONE, ChecksumArray, bytes_power, followed_by
from kvbridge.core.plan.operations import AddressArray
from kvbridge.kernels.cuda import programs, runtime
from kvbridge.kernels.cuda.staging import DeviceBytes, Segments, StagingPool

_INVERTED = 0xFFFFFFFF
"""The start value that undoes the library's inversion of the register before the first byte; it inverts after the last one, too."""

_lock = threading.Lock()
_devices: dict[int, DeviceDigest] = {}
"""Made on first use, kept as long as the process."""


def raw_checksums(
    addresses: AddressArray, lengths: npt.NDArray[np.int64], memory: MemoryKind, device: int = 0
) -> npt.NDArray[np.uint32]:
    """Return the raw CRC-32C (register 0 at the start, no inversion) of `lengths[i]` bytes from `addresses[i]`, for every i.

    Arrays of equal length; addresses of this process, mapped and not written while the call lasts; lengths of at least 1. `device`:
    CUDA ordinal of VRAM, where every write of the bytes is done, not only submitted. Waits for the result. Raises UnsupportedError
    for memory that cannot be read here, TransportError when the device fails.
    """
    if memory is MemoryKind.VRAM:
        return _of_device(device).checksums(addresses, lengths)
    values = [
        crc32c((ctypes.c_char * length).from_address(address), _INVERTED)
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array(values, dtype=np.uint32) ^ np.uint32(_INVERTED)


def checksum(addresses: Iterable[int], lengths: Iterable[int]) -> int:
    """Return the CRC-32C of stretches of this process's memory, joined one after another."""
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


# ------------------------------------------------------------------------------------------- by the device itself

SEGMENT_BYTES = 8192
ROW_BYTES = 512
THREAD_BYTES = 16
BATCH_ROWS = 4
THREADS = 512
LEVELS = 4
"""Tables of 1,024 powers each: distances of up to 2^40 bytes."""
BIAS_BYTES = 4096
"""More than BATCH_ROWS rows, because a thread can end so far behind its stretch."""
PERIOD = (1 << 31) - 1
"""x^PERIOD is 1, and so is x^(8 * PERIOD)."""


class DeviceDigest:
    """Computes checksums on one device, one call at a time; calls from several threads wait for each other.

    Everything rests on the raw checksum being linear (`core/plan/digests.py`): the checksum of a whole is the exclusive or of those
    of its parts, each times x^8 for each byte that follows. A part here is what one thread reads: 16 bytes of every 512. A thread
    reads whole rows, so a thread may run up to `BIAS_BYTES` past the end of the stretch. Multiplying with x^(-8n) undoes n such
    bytes; that power exists because x has order 2^31 - 1.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._kernel = programs.kernel(source(), "digest", device)
        self._most_blocks = 2 * runtime.device_facts(device).multiprocessors
        self._lock = threading.Lock()
        self._stream = runtime.Stream.create(device)
        self._staging = StagingPool(device)
        content = tables()
        self._tables = DeviceBytes(device, content.nbytes)
        self._tables.write(content)

    def checksums(self, addresses: AddressArray, lengths: npt.NDArray[np.int64]) -> ChecksumArray:
        """Return the raw CRC-32C of each stretch; lengths are at least 1. Waits for this call's work, not for other streams.

        Raises TransportError when the device fails.
        """
        if not len(addresses):
            return np.empty(0, dtype=np.uint32)
        segments = Segments.of(addresses, lengths, SEGMENT_BYTES)
        results = np.zeros(len(addresses), dtype=np.uint32)
        columns = (np.ascontiguousarray(addresses), np.ascontiguousarray(lengths), segments.first, results)
        stream = self._stream.handle
        with self._lock:
            staging = self._staging.take(sum(column.nbytes for column in columns))
            places = staging.put(columns)
            staging.send(stream=stream)
            grid = max(1, min(self._most_blocks, -(-segments.count // (THREADS // 32))))
            arguments = [*places[:3], len(addresses), segments.count, places[3], self._tables.address]
            self._kernel.launch(arguments, grid=grid, block=THREADS, stream=stream)
            found = staging.fetch(places[3], results.nbytes, stream=stream)
            staging.record(stream)
            self._stream.synchronize()
            return found.view(np.uint32).copy()

    def close(self) -> None:
        """Give everything back."""
        self._staging.close()
        self._tables.close()
        self._stream.close()


@cache
def tables() -> ChecksumArray:
    """Return `struct Tables` of `csrc/digest.cu`, flat: the value of each of a thread's 16 bytes a row later, then the powers."""
    values = np.arange(256, dtype=np.uint32)
    parts = [
        followed_by(values << np.uint32(8 * (byte % 4)), np.full(256, ROW_BYTES - byte // 4 * 4))
        for byte in range(THREAD_BYTES)
    ]
    parts.append(_powers(bytes_power(PERIOD - BIAS_BYTES), 1))
    parts += [_powers(ONE, 1 << 10 * level) for level in range(1, LEVELS)]
    return np.concatenate(parts)


def source() -> programs.Source:
    """Return what is compiled."""
    defines = {"SEGMENT": SEGMENT_BYTES, "BATCH": BATCH_ROWS, "THREADS": THREADS, "LEVELS": LEVELS, "BIAS": BIAS_BYTES}
    return programs.Source("digest", tuple(defines.items()))


def _powers(first: int, step_bytes: int) -> ChecksumArray:
    """Return first, first * x^(8 * step), ..., 1,024 of them."""
    found = np.array([first], dtype=np.uint32)
    while len(found) < 1024:
        found = np.concatenate([found, followed_by(found, np.full(len(found), len(found) * step_bytes))])
    return found
