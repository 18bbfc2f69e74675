"""An engine's GPU streams: the order between its own work and the bridge's work on the same pages, and loads from host memory.

Nothing here waits for a GPU, except `DeferredCalls.finish`. Pools in host memory have no points: every call is sent at once, and
copies are done when `start` returns. The engine's own process loads, on a stream beside compute, because a kernel of another
process would take turns with the engine's compute.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import torch

from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import BridgeError, DeadlineError, InvalidInputError, NotReadyError, TransportError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.geometry.tiers import copy_pieces
from kvbridge.core.ids import IndexSpace, PageMoves, Rank
from kvbridge.core.process import Closing
from kvbridge.core.wire.engine_messages import Pages
from kvbridge.core.wire.messages import StreamPoint
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.gpu_memory import EventRing, StreamPoints
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier

log = structlog.get_logger(__name__)

StreamChoice = torch.cuda.Stream | int | None
"""A stream, its handle, or None for the current stream of each GPU."""
LOOK_AGAIN_S = 0.0005
"""Pause between two questions to a GPU during a wait."""


class StreamOrder:
    """The GPUs with which one engine process writes and reads pages. Used by one thread."""

    def __init__(self, views: Mapping[Rank, PoolViews]) -> None:
        self._devices = {rank: device for rank, held in views.items() if (device := held.device) is not None}
        self._rings: dict[int, EventRing] = {}
        self._marks = StreamPoints()

    @property
    def devices(self) -> tuple[int, ...]:
        """Ordinals of the GPUs; none for pools in host memory."""
        return tuple(sorted(set(self._devices.values())))

    def points(self, stream: StreamChoice) -> dict[str, StreamPoint]:
        """Mark the present end of the stream for each rank with a GPU, by the rank's name."""
        return self.points_of(self._streams(stream))

    def points_of(self, streams: Mapping[int, int]) -> dict[str, StreamPoint]:
        """Mark the present end of these streams, one handle for each GPU."""
        marked = {}
        for device, handle in streams.items():
            with current_gpu(device):
                if device not in self._rings:
                    self._rings[device] = EventRing.on(device)
                marked[device] = self._rings[device].record(handle)
        return {str(rank): marked[device] for rank, device in self._devices.items()}

    def handle(self, device: int | None, stream: StreamChoice) -> int:
        """Return the handle of the chosen stream of one GPU; 0 for host memory (None)."""
        return 0 if device is None else self._streams(stream)[device]

    def passed(self, points: Iterable[StreamPoint]) -> bool:
        """Return whether the GPUs have passed all `points`; never waits. Raises TransportError when a GPU has failed."""
        with current_gpu(next(iter(self._devices.values()), None)):
            return self._marks.reached(points)

    def reached(self, stream: StreamChoice, also: frozenset[StreamPoint] = frozenset()) -> Callable[[], bool]:
        """Mark the present end of the stream on each GPU. Return a question: have these points and `also` passed?"""
        return partial(self.passed, also.union(self.points(stream).values()))

    def _streams(self, stream: StreamChoice) -> dict[int, int]:
        """Return the handle to use on each GPU. Raises InvalidInputError for one stream with several GPUs."""
        if stream is None:
            return {device: int(torch.cuda.current_stream(device).cuda_stream) for device in self.devices}
        if len(self.devices) > 1:
            raise InvalidInputError(
                f"this engine has pages on cuda:{', cuda:'.join(map(str, self.devices))}: a stream belongs to one of them; "
                "make the right stream current on each, and name none"
            )
        handle = stream if isinstance(stream, int) else int(stream.cuda_stream)
        return dict.fromkeys(self.devices, handle)

    def close(self) -> None:
        """Name no further points."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class DeferredCalls:
    """Calls in their order, each sent as soon as its point is reached. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Callable[[], bool], Callable[[], None]]] = deque()
        """Name of a call, whether its point is reached, and its sending."""
        self._unproved: list[str] = []
        """Calls that were never sent, because their GPU failed before it was known to have reached their point."""

    def __len__(self) -> int:
        return len(self._waiting)

    def send_when(self, ready: Callable[[], bool], what: str, send: Callable[[], None]) -> None:
        """Send now if `ready()` and nothing waits before this call; otherwise keep the call, named `what`, for `send_due`.

        `ready` asks a GPU and never waits. Raises the error of `send` if it sends now.
        """
        self.send_due()
        if not self._waiting and ready():
            send()
            return
        self._waiting.append((what, ready, send))

    def send_due(self) -> None:
        """Send the calls whose points are reached.

        Raises NotReadyError or DeadlineError when the node does not take a call in time; the call stays, and is sent again later. A
        refused call is logged and dropped. A call whose GPU has failed is dropped, too, and `finish` raises for it.
        """
        while self._waiting:
            what, ready, send = self._waiting[0]
            try:
                due = ready()
            except BridgeError as error:
                log.error("deferred_call_unproven", call=what, code=error.code, reason=str(error))
                self._unproved.append(what)
                self._waiting.popleft()
                continue
            if not due:
                return
            try:
                send()
            except (NotReadyError, DeadlineError):
                raise
            except BridgeError as error:
                log.warning("deferred_call_failed", call=what, code=error.code, reason=str(error))
            self._waiting.popleft()

    def finish(self, timeout_s: float) -> None:
        """Wait until all calls are sent. Raises DeadlineError, which names the others, or TransportError for a failed GPU."""
        deadline_s = time.monotonic() + timeout_s
        self.send_due()
        while self._waiting:
            if time.monotonic() >= deadline_s:
                names = ", ".join(what for what, _, _ in self._waiting)
                raise DeadlineError(
                    f"the GPU has not come to the end of its work within {timeout_s} s; still to do: {names}"
                )
            time.sleep(LOOK_AGAIN_S)
            self.send_due()
        if self._unproved:
            raise TransportError(
                f"the GPU failed before it was known to have finished: {', '.join(self._unproved)}; the node uses those pages "
                "again when this process has ended"
            )


