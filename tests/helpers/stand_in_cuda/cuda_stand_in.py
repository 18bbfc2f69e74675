"""CUDA for whole daemons without a GPU: device memory is shared host memory, and the processor copies.

It stands where `cuda.bindings` and the copy kernel do. Processes find it through `sitecustomize` in this folder.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path("/dev/shm")
PREFIX = "kvb-vram-"
DEVICES = 2
TOTAL_BYTES = 1 << 30
HANDLE_BYTES = 64
REACHED, PENDING = b"1", b"0"
OK, INVALID, NOT_READY = 0, 1, 600

_numbers = itertools.count(1)
_current = SimpleNamespace(device=0)


def sweep(*process_ids: int) -> None:
    """Remove what these processes have left; none named: what all have that ended, but nothing of tests that run beside these."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        process_id = int(path.name.removeprefix(PREFIX).split("-")[0])
        if process_id in process_ids or not (process_ids or Path(f"/proc/{process_id}").exists()):
            path.unlink(missing_ok=True)


class File:
    """A mapped file that stands for device memory. Its maker holds a lock on it for as long as it lives."""

    def __init__(self, path: Path, length_bytes: int = 0) -> None:
        self.path = path
        self.owned = bool(length_bytes)
        self.descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if length_bytes else 0), 0o600)
        if length_bytes:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            os.ftruncate(self.descriptor, length_bytes)
        self.mapped = mmap.mmap(self.descriptor, 0)
        self.length_bytes = len(self.mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))

    @staticmethod
    def has_owner(path: Path) -> bool:
        """Whether the process that made it lives."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Forget it; whoever still looks at the memory may."""
        os.close(self.descriptor)
        if self.owned:
            self.path.unlink(missing_ok=True)


