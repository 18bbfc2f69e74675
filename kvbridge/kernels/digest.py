"""Checksums of stretches of memory, computed where the bytes lie.

Owns: reading memory by address for its checksum, one way for each kind of memory. Must not know: pages, whose memory
it is; an address that is not mapped ends the process, so callers check bounds first.

On the CPU the work is done by the `crc32c` library, whose loop uses the processor's own instruction and lets go of the
interpreter lock for long stretches; a call costs about 0.1 us.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind

AddressArray = npt.NDArray[np.uint64]

_INVERTED = 0xFFFFFFFF
"""The library inverts the register before and after; with this as its start, the inversion before is undone."""


def raw_checksums(
    addresses: AddressArray, lengths: npt.NDArray[np.int64], memory: MemoryKind
) -> npt.NDArray[np.uint32]:
    """Return the raw CRC-32C (register 0 at the start, no inversion) of `lengths[i]` bytes from `addresses[i]`, for every i.

    Arrays of equal length; addresses of this process, mapped and not written while the call lasts. Raises
    UnsupportedError for memory that no implementation can read here.
    """
    if memory is not MemoryKind.DRAM:
        # A kernel that leaves one checksum for each stretch in host memory belongs here.
        raise UnsupportedError(
            f"no digest can be computed over {memory} here: this build reads host memory only; set integrity.digest to "
            "none on the decode daemon, or keep the pools in host memory"
        )
    values = [
        crc32c((ctypes.c_char * length).from_address(address), _INVERTED)
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array(values, dtype=np.uint32) ^ np.uint32(_INVERTED)