def current_gpu(device: int | None) -> AbstractContextManager[None]:
    """Make a GPU (None: no GPU) the thread's current one inside the block; then restore the engine's choice."""
    return nullcontext() if device is None else torch.cuda.device(device)


@dataclass(frozen=True, slots=True)
class RankCopier:
    """The copier into the device pools of one rank."""

    copier: HostCopier
    device: int | None
    """GPU; None: host memory."""
    layers: frozenset[int]
    """Layers with host copies."""
    page_bytes: Mapping[IndexSpace, int]
    """Copied bytes of a page, by device space with host copies on this rank."""


@dataclass(slots=True, eq=False)
class Load:
    """The enqueued load of one room."""

    tickets: dict[Rank, int] = field(default_factory=dict)
    points: Mapping[str, StreamPoint] = field(default_factory=dict)
    """Point after which the load is complete, by the name of each rank with a GPU."""
    bytes: int = 0
    """Bytes over all ranks."""
    host_s: float = 0.0
    """Duration of `start`: the load itself with pools in host memory."""
    began: dict[int, Any] = field(default_factory=dict)
    ended: dict[int, Any] = field(default_factory=dict)
    """CUDA events with times, by GPU."""

    def seconds(self) -> float:
        """Return the copying time of the slowest GPU, for a load that is over."""
        return max((self.began[gpu].elapsed_time(self.ended[gpu]) / 1000 for gpu in self.ended), default=self.host_s)


def rank_copiers(
    views_of: Mapping[Rank, PoolViews], host_copies: Sequence[Region], backend: str
) -> dict[Rank, RankCopier]:
    """Make a copier for each rank with host copies; the caller closes them."""
    found: dict[Rank, RankCopier] = {}
    with ExitStack() as stack:
        for rank, views in views_of.items():
            geometry = views.geometry
            regions, page_bytes = [], Counter[IndexSpace]()
            for twin in host_copies:
                component = geometry.component(twin.component)
                if twin.layer not in views.layers(component.kind):
                    continue
                region = views.region(component.kind, twin.layer, space=component.space).region
                lanes = [(each.lane_start, each.lane_stop) for each in (region, twin)]
                page_bytes[region.space] += sum(
                    piece.length_bytes for piece in copy_pieces(geometry, component, *lanes)
                )
                regions.append(region)
            if not regions:
                continue  # a stage without host copies, such as one with windows alone on decode
            means = CopyMeans(CopyBackend(backend), views.device)
            with current_gpu(views.device):
                copier = HostCopier(geometry, regions, host_copies, direction=Direction.LOAD_BACK, means=means)
            stack.callback(copier.close)
            layers = frozenset(region.layer for region in regions)
            found[rank] = RankCopier(copier, views.device, layers, page_bytes)
        stack.pop_all()
    return found


