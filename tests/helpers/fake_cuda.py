"""CUDA as pools and copy streams use it, on host memory of this process; counts say whether everything was given back."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvbridge.core.errors import RegistrationError, TransportError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.copies import copy_operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import HeldThings, ProcessAllocations
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.transport.local.gpu import Route, Way


class FakeCuda:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> None:
        self._monkeypatch = monkeypatch
        self.uuids = [f"{number:032x}" for number in range(1, devices + 1)]
        self.memory: dict[int, mmap.mmap] = {}
        self.handles: dict[bytes, int] = {}
        self.opened: list[tuple[int, int]] = []
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.shareable = True
        self.refuse_register = ""
        self.free_bytes = 1 << 30
        calls = "allocate free fill synchronize open_memory close_memory device_facts export_memory"
        for name in f"{calls} register_host unregister_host use".split():
            monkeypatch.setattr(runtime, name, getattr(self, name))
        monkeypatch.setattr(runtime, "device_count", lambda: devices)
        for name in ("device_by_uuid", "device_uuid", "allocation_of"):
            monkeypatch.setattr(gpu_memory, name, getattr(self, name))
        # What other tests have left of this process's own: a worker's device memory, for one, stays until the process ends.
        monkeypatch.setattr(gpu_memory, "_here", ProcessAllocations())
        monkeypatch.setattr(gpu_memory, "_ranges", HeldThings())
        monkeypatch.setattr(gpu_memory, "_own_events", {})

    @contextmanager
    def other_process(self) -> Iterator[None]:
        """Within, nothing is known of what this process has exported."""
        with self._monkeypatch.context() as patch:
            patch.setattr(gpu_memory, "_here", ProcessAllocations())
            yield

    def use(self, device: int) -> None:
        if device >= len(self.uuids):
            raise UnsupportedError(f"cuda:{device} cannot be used")

    def allocate(self, device: int, length_bytes: int) -> int:
        self.use(device)
        if length_bytes > self.free_bytes:
            raise RegistrationError(f"cuda:{device} has no {length_bytes} bytes left: {self.free_bytes} are free")
        self.free_bytes -= length_bytes
        memory = mmap.mmap(-1, length_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 0xEE, length_bytes)
        self.memory[address] = memory
        return address

    def free(self, device: int, address: int) -> None:
        self.free_bytes += len(self.memory[address])
        del self.memory[address]

    def fill(self, device: int, address: int, length_bytes: int, value: int = 0, *, stream: int = 0) -> None:
        ctypes.memset(address, value, length_bytes)

    def synchronize(self, device: int) -> None:
        self.use(device)

    def device_facts(self, device: int) -> runtime.DeviceFacts:
        return runtime.DeviceFacts("fake", 1, (9, 0), 1 << 30, self.free_bytes)

    def device_uuid(self, device: int) -> str:
        return self.uuids[device]

    def device_by_uuid(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise UnsupportedError(f"this process does not see the GPU {uuid}")
        return self.uuids.index(uuid)

    def allocation_of(self, device: int, address: int) -> tuple[int, int]:
        for start, memory in self.memory.items():
            if start <= address < start + len(memory):
                return start, len(memory)
        raise RegistrationError(f"{address:#x} is not in any device memory")

    def export_memory(self, device: int, address: int) -> bytes:
        if not self.shareable:
            raise TransportError("no handle")
        known = [handle for handle, of in self.handles.items() if of == address]
        handle = known[0] if known else secrets.token_bytes(64)
        self.handles[handle] = address
        return handle

    def open_memory(self, device: int, handle: bytes) -> int:
        if self.handles.get(handle) not in self.memory:
            raise RegistrationError(f"cuda:{device} cannot open another process's device memory")
        self.opened.append((device, self.handles[handle]))
        return self.handles[handle]

    def close_memory(self, device: int, address: int) -> None:
        self.opened.remove((device, address))

    def register_host(self, address: int, length_bytes: int, *, device: int = 0, label: str = "") -> None:
        self.use(device)
        if self.refuse_register:
            raise RegistrationError(f"{label}: {self.refuse_register}")
        assert address not in self.registered
        self.registered[address] = length_bytes
        self.registrations += 1

    def unregister_host(self, address: int) -> None:
        del self.registered[address]


class FakeEvent:
    def __init__(self, handle: bytes = b"") -> None:
        self.handle = handle or secrets.token_bytes(64)
        self.streams: list[int] = []
        self.done = True
        self.closed = False
        self.broken: Exception | None = None

    def record(self, stream: int) -> None:
        self.streams.append(stream)
        self.done = False

    def reached(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.done

    def export(self) -> bytes:
        return self.handle

    def close(self) -> None:
        assert not self.closed
        self.closed = True


ANY_ROUTE = Route(Way.KERNEL, 0, over_host_link=True)


class FakeMark:
    def __init__(self, stream: FakeStream, after: int) -> None:
        self._stream = stream
        self._after = after

    def reached(self) -> bool:
        self._stream.require_health()
        if self._stream.at_once:
            self._stream.run()
        return self._stream.copied >= self._after


class FakeStream:
    """Copies when `run` is called, or when it is asked after (`at_once`)."""

    def __init__(
        self, route: Route = ANY_ROUTE, *, at_once: bool = False, slice_operations: int = 8, first_operations: int = 0
    ) -> None:
        self.route = route
        self.at_once = at_once
        self.slice_operations = slice_operations
        self.first_operations = first_operations or slice_operations
        self.started: list[Operations] = []
        self.copied = 0
        self.broken = False
        self.refusals: deque[str] = deque()
        """The next starts fail with these words."""
        self.marks = 0
        self.closed = False
        self._waiting: deque[Operations] = deque()

    def start(self, operations: Operations) -> None:
        self.require_health()
        if self.refusals:
            raise TransportError(self.refusals.popleft())
        self.started.append(operations)
        self._waiting.append(operations)

    def mark(self) -> FakeMark:
        self.require_health()
        self.marks += 1
        return FakeMark(self, len(self.started))

    def release(self, mark: object) -> None:
        self.marks -= 1

    def close(self) -> None:
        assert not self._waiting, "a stream was closed with copies on their way"
        self.closed = True

    def run(self, slices: int | None = None) -> None:
        for _ in range(len(self._waiting) if slices is None else slices):
            part = self._waiting.popleft()
            copy_operations(part.source, part.destination, part.length)
            self.copied += 1

    def require_health(self) -> None:
        if self.broken:
            raise TransportError("CUDA: an illegal memory access was encountered")


def page_address(region: Region, page: int) -> int:
    assert 0 <= page < region.page_count
    extent, within = divmod(page, region.pages_per_extent)
    return region.extent_addresses[extent] + within * region.page_stride_bytes


def region_of(pool: MemoryPool, component: ComponentKind, layer: int) -> Region:
    return next(one for one in pool.regions if (one.component, one.layer) == (component, layer))
