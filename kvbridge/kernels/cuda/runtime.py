"""The calls of the CUDA runtime that kvbridge needs, with errors that say the cause and the cure.

Addresses and handles of streams are plain integers, as torch gives them (`tensor.data_ptr()`,
`torch.cuda.current_stream().cuda_stream`), so that a process without torch can use all of it. Each call makes its device the
current one of its thread, and leaves it so.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvbridge.core.errors import CHECKOUT, RegistrationError, TransportError, UnsupportedError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Closing

ACCELERATOR_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_ALREADY_REGISTERED = 712
_NOT_READY = 600
_PEER_ACCESS_ALREADY = 704


@cache
def library(name: str = "cuda.bindings.runtime") -> Any:  # noqa: ANN401 - the bindings ship no types
    """Return a module of the package cuda-core. Raises UnsupportedError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"no CUDA here: the package cuda-core is not installed ({error}); {CHECKOUT.format('cuda')}"
        ) from error


def has_accelerator() -> bool:
    """Whether a driver has made its device node on this host; loads nothing. Libraries list device memory with and without one."""
    return any(node.exists() for node in ACCELERATOR_NODES)


def reason_without_device() -> str:
    """Return why this process cannot use a GPU, or an empty text when it can."""
    try:
        count = device_count()
    except (UnsupportedError, TransportError) as error:
        return str(error)
    return "" if count else "the CUDA driver finds no device"


def device_count() -> int:
    """Return how many devices this process sees. Raises UnsupportedError without library or driver."""
    code, *values = library().cudaGetDeviceCount()
    if int(code) == 100:  # cudaErrorNoDevice
        return 0
    if int(code):
        raise UnsupportedError(f"no CUDA here: {_text(code)}; the driver must be installed and as new as the runtime")
    return int(values[0])


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device's properties, and its memory at the moment."""

    name: str
    multiprocessors: int
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


def device_facts(device: int) -> DeviceFacts:
    """Read a device's facts; that makes a context, half a GB of its memory. Raises UnsupportedError when it does not exist."""
    use(device)
    found = call("cudaGetDeviceProperties", device)
    free, total = call("cudaMemGetInfo")
    return DeviceFacts(
        name=found.name.decode() if isinstance(found.name, bytes) else str(found.name),
        multiprocessors=int(found.multiProcessorCount),
        capability=(int(found.major), int(found.minor)),
        total_bytes=int(total),
        free_bytes=int(free),
    )


def use(device: int) -> None:
    """Make a device the current one of this thread. Raises UnsupportedError when it does not exist."""
    (code,) = library().cudaSetDevice(device)
    if int(code):
        raise UnsupportedError(
            f"cuda:{device} cannot be used: {_text(code)}; this process sees {device_count()} devices "
            "(parallelism.ranks, CUDA_VISIBLE_DEVICES)"
        )


def synchronize(device: int) -> None:
    """Wait for everything that this process has submitted to a device."""
    use(device)
    call("cudaDeviceSynchronize")


# ------------------------------------------------------------------------------------------- device memory


def allocate(device: int, length_bytes: int) -> int:
    """Return the address of new device memory, 256-byte aligned, of undefined content; `free` gives it back.

    Raises RegistrationError when it does not fit, with what is free.
    """
    use(device)
    code, address = library().cudaMalloc(length_bytes)
    if int(code):
        free_bytes, total_bytes = call("cudaMemGetInfo")
        raise RegistrationError(
            f"cuda:{device} has no {length_bytes} bytes left ({_text(code)}): {free_bytes} of {total_bytes} are free; "
            "configure fewer pages (pools.device), or end other users of the device"
        )
    return int(address)


def free(device: int, address: int) -> None:
    """Free device memory. Waits until the device does not use it any more."""
    use(device)
    call("cudaFree", address)


def fill(device: int, address: int, length_bytes: int, value: int = 0, *, stream: int = 0) -> None:
    """Set every byte, in stream order."""
    use(device)
    call("cudaMemsetAsync", address, value, length_bytes, stream)


def export_memory(device: int, address: int) -> bytes:
    """Return the handle (64 bytes) by which other processes of the host open an allocation; `address` is its first byte."""
    use(device)
    return bytes(call("cudaIpcGetMemHandle", address).reserved)