class Event:
    """A file with one letter; shared with whoever opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(REACHED)


class Runtime:
    """The functions of `cuda.bindings.runtime` that kvbridge calls."""

    cudaHostRegisterPortable = cudaHostRegisterMapped = cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    cudaStreamNonBlocking = cudaEventDisableTiming = cudaEventInterprocess = 1  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815

    def __init__(self) -> None:
        self.memory: dict[int, File] = {}
        self.opened: dict[int, File] = {}
        self.registered: dict[int, int] = {}
        self.contexts: set[int] = set()
        """Devices that have been made the current one, which takes half a gigabyte of a real one."""
        self.events_reached = True
        """Whether what is recorded now counts as reached at once."""

    def __getattr__(self, name: str) -> Any:
        """Streams and the like have nothing to do: everything is done when a call returns."""
        if name in {"cudaIpcMemHandle_t", "cudaIpcEventHandle_t", "cudaMemcpyAttributes"}:
            return SimpleNamespace
        if name.startswith("cuda"):
            return lambda *_: (OK,)
        raise AttributeError(name)

    def cudaGetErrorName(self, code: int) -> tuple[int, bytes]:
        return OK, f"stand-in error {code}".encode()

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:
        return OK, b"as the test wants it"

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return OK, DEVICES

    def cudaSetDevice(self, device: int) -> tuple[int]:
        _current.device = device
        self.contexts.add(device)
        return (OK if device < DEVICES else INVALID,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        return OK, SimpleNamespace(name="stand-in", multiProcessorCount=1, major=9, minor=0)

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return OK, TOTAL_BYTES - sum(file.length_bytes for file in self.memory.values()), TOTAL_BYTES

    def cudaMalloc(self, length_bytes: int) -> tuple[int, int]:
        if length_bytes > TOTAL_BYTES:
            return 2, 0
        path = FOLDER / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{_current.device}"
        file = File(path, length_bytes)
        ctypes.memset(file.address, 0xEE, length_bytes)
        self.memory[file.address] = file
        return OK, file.address

    def cudaFree(self, address: int) -> tuple[int]:
        self.memory.pop(address).close()
        return (OK,)

    def cudaMemsetAsync(self, address: int, value: int, length_bytes: int, _: int) -> tuple[int]:
        ctypes.memset(address, value, length_bytes)
        return (OK,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, Any]:
        return OK, SimpleNamespace(reserved=_handle(self.memory[address].path))

    def cudaIpcOpenMemHandle(self, packed: Any, _: int) -> tuple[int, int]:
        path = _path(packed.reserved)
        if path.name.split("-")[2] == str(os.getpid()) or not File.has_owner(path):
            return 201, 0
        file = File(path)
        self.opened[file.address] = file
        return OK, file.address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:
        self.opened.pop(address).close()
        return (OK,)

    def cudaHostRegister(self, address: int, length_bytes: int, _: int) -> tuple[int]:
        if address in self.registered:
            return (712,)
        self.registered[address] = length_bytes
        return (OK,)

    def cudaHostUnregister(self, address: int) -> tuple[int]:
        del self.registered[address]
        return (OK,)

    def cudaStreamCreateWithFlags(self, _: int) -> tuple[int, int]:
        return OK, next(_numbers)

    def cudaEventCreateWithFlags(self, _: int) -> tuple[int, Event]:
        return OK, Event(FOLDER / f"{PREFIX}{os.getpid()}-{next(_numbers)}-event")

    def cudaIpcGetEventHandle(self, event: Event) -> tuple[int, Any]:
        return OK, SimpleNamespace(reserved=_handle(event.path))

    def cudaIpcOpenEventHandle(self, packed: Any) -> tuple[int, Any]:
        path = _path(packed.reserved)
        return (OK, Event(path)) if path.exists() else (201, None)

    def cudaEventRecord(self, event: Event, _: int) -> tuple[int]:
        event.path.write_bytes(REACHED if self.events_reached else PENDING)
        return (OK,)

    def cudaEventQuery(self, event: Event) -> tuple[int]:
        return (OK if event.path.read_bytes() == REACHED else NOT_READY,)

    def cudaMemcpyAsync(self, destination: int, source: int, length_bytes: int, *_: int) -> tuple[int]:
        ctypes.memmove(destination, source, length_bytes)
        return (OK,)

    def cudaMemcpyBatchAsync(self, destinations: Any, sources: Any, lengths: Any, *_: Any) -> tuple[int]:
        for destination, source, length_bytes in zip(destinations, sources, lengths, strict=True):
            ctypes.memmove(destination, source, length_bytes)
        return (OK,)

    def cudaDeviceCanAccessPeer(self, *_: int) -> tuple[int, int]:
        return OK, 1


class Driver:
    """The functions of `cuda.bindings.driver` that kvbridge calls."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.asked_for_uuids: list[int] = []
        """Devices, each time."""

    def cuInit(self, _: int) -> tuple[int]:
        return (OK,)

    def cuDeviceGet(self, device: int) -> tuple[int, int]:
        return OK, 100 + device

    def cuDeviceGetUuid(self, handle: int) -> tuple[int, Any]:
        self.asked_for_uuids.append(handle - 100)
        return OK, SimpleNamespace(bytes=bytes([handle - 99]) * 16)

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        for start, file in (*self._runtime.memory.items(), *self._runtime.opened.items()):
            if start <= address < start + file.length_bytes:
                return OK, start, file.length_bytes
        return SimpleNamespace(name="CUDA_ERROR_NOT_FOUND", __int__=lambda: 500), None, None


class Copier:
    """Takes the place of the kernel that copies stretches."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def reserve(self, *_: object) -> None:
        pass

    def submit(self, operations: Any, *, stream: int) -> None:
        from kvbridge.kernels.copies import copy_operations

        copy_operations(operations.source, operations.destination, operations.length)

    def close(self) -> None:
        pass


def install(replace: Any = setattr) -> Runtime:
    """Take CUDA's place in this process; `replace` sets an attribute (`monkeypatch.setattr` undoes it again)."""
    from kvbridge.kernels.cuda import runtime
    from kvbridge.pool.memory import gpu_memory
    from kvbridge.transport.local import gpu as local_gpu

    made = Runtime()
    driver = Driver(made)
    replace(runtime, "library", lambda name="cuda.bindings.runtime": driver if name.endswith("driver") else made)
    replace(gpu_memory, "_uuids", {})
    replace(runtime, "ACCELERATOR_NODES", (Path("/dev/null"),))
    replace(local_gpu, "StretchCopier", Copier)
    return made


def _handle(path: Path) -> bytes:
    return str(path).encode().ljust(HANDLE_BYTES, b"\0")


def _path(handle: bytes) -> Path:
    return Path(handle.rstrip(b"\0").decode())


if __name__ == "__main__":
    sys.exit("a helper of tests")
