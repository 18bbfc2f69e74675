"""Memory that GPUs reach: device allocations that processes of one host share, and host memory that is registered with CUDA."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConflictError, RegistrationError, TransportError, UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import EXTENT_ALIGNMENT_BYTES, Extent, Progress, ignore_progress, part_of
from kvbridge.pool.memory.memory_limits import control_group_limits
from kvbridge.pool.memory.shared_mapping import SharedMapping

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class _Entry(Generic[ValueT]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the thing is being opened or closed, which may take long."""
    holders: int = 0
    values: list[ValueT] = field(default_factory=list)
    """Empty while it is closed."""


class HeldThings(Generic[KeyT, ValueT]):
    """Things by key that a process may open once only: the first holder opens one, the last holder closes it."""

    def __init__(self) -> None:
        self._entries: dict[KeyT, _Entry[ValueT]] = {}
        self._lock = threading.Lock()

    def hold(
        self, key: KeyT, open_it: Callable[[], ValueT], *, check: Callable[[set[KeyT]], None] = lambda _: None
    ) -> ValueT:
        """Become a holder and return the thing; the first one opens it. What `open_it` raises leaves no holder behind.

        `check` sees the keys of all other things before anything is opened, and may raise.
        """
        with self._lock:
            check(self._entries.keys() - {key})
            entry = self._entries.setdefault(key, _Entry())
            entry.holders += 1
        try:
            with entry.lock:
                if not entry.values:
                    entry.values.append(open_it())
                return entry.values[0]
        except BaseException:
            self._leave(key, entry)
            raise

    def let_go(self, key: KeyT, close_it: Callable[[ValueT], None]) -> None:
        """Hold it no longer; the last one closes it. Only for holders."""
        entry = self._entries[key]
        with entry.lock:
            with self._lock:
                last = entry.holders == 1
            try:
                if last:
                    close_it(entry.values.pop())
            finally:
                self._leave(key, entry)

    def _leave(self, key: KeyT, entry: _Entry[ValueT]) -> None:
        with self._lock:
            entry.holders -= 1
            if not entry.holders:  # who came while it was being closed opens it anew, and is counted already
                self._entries.pop(key, None)

    def holders(self) -> dict[KeyT, int]:
        """Return everything that is open, with the number of its holders."""
        with self._lock:
            return {key: entry.holders for key, entry in self._entries.items() if entry.values}


# ------------------------------------------------------------------------------------------- devices and allocations

_uuids: dict[int, str] = {}
"""What the driver has said. A device keeps its UUID while the process lives."""


def device_uuid(device: int) -> str:
    """Return the UUID of a device: 32 hexadecimal digits, equal in every process of the host.

    The driver says it without a context, so the question takes no memory of the device. Raises UnsupportedError for a device that
    does not exist.
    """
    if device not in _uuids:
        _ask_driver("cuInit", 0, device=device)
        handle = _ask_driver("cuDeviceGet", device, device=device)
        _uuids[device] = bytes(_ask_driver("cuDeviceGetUuid", handle, device=device).bytes).hex()
    return _uuids[device]


def _ask_driver(name: str, argument: Any, *, device: int) -> Any:  # noqa: ANN401 - the bindings ship no types
    code, *found = getattr(runtime.library("cuda.bindings.driver"), name)(argument)
    if int(code):
        raise UnsupportedError(f"cuda:{device} cannot be identified: the CUDA driver answers {code.name} to {name}")
    return found[0] if found else None


def device_by_uuid(uuid: str) -> int:
    """Return the CUDA ordinal of a device in this process. Raises UnsupportedError when the process does not see it."""
    seen = {device_uuid(device): device for device in range(runtime.device_count())}
    try:
        return seen[uuid]
    except KeyError:
        raise UnsupportedError(
            f"this process does not see the GPU {uuid}; it sees {', '.join(seen) or 'none'} (CUDA_VISIBLE_DEVICES): "
            "start it with the device that its peer process uses"
        ) from None


class Allocation(NamedTuple):
    """The allocation in which an address lies."""

    address: int
    length_bytes: int


def allocation_of(device: int, address: int) -> Allocation:
    """Return the allocation that holds an address of this process. Raises RegistrationError when it is no device memory."""
    runtime.use(device)
    code, *found = runtime.library("cuda.bindings.driver").cuMemGetAddressRange(address)
    if int(code):
        raise RegistrationError(
            f"{address:#x} is not in any device memory of this process on cuda:{device} ({code.name}); "
            "the tensor was freed, or lies on another device"
        )
    base, length_bytes = found
    return Allocation(int(base), int(length_bytes))