def open_memory(device: int, handle: bytes) -> int:
    """Map another process's allocation for use from `device`; `close_memory` unmaps it.

    Once a process: a second opening of the same allocation here fails, as does opening in the process that made it. When the memory
    lies on another device, peer access to it is switched on (NVLink or PCIe). Raises RegistrationError.
    """
    use(device)
    packed = library().cudaIpcMemHandle_t()
    packed.reserved = handle
    code, address = library().cudaIpcOpenMemHandle(packed, library().cudaIpcMemLazyEnablePeerAccess)
    if int(code):
        raise RegistrationError(
            f"cuda:{device} cannot open another process's device memory: {_text(code)}; the process that owns it must live, on "
            "this host, in the same IPC namespace (containers: share it), and the devices must reach each other"
        )
    return int(address)


def close_memory(device: int, address: int) -> None:
    """Unmap what `open_memory` mapped; nothing uses it any more."""
    use(device)
    call("cudaIpcCloseMemHandle", address)


# ------------------------------------------------------------------------------------------- host memory


def register_host(address: int, length_bytes: int, *, device: int = 0, label: str = "host memory") -> None:
    """Page-lock host memory and map it for every device; afterwards its address is valid on devices, too.

    Another process may have registered the same mapping. The memory must be page-aligned; pages that do not exist yet are made.
    Raises RegistrationError with cause and fix.
    """
    use(device)
    flags = library().cudaHostRegisterPortable | library().cudaHostRegisterMapped
    (code,) = library().cudaHostRegister(address, length_bytes, flags)
    if not int(code):
        return
    cure = (
        "a part of it is registered already: register each mapping once a process"
        if int(code) == _ALREADY_REGISTERED
        else "the memory must be locked in place: raise the memlock limit (ulimit -l unlimited; LimitMEMLOCK=infinity; "
        "docker --ulimit memlock=-1), the container's memory limit, or configure a smaller host pool"
    )
    raise RegistrationError(
        f"{label}: {length_bytes} bytes at {address:#x} cannot be registered with CUDA ({_text(code)}); {cure}"
    )


def unregister_host(address: int) -> None:
    """Undo `register_host`; nothing on any device uses the memory any more."""
    call("cudaHostUnregister", address)


# ------------------------------------------------------------------------------------------- streams and events


class Stream(Closing):
    """A stream of this process, or another owner's by its handle (`owned=False`, as torch's)."""

    def __init__(self, device: int, handle: int, *, owned: bool) -> None:
        self.device = device
        self.handle = handle
        self._owned = owned

    @classmethod
    def create(cls, device: int) -> Self:
        """A new stream that does not wait for the default stream."""
        use(device)
        made = call("cudaStreamCreateWithFlags", library().cudaStreamNonBlocking)
        return cls(device, int(made), owned=True)

    @classmethod
    def of(cls, device: int, handle: int) -> Self:
        """Another owner's stream, which must outlive this object."""
        return cls(device, handle, owned=False)

    def synchronize(self) -> None:
        """Wait until everything submitted so far is done. Raises TransportError for what failed on the device."""
        use(self.device)
        call("cudaStreamSynchronize", self.handle)

    def idle(self) -> bool:
        """Whether everything submitted so far is done; never waits. Raises TransportError for what failed."""
        use(self.device)
        return _is_done("cudaStreamQuery", self.handle)

    def close(self) -> None:
        """Destroy an owned stream; submitted work goes on. Harmless when closed."""
        if self._owned:
            self._owned = False
            use(self.device)
            call("cudaStreamDestroy", self.handle)

    # cuda-core's protocol for foreign streams.
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Event:
    """A point in a stream that other streams, and with `export` other processes, can wait for. Without timing."""

    def __init__(self, device: int, handle: Any) -> None:  # noqa: ANN401
        self.device = device
        self.handle = handle

    @classmethod
    def create(cls, device: int, *, interprocess: bool = False) -> Self:
        """A new event; it counts as reached until it is recorded."""
        use(device)
        flags = library().cudaEventDisableTiming | (library().cudaEventInterprocess if interprocess else 0)
        return cls(device, call("cudaEventCreateWithFlags", flags))

    @classmethod
    def open(cls, device: int, handle: bytes) -> Self:
        """Another process's interprocess event. Raises RegistrationError."""
        use(device)
        packed = library().cudaIpcEventHandle_t()
        packed.reserved = handle
        code, event = library().cudaIpcOpenEventHandle(packed)
        if int(code):
            raise RegistrationError(
                f"cuda:{device} cannot open another process's event: {_text(code)}; that process must live, on this host"
            )
        return cls(device, event)

    def export(self) -> bytes:
        """Return the handle (64 bytes) for `open` in another process."""
        use(self.device)
        return bytes(call("cudaIpcGetEventHandle", self.handle).reserved)

    def record(self, stream: int) -> None:
        """Mark the present end of a stream of this event's device."""
        use(self.device)
        call("cudaEventRecord", self.handle, stream)

    def reached(self) -> bool:
        """Whether everything before the last record is done; never waits."""
        use(self.device)
        return _is_done("cudaEventQuery", self.handle)

    def hold(self, stream: int) -> None:
        """Have a stream wait for the last record; the host does not wait."""
        use(self.device)
        call("cudaStreamWaitEvent", stream, self.handle, 0)

    def synchronize(self) -> None:
        """Wait for the last record."""
        use(self.device)
        call("cudaEventSynchronize", self.handle)

    def close(self) -> None:
        """Destroy it; submitted waits stay valid."""
        use(self.device)
        call("cudaEventDestroy", self.handle)