class LoadBacks(Closing):
    """The loads of one engine process. Used by one thread."""

    def __init__(self, copiers: Mapping[Rank, RankCopier], order: StreamOrder) -> None:
        """`copiers`: one for each rank with host copies; `close` closes them."""
        self._copiers = copiers
        self._order = order
        devices = {each.device for each in copiers.values() if each.device is not None}
        self._streams = {device: torch.cuda.Stream(device) for device in sorted(devices)}  # type: ignore[no-untyped-call]
        self._loads: dict[int, Load] = {}

    def start(self, room: int, pages: Pages, *, by_layer: bool) -> Load:
        """Enqueue the load that an answer to `begin` or `claim` asks for, on each rank.

        Unless `by_layer`, the current stream of each GPU waits for it. Raises TransportError when a copy cannot be enqueued;
        `points` are then behind the enqueued copies.
        """
        began_s, moves = time.monotonic(), page_moves(pages)
        load = self._loads[room] = Load()
        load.began = self._marks()
        try:
            for rank, each in self._copiers.items():
                held = {space: ids for space, ids in moves.items() if space in each.page_bytes}
                with current_gpu(each.device):
                    load.tickets[rank] = each.copier.copy(held, stream=self._handle(each.device))
                load.bytes += sum(len(own) * each.page_bytes[space] for space, (own, _) in held.items())
        finally:
            load.ended = self._marks()
            load.points = self._order.points_of({device: self._handle(device) for device in self._streams})
        if not by_layer:
            for rank, each in self._copiers.items():
                with current_gpu(each.device):
                    each.copier.wait(load.tickets[rank], stream=self._order.handle(each.device, None))
        load.host_s = time.monotonic() - began_s
        return load

    def wait_layer(self, room: int, layer: int, stream: StreamChoice) -> None:
        """Let the stream wait for the load of one layer of a room. Harmless without a load."""
        load = self._loads.get(room)
        if load is None:
            return
        for rank, each in self._copiers.items():
            if layer not in each.layers:
                continue
            with current_gpu(each.device):
                each.copier.wait_layer(layer, load.tickets[rank], stream=self._order.handle(each.device, stream))

    def points(self, room: int | None = None) -> frozenset[StreamPoint]:
        """Return the points behind the load of a room; with None, behind all loads."""
        loads = self._loads.values() if room is None else filter(None, [self._loads.get(room)])
        return frozenset(point for load in loads for point in load.points.values())

    def forget(self, room: int) -> None:
        """Forget the load of a room. Harmless without a load."""
        self._loads.pop(room, None)

    def _handle(self, device: int | None) -> int:
        return 0 if device is None else int(self._streams[device].cuda_stream)

    def _marks(self) -> dict[int, Any]:
        marks = {}
        for device, stream in self._streams.items():
            marks[device] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            marks[device].record(stream)
        return marks

    def close(self) -> None:
        """Close the copiers after the end of their copies. Harmless when closed."""
        for each in self._copiers.values():
            each.copier.close()


def page_moves(pages: Pages) -> PageMoves:
    """Return the device pages that an answer wants loaded, with their host copies."""
    own, twins = tables_from_wire(pages.tables), tables_from_wire(pages.load)
    moves: PageMoves = {}
    if (found := twins.get(IndexSpace.FULL_COPY)) is not None:
        first, stop = found.first_page, found.first_page + len(found)
        moves[IndexSpace.FULL] = own[IndexSpace.FULL].ids[first:stop], found.ids
    if (found := twins.get(IndexSpace.SWA_COPY)) is not None and pages.restore is not None:
        moves[IndexSpace.SWA] = tables_from_wire((pages.restore.table,))[IndexSpace.SWA].ids, found.ids
    return moves
