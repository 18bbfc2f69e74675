"""Memory that GPUs reach: allocations that processes of one host share, registered host memory, and points in a GPU's work."""

from __future__ import annotations

import resource
import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

from kvbridge.core.errors import BridgeError, ConflictError, RegistrationError, TransportError, UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.process import Closing
from kvbridge.core.wire.messages import CudaOrigin, StreamPoint
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.runtime import Event
from kvbridge.pool.memory.layout import EXTENT_ALIGNMENT_BYTES, Extent, Progress, ignore_progress, part_of
from kvbridge.pool.memory.shared_mapping import SharedMapping, control_group_limits

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class _Entry(Generic[ValueT]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while somebody opens or closes the thing, which may take long."""
    holders: int = 0
    values: list[ValueT] = field(default_factory=list)
    """The thing; empty while it is closed."""


class HeldThings(Generic[KeyT, ValueT]):
    """Things by key that a process may open once only: the first holder opens one, the last holder closes it."""

    def __init__(self) -> None:
        self._entries: dict[KeyT, _Entry[ValueT]] = {}
        self._lock = threading.Lock()

    def hold(
        self, key: KeyT, open_it: Callable[[], ValueT], *, check: Callable[[set[KeyT]], None] = lambda _: None
    ) -> ValueT:
        """Become a holder and return the thing; the first holder opens it. An error of `open_it` leaves no holder behind.

        `check` gets the keys of all other things before anything is opened, and may raise.
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
        """Stop holding the thing; the last holder closes it. Only holders call this."""
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
            if not entry.holders:  # a holder that came while it was being closed opens it anew, and is counted already
                self._entries.pop(key, None)

    def holders(self) -> dict[KeyT, int]:
        """Return everything that is open, with the number of its holders."""
        with self._lock:
            return {key: entry.holders for key, entry in self._entries.items() if entry.values}


# ------------------------------------------------------------------------------------------- devices and allocations

_uuids: dict[int, str] = {}
"""The driver's answers by device. A device keeps its UUID while the process lives."""


def device_uuid(device: int) -> str:
    """Return the UUID of a device: 32 hexadecimal digits, equal in every process of the host.

    The driver answers without a context, so the question takes no memory of the device. Raises UnsupportedError for a device that
    does not exist.
    """

    def ask(name: str, argument: Any) -> Any:  # noqa: ANN401 - the bindings ship no types
        code, *found = getattr(runtime.library("cuda.bindings.driver"), name)(argument)
        if int(code):
            raise UnsupportedError(f"cuda:{device} cannot be identified: the CUDA driver answers {code.name} to {name}")
        return found[0] if found else None

    if device not in _uuids:
        ask("cuInit", 0)
        _uuids[device] = bytes(ask("cuDeviceGetUuid", ask("cuDeviceGet", device)).bytes).hex()
    return _uuids[device]


def device_by_uuid(uuid: str) -> int:
    """Return the CUDA ordinal of a device in this process. Raises UnsupportedError when the process does not see it."""
    seen = {device_uuid(device): device for device in range(runtime.device_count())}
    if uuid not in seen:
        raise UnsupportedError(
            f"this process does not see the GPU {uuid}; it sees {', '.join(seen) or 'none'} (CUDA_VISIBLE_DEVICES): "
            "start it with the device that its peer process uses"
        )
    return seen[uuid]


Range = tuple[int, int]
"""(address, length in bytes) in this process."""


def allocation_of(device: int, address: int) -> Range:
    """Return the allocation that holds an address of this process. Raises RegistrationError when it is no device memory."""
    runtime.use(device)
    code, *found = runtime.library("cuda.bindings.driver").cuMemGetAddressRange(address)
    if int(code):
        raise RegistrationError(
            f"{address:#x} is not in any device memory of this process on cuda:{device} ({code.name}); "
            "the tensor was freed, or lies on another device"
        )
    return int(found[0]), int(found[1])


@dataclass(frozen=True, eq=False)
class ProcessAllocations:
    """The allocations that a process shares; one object in each process, since CUDA counts by process.

    CUDA cannot open an allocation in the process that made it. The process remembers its exported allocations instead, so an engine
    that brings its memory, its rank worker and a peer in the same process all find the allocation at its own address.
    """

    exported: dict[bytes, int] = field(default_factory=dict)
    """Handle to address of this process's own allocations. Single operations on a dict need no lock."""
    opened: HeldThings[tuple[bytes, int], int] = field(default_factory=HeldThings)
    """Handle and the device that opened it, to the address here."""


_here = ProcessAllocations()


def export(device: int, address: int) -> Extent:
    """Return the allocation in which `address` lies, with an origin by which other processes open it.

    The owner calls `forget_export` before it frees the allocation. Raises RegistrationError for memory without a handle.
    """
    base, length_bytes = allocation_of(device, address)
    try:
        handle = runtime.export_memory(device, base)
    except TransportError as error:
        raise RegistrationError(
            f"device memory of cuda:{device} at {base:#x} cannot be shared with other processes: {error}; it must "
            "come from cudaMalloc (torch: no expandable_segments in PYTORCH_CUDA_ALLOC_CONF), not from a virtual, managed or "
            "asynchronous allocation"
        ) from error
    _here.exported[handle] = base
    origin = CudaOrigin(handle=handle, device_uuid=device_uuid(device), length_bytes=length_bytes)
    return _allocation_extent(base, device, origin)


def forget_export(extent: Extent) -> None:
    """Forget an exported allocation that is about to be freed: CUDA may give its handle to another one."""
    if isinstance(extent.origin, CudaOrigin):
        _here.exported.pop(extent.origin.handle, None)


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
        """Open it for use from `device`, by default from the device that holds it. Another device gets peer access to that one.

        Raises RegistrationError when the allocation's process is gone or cannot be reached, UnsupportedError when this process does
        not see the device.
        """
        handle, opened, self._stack = origin.handle, _here.opened, ExitStack()
        chosen = device_by_uuid(origin.device_uuid) if device is None else device
        address = _here.exported.get(handle)
        if address is None:
            address = opened.hold((handle, chosen), lambda: runtime.open_memory(chosen, handle))
            self._stack.callback(opened.let_go, (handle, chosen), lambda found: runtime.close_memory(chosen, found))
        self.extent = _allocation_extent(address, chosen, origin)
        """The allocation at its address here."""

    def close(self) -> None:
        """Close the allocation; no device uses it through this holder any more. Harmless when closed."""
        self._stack.close()


# ------------------------------------------------------------------------------------------- registered host memory

PIECE_BYTES = 1 << 30
"""Host memory is registered in pieces of about this size, so that progress can be shown: 0.05 to 0.4 s each."""

_ranges: HeldThings[Range, list[Range]] = HeldThings()
"""The registered ranges of this process, each with its pieces."""


class HostRegistration(Closing):
    """Host memory that every CUDA device of this process reads and writes at its host addresses, until `close`.

    To register memory pins every page and takes 0.05 to 0.4 s for each GiB, once a process: a second registration of the same
    memory, or of a part of it, costs nothing, and the last one to close unpins the pages. A mapping cannot be closed before its
    registration. Any thread may create and close one. The caller closes it when no device uses the memory any more.
    """

    def __init__(
        self,
        memory: Iterable[SharedMapping | Extent],
        *,
        extents: Iterable[Extent] = (),
        device: int = 0,
        on_progress: Progress = ignore_progress,
    ) -> None:
        """Register. `on_progress` counts over all of `memory`; an exception of `on_progress` undoes everything.

        Copy engines refuse a copy that crosses from one registration into the next, so each registered piece ends at a border of
        one of `extents`, which no operation crosses. `device` is one that this process may use. Raises RegistrationError with cause
        and cure, and UnsupportedError without CUDA; a failure leaves nothing registered that was not before.
        """
        self._stack = ExitStack()
        memory = tuple(memory)
        cuts = sorted({extent.address for extent in extents if extent.address % EXTENT_ALIGNMENT_BYTES == 0})
        total_bytes, done_bytes = sum(each.length_bytes for each in memory), 0
        try:
            for each in memory:
                span, part = (each.address, each.length_bytes), part_of(on_progress, done_bytes, total_bytes)
                if isinstance(each, SharedMapping):
                    label = f"shared memory {each.path}"
                    self._stack.callback(each.buffer.release)
                else:
                    label = each.label or f"memory at {each.address:#x}"
                key = registered_range(span) or span
                register = partial(_register_pieces, key, cuts, device=device, label=label, on_progress=part)
                _ranges.hold(key, register, check=partial(_check_apart, key, label))
                self._stack.callback(_ranges.let_go, key, _unregister_pieces)
                done_bytes += each.length_bytes
                on_progress(done_bytes, total_bytes)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """End the registration. Harmless when closed."""
        self._stack.close()


def registered_range(span: Range) -> Range | None:
    """Return the range that is registered and in which all of another lies."""
    return next((each for each in _ranges.holders() if each[0] <= span[0] and sum(span) <= sum(each)), None)


def _pieces(span: Range, cuts: Iterable[int]) -> list[Range]:
    """Cut a range at as few of `cuts` as possible, so that no piece is longer than `PIECE_BYTES` where they allow it."""
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
    with ExitStack() as undo:
        undo.callback(_unregister_pieces, done)
        for address, length_bytes in _pieces(span, cuts):
            try:
                runtime.register_host(address, length_bytes, device=device, label=label)
            except RegistrationError as error:
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                memlock = "no memlock limit" if soft == resource.RLIM_INFINITY else f"a memlock limit of {soft} bytes"
                groups = [f"{limit.name} with {limit.available_bytes} bytes left" for limit in control_group_limits()]
                raise RegistrationError(f"{error}. Here: {'; '.join([memlock, *groups])}") from error
            done.append((address, length_bytes))
            on_progress(sum(done[-1]) - span[0], span[1])
        undo.pop_all()
    return done


def _unregister_pieces(pieces: list[Range]) -> None:
    for address, _ in pieces:
        runtime.unregister_host(address)


def _check_apart(span: Range, label: str, others: set[Range]) -> None:
    for other in others:
        if span[0] < sum(other) and other[0] < sum(span):
            raise ConflictError(
                f"{label}: [{span[0]:#x}, {sum(span):#x}) overlaps [{other[0]:#x}, {sum(other):#x}), "
                "which is registered with CUDA already; register whole mappings only"
            )


# ------------------------------------------------------------------------------------------- points in a GPU's work

FEWEST_EVENTS = 64
MOST_EVENTS = 4_096
MOST_RINGS = 64
"""A process keeps this many rings of others open, and closes the ring that was used longest ago."""

_own_events: dict[tuple[str, bytes], Event] = {}
"""Events of this process, by ring and handle: CUDA cannot open them here, and a rank worker may be one of our threads."""


class EventRing:
    """Interprocess events by which one process names points in its GPU's work. Used by one thread.

    An engine publishes pages that its GPU has yet to write. It records an event behind that work and names it in the publication;
    the rank worker reads nothing before the event is reached, and asks without waiting.

    Events are recycled, since there are only so many. To record an event again that somebody still waits for can only delay that
    waiter. To keep this rare, an event is used again only when half of all events, the oldest ones, have been reached.
    """

    def __init__(self, device_uuid: str, create: Callable[[], Event]) -> None:
        """`create` makes an event of the device that `device_uuid` names."""
        self.name, self._device_uuid, self._create = secrets.token_hex(8), device_uuid, create
        self._entries: deque[tuple[Event, StreamPoint]] = deque()
        """The event that was recorded longest ago first."""

    @classmethod
    def on(cls, device: int) -> Self:
        """Return a ring on a CUDA device of this process."""
        return cls(device_uuid(device), lambda: Event.create(device, interprocess=True))

    def record(self, stream: int) -> StreamPoint:
        """Mark the present end of a stream (its handle) and name that point."""
        count = len(self._entries)
        if count >= MOST_EVENTS or (
            count >= FEWEST_EVENTS and self._entries[0][0].reached() and self._entries[count // 2][0].reached()
        ):
            event, point = self._entries.popleft()
        else:
            event = self._create()
            point = StreamPoint(ring=self.name, handle=event.export(), device_uuid=self._device_uuid)
            _own_events[self.name, point.handle] = event
        event.record(stream)
        self._entries.append((event, point))
        return point

    def close(self) -> None:
        """Name no further points. The events stay until this process ends, since others may still ask for them."""
        for _, point in self._entries:
            _own_events.pop((self.name, point.handle), None)
        self._entries.clear()


class StreamPoints:
    """Tells whether points that others have named are reached. Used by one thread."""

    def __init__(self, open_event: Callable[[StreamPoint], Event] | None = None) -> None:
        self._open = open_event or (lambda point: Event.open(device_by_uuid(point.device_uuid), point.handle))
        self._rings: dict[str, dict[bytes, Event]] = {}
        """The ring that was used longest ago first."""

    def reached(self, points: Iterable[StreamPoint]) -> bool:
        """Return whether all are reached. Raises TransportError for one that cannot be looked up, as when its process is gone."""
        return all(self._is_reached(point) for point in points)

    def _is_reached(self, point: StreamPoint) -> bool:
        try:
            return (_own_events.get((point.ring, point.handle)) or self._opened(point)).reached()
        except BridgeError as error:
            raise TransportError(
                f"the engine's GPU cannot be asked how far it has come: {error}; the engine process has probably ended"
            ) from error

    def _opened(self, point: StreamPoint) -> Event:
        ring = self._rings.pop(point.ring, {})
        while len(self._rings) >= MOST_RINGS:
            self._close_ring(next(iter(self._rings)))
        self._rings[point.ring] = ring
        if point.handle not in ring:
            ring[point.handle] = self._open(point)
        return ring[point.handle]

    def _close_ring(self, name: str) -> None:
        for event in self._rings.pop(name).values():
            event.close()

    def close(self) -> None:
        """Close every event of others."""
        for name in list(self._rings):
            self._close_ring(name)