@dataclass(frozen=True, eq=False)
class ProcessAllocations:
    """The allocations that one process shares. There is one of it in each process, since CUDA counts by process.

    CUDA cannot open an allocation in the process that made it. So what is exported here is remembered, and opening it gives
    its own address: an engine that brings its memory, its rank worker and a peer in the same process all find it.
    """

    exported: dict[bytes, int] = field(default_factory=dict)
    """Handle to address, of the process's own."""
    exported_lock: threading.Lock = field(default_factory=threading.Lock)
    opened: HeldThings[tuple[bytes, int], int] = field(default_factory=HeldThings)
    """Handle and the device that it was opened from, to the address here."""


_here = ProcessAllocations()


class ExportedAllocation(NamedTuple):
    """An allocation of this process, and how others open it (`extent.origin`)."""

    handle: bytes
    """64 bytes."""
    extent: Extent
    """All of it."""

    def forget(self) -> None:
        """Say that the allocation is about to be freed: CUDA may give its handle to another one. Harmless when forgotten."""
        with _here.exported_lock:
            _here.exported.pop(self.handle, None)


def export(device: int, address: int) -> ExportedAllocation:
    """Say how other processes open the allocation in which `address` lies. Raises RegistrationError for memory without a handle.

    Whoever frees the allocation calls `forget` first.
    """
    allocation = allocation_of(device, address)
    try:
        handle = runtime.export_memory(device, allocation.address)
    except TransportError as error:
        raise RegistrationError(
            f"device memory of cuda:{device} at {allocation.address:#x} cannot be shared with other processes: {error}; it must "
            "come from cudaMalloc (torch: no expandable_segments in PYTORCH_CUDA_ALLOC_CONF), not from a virtual, managed or "
            "asynchronous allocation"
        ) from error
    with _here.exported_lock:
        _here.exported[handle] = allocation.address
    origin = CudaOrigin(handle=handle, device_uuid=device_uuid(device), length_bytes=allocation.length_bytes)
    return ExportedAllocation(handle, _allocation_extent(allocation.address, device, origin))


def _allocation_extent(address: int, device: int, origin: CudaOrigin) -> Extent:
    return Extent(
        address=address,
        length_bytes=origin.length_bytes,
        kind=MemoryKind.VRAM,
        device=device,
        origin=origin,
        label=f"cuda:{device}",
    )


class OpenedAllocation(Closing):
    """An exported allocation, usable in this process until `close`. Any thread may open and close it."""

    def __init__(self, origin: CudaOrigin, *, device: int | None = None) -> None:
        """Open it for use from `device`; none: from the device that holds it, by its UUID.

        From another device than that, peer access to it is switched on. Raises RegistrationError when its process is gone
        or cannot be reached, UnsupportedError when this process does not see the device.
        """
        handle, self._close = origin.handle, _nothing
        with _here.exported_lock:
            own = _here.exported.get(handle)
        chosen = device_by_uuid(origin.device_uuid) if device is None else device
        address = own
        if address is None:
            key, opened = (handle, chosen), _here.opened
            address = opened.hold(key, lambda: runtime.open_memory(chosen, handle))
            self._close = lambda: opened.let_go(key, lambda found: runtime.close_memory(chosen, found))
        self.extent = _allocation_extent(address, chosen, origin)
        """All of it, at its address here."""

    def close(self) -> None:
        """Give it up; nothing on any device uses it through this holder any more. Harmless when closed."""
        close, self._close = self._close, _nothing
        close()


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------- registered host memory

PIECE_BYTES = 1 << 30
"""Host memory is registered in pieces of about this size, so that progress can be shown: 0.05 to 0.4 s each."""

Range = tuple[int, int]
"""(address, length in bytes) in this process."""

_ranges: HeldThings[Range, list[Range]] = HeldThings()
"""What is registered in this process, and in which pieces."""


