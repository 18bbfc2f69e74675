"""Memory that transports move, shared behind a file or on a device, and a connection to a peer."""

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.wire.messages import CudaOrigin, FileOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import OpenedAllocation, export, forget_export
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Endpoint, Peer, Transport


class SharedBuffer:
    """`length_bytes` of `path`, mapped; created (zeroed) unless it exists. `bytes` is a uint8 array over it."""

    def __init__(self, path: Path, length_bytes: int) -> None:
        self.path = path
        mode = "r+b" if path.exists() else "w+b"
        with path.open(mode) as file:
            if mode == "w+b":
                file.truncate(length_bytes)
            self._mapping = mmap.mmap(file.fileno(), length_bytes)
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.length_bytes = length_bytes

    def memory(self, offset_bytes: int = 0, length_bytes: int | None = None) -> Extent:
        length = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        return Extent(
            address=self.address + offset_bytes,
            length_bytes=length,
            origin=FileOrigin(path=str(self.path)),
            offset_bytes=offset_bytes,
            label=self.path.name,
        )

    def read(self, offset: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a view of some bytes: it changes with them."""
        return self.bytes[offset : self.length_bytes if length is None else offset + length]

    def write(self, content: npt.NDArray[np.uint8], offset: int = 0) -> None:
        self.bytes[offset : offset + content.nbytes] = content

    def fill(self, value: int, offset: int = 0, length: int | None = None) -> None:
        self.read(offset, length)[:] = value

    def close(self) -> None:
        """Does nothing: the mapping goes with the last view of it."""


Bytes = npt.NDArray[np.uint8]


class DeviceBuffer:
    """`length_bytes` of zeroed device memory, or, by `opened`, another process's."""

    def __init__(self, device: int, length_bytes: int, *, opened: dict[str, Any] | None = None) -> None:
        self.device = device
        self.length_bytes = length_bytes
        self._stream = runtime.Stream.create(device)
        self._give_back: Callable[[], None]
        if opened is not None:
            found = OpenedAllocation(CudaOrigin.model_validate_json(opened["origin"]), device=device)
            self.address = found.extent.address + opened["offset_bytes"]
            self._give_back = found.close
            return
        self.address = runtime.allocate(device, length_bytes)
        self.fill(0)
        self._exported = export(device, self.address)
        self._give_back = self._free

    def facts(self) -> dict[str, Any]:
        """Return the argument `opened` for another process."""
        whole = self._exported
        assert whole.origin is not None
        return {"origin": whole.origin.model_dump_json(), "offset_bytes": self.address - whole.address}

    def memory(self, offset_bytes: int = 0, length_bytes: int | None = None) -> Extent:
        whole = self._exported
        return Extent(
            address=self.address + offset_bytes,
            length_bytes=self.length_bytes - offset_bytes if length_bytes is None else length_bytes,
            kind=MemoryKind.VRAM,
            device=self.device,
            origin=whole.origin,
            offset_bytes=self.address + offset_bytes - whole.address,
            label=whole.label,
        )

    def read(self, offset: int = 0, length: int | None = None) -> Bytes:
        found = np.empty(self.length_bytes - offset if length is None else length, dtype=np.uint8)
        self._copy(int(found.ctypes.data), self.address + offset, found.nbytes)
        return found

    def write(self, content: Bytes, offset: int = 0) -> None:
        assert offset + content.nbytes <= self.length_bytes
        content = np.ascontiguousarray(content)
        self._copy(self.address + offset, int(content.ctypes.data), content.nbytes)

    def fill(self, value: int, offset: int = 0, length: int | None = None) -> None:
        length_bytes = self.length_bytes - offset if length is None else length
        runtime.fill(self.device, self.address + offset, length_bytes, value, stream=self._stream.handle)
        self._stream.synchronize()

    def close(self) -> None:
        self._give_back()
        self._stream.close()

    def _copy(self, destination: int, source: int, length_bytes: int) -> None:
        if length_bytes:
            runtime.copy(destination, source, length_bytes, device=self.device, stream=self._stream.handle)
            self._stream.synchronize()

    def _free(self) -> None:
        forget_export(self._exported)
        runtime.free(self.device, self.address)


LIMIT_S = 30.0
PAUSE_S = 0.0005


def operations(*rows: tuple[int, int, int]) -> Operations:
    return Operations(*(column.copy() for column in np.array(rows, dtype=np.uint64).reshape(-1, 3).T))


def connect(transport: Transport, endpoint: Endpoint) -> Peer:
    """Poll the connection until there is a peer; raises what it raises, and TimeoutError after `LIMIT_S`."""
    connection = transport.connect(endpoint)
    ends_at_s = time.monotonic() + LIMIT_S
    while (peer := connection.poll()) is None:
        if time.monotonic() >= ends_at_s:
            raise TimeoutError(f"{transport!r} is still connecting after {LIMIT_S} s")
        time.sleep(PAUSE_S)
    return peer