# ------------------------------------------------------------------------------------------- copies


def copy(destination: int, source: int, length_bytes: int, *, device: int, stream: int) -> None:
    """Copy bytes between any two memories that the device reaches, in stream order, by a copy engine."""
    use(device)
    call("cudaMemcpyAsync", destination, source, length_bytes, library().cudaMemcpyKind.cudaMemcpyDefault, stream)


def copy_batch(operations: Operations, *, device: int, stream: int) -> None:
    """Copy many stretches in one call, in any order among themselves, by the copy engines. `stream` is not the default one.

    Only device memory and registered host memory, and no stretch across the border of a registration. Raises TransportError when
    this driver cannot (before CUDA 12.8).
    """
    if not len(operations):
        return
    use(device)
    attributes = library().cudaMemcpyAttributes()
    attributes.srcAccessOrder = library().cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    columns = (operations.destination.tolist(), operations.source.tolist(), operations.length.tolist())
    call("cudaMemcpyBatchAsync", *columns, len(operations), [attributes], [0], 1, stream)


def can_reach(device: int, other: int) -> bool:
    """Whether a device can read and write another one's memory directly."""
    return device == other or bool(call("cudaDeviceCanAccessPeer", device, other))


@cache
def reach(device: int, other: int) -> None:
    """Let `device` read and write the memory of `other`, in this process. Raises UnsupportedError."""
    if device == other:
        return
    if not can_reach(device, other):
        raise UnsupportedError(
            f"cuda:{device} cannot reach the memory of cuda:{other} directly (no NVLink, no peer PCIe)"
        )
    use(device)
    (code,) = library().cudaDeviceEnablePeerAccess(other, 0)
    if int(code) not in {0, _PEER_ACCESS_ALREADY}:
        raise UnsupportedError(f"cuda:{device} cannot reach the memory of cuda:{other}: {_text(code)}")


# ------------------------------------------------------------------------------------------- inside


def call(name: str, *arguments: Any) -> Any:  # noqa: ANN401
    """Call the runtime and return its answer without the code: None, a value or a tuple. Raises TransportError."""
    code, *values = getattr(library(), name)(*arguments)
    if int(code):
        raise TransportError(f"CUDA: {name} failed: {_text(code)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _is_done(name: str, handle: Any) -> bool:  # noqa: ANN401
    (code,) = getattr(library(), name)(handle)
    if int(code) == _NOT_READY:
        library().cudaGetLastError()  # "not ready" is no error, but the next call of this function would return it
        return False
    if int(code):
        raise TransportError(f"CUDA: {name} failed: {_text(code)}")
    return True


def _text(code: Any) -> str:  # noqa: ANN401
    _, name = library().cudaGetErrorName(code)
    _, words = library().cudaGetErrorString(code)
    return f"{name.decode()}, {words.decode()}"