class HostRegistration(Closing):
    """Host memory that every CUDA device of this process reads and writes at its host addresses, until `close`.

    Registering pins every page and takes 0.05 to 0.4 s for each GiB, once a process: a second registration of the same memory,
    or of a part of it, costs nothing, and the last one that is closed ends it. A mapping cannot be closed before its registration.
    Any thread may create and close one. Nothing on any device uses the memory any more when it is closed.
    """

    def __init__(
        self,
        memory: Iterable[SharedMapping | Extent],
        *,
        extents: Iterable[Extent] = (),
        device: int = 0,
        on_progress: Progress = ignore_progress,
    ) -> None:
        """Register. `on_progress` counts over all of `memory`, and what it raises undoes everything.

        No operation crosses the border of one of `extents`, so the memory is registered in pieces that end at such borders: copy
        engines refuse a copy that crosses from one registration into the next. `device` is one that this process
        may use. Raises RegistrationError with cause and cure, UnsupportedError without CUDA; then nothing is registered that was
        not before.
        """
        self._stack = ExitStack()
        memory = tuple(memory)
        cuts = sorted({extent.address for extent in extents if extent.address % EXTENT_ALIGNMENT_BYTES == 0})
        total_bytes, done_bytes = sum(each.length_bytes for each in memory), 0
        try:
            for each in memory:
                self._register(each, cuts, device, part_of(on_progress, done_bytes, total_bytes))
                done_bytes += each.length_bytes
                on_progress(done_bytes, total_bytes)
        except BaseException:
            self._stack.close()
            raise

    def _register(self, memory: SharedMapping | Extent, cuts: list[int], device: int, on_progress: Progress) -> None:
        span = memory.address, memory.length_bytes
        if isinstance(memory, SharedMapping):
            label = f"shared memory {memory.path}"
            self._stack.callback(memory.buffer.release)
        else:
            label = memory.label or f"memory at {memory.address:#x}"
        key = registered_range(span) or span
        register = partial(_register_pieces, key, cuts, device=device, label=label, on_progress=on_progress)
        _ranges.hold(key, register, check=partial(_check_apart, key, label))
        self._stack.callback(_ranges.let_go, key, _unregister_pieces)

    def close(self) -> None:
        """Give it up. Harmless when closed."""
        self._stack.close()


def registered_ranges() -> dict[Range, int]:
    """Return what is registered in this process, with the number of holders of each range."""
    return _ranges.holders()


def registered_range(span: Range) -> Range | None:
    """Return the range that is registered and in which all of another lies."""
    start, stop = span[0], sum(span)
    return next((each for each in _ranges.holders() if each[0] <= start and stop <= sum(each)), None)


def _pieces(span: Range, cuts: Iterable[int]) -> list[Range]:
    """Cut a range at as few of the places as leave no piece longer than `PIECE_BYTES`, as far as that can be."""
    begin, end = span[0], sum(span)
    found, last = list[Range](), begin
    for cut in (*(cut for cut in cuts if begin < cut < end), end):
        if cut - begin > PIECE_BYTES and last > begin:
            found.append((begin, last - begin))
            begin = last
        last = cut
    return [*found, (begin, end - begin)]


def _register_pieces(
    span: Range, cuts: Iterable[int], *, device: int, label: str, on_progress: Progress
) -> list[Range]:
    done: list[Range] = []
    try:
        for address, length_bytes in _pieces(span, cuts):
            runtime.register_host(address, length_bytes, device=device, label=label)
            done.append((address, length_bytes))
            on_progress(sum(done[-1]) - span[0], span[1])
    except RegistrationError as error:
        _unregister_pieces(done)
        raise RegistrationError(f"{error}. Here: {_limits()}") from error
    except BaseException:
        _unregister_pieces(done)
        raise
    return done


def _unregister_pieces(pieces: list[Range]) -> None:
    for address, _ in pieces:
        runtime.unregister_host(address)


def _check_apart(span: Range, label: str, others: set[Range]) -> None:
    start, length = span
    for other_start, other_length in others:
        if start < other_start + other_length and other_start < start + length:
            raise ConflictError(
                f"{label}: [{start:#x}, {start + length:#x}) overlaps [{other_start:#x}, {other_start + other_length:#x}), "
                "which is registered with CUDA already; register whole mappings only"
            )


def _limits() -> str:
    """Say which limits there are on pinning memory, as this process finds them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = "no memlock limit" if soft == resource.RLIM_INFINITY else f"a memlock limit of {soft} bytes"
    groups = [f"{limit.name} with {limit.available_bytes} bytes left" for limit in control_group_limits()]
    return "; ".join([memlock, *groups])
