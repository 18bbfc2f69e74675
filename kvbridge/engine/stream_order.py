"""The order between an engine's own work on its GPUs and what the bridge does with the same pages.

Owns: the points that publications name, and calls that wait until the engine's GPU has come far enough. Must not know: the
verbs, sockets.

Nothing here waits for a GPU, except `DeferredCalls.finish`. With pools in host memory there are no points, and every call is sent
at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from kvbridge.core.errors import BridgeError, DeadlineError, InvalidInputError, NotReadyError, TransportError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.stream_points import EventRing, StreamPoints

log = structlog.get_logger(__name__)

StreamChoice = torch.cuda.Stream | int | None
"""A stream, its handle, or None for the current one of each GPU."""
LOOK_AGAIN_S = 0.0005
"""Pause between two questions to a GPU, where somebody waits."""


class StreamOrder:
    """The GPUs that one engine process writes and reads pages with. Used by one thread."""

    def __init__(self, views: Mapping[Rank, PoolViews]) -> None:
        self._devices = {rank: device for rank, held in views.items() if (device := held.device) is not None}
        self._rings: dict[int, EventRing] = {}
        self._marks = StreamPoints()

    @property
    def devices(self) -> tuple[int, ...]:
        """Ordinals of the GPUs, none for pools in host memory."""
        return tuple(sorted(set(self._devices.values())))

    def points(self, stream: StreamChoice) -> dict[str, StreamPoint]:
        """Mark the present end of the stream for each rank with a GPU, by the rank's name."""
        return self.points_of(self._streams(stream))

    def points_of(self, streams: Mapping[int, int]) -> dict[str, StreamPoint]:
        """The same for streams of our own: the handle of one for each GPU."""
        marked = {device: self._mark(device, handle) for device, handle in streams.items()}
        return {str(rank): marked[device] for rank, device in self._devices.items()}

    def handle(self, device: int | None, stream: StreamChoice) -> int:
        """The chosen stream of one GPU, as launches take it; 0 for host memory (None)."""
        return 0 if device is None else self._streams(stream)[device]

    def _mark(self, device: int, handle: int) -> StreamPoint:
        with current_gpu(device):
            ring = self._rings.get(device)
            if ring is None:
                ring = self._rings[device] = EventRing.on(device)
            return ring.record(handle)

    def passed(self, points: Iterable[StreamPoint]) -> bool:
        """Whether the GPUs have come past all of these `points`; never waits. Raises TransportError for what has failed there."""
        with current_gpu(next(iter(self._devices.values()), None)):
            return self._marks.reached(points)

    def reached(self, stream: StreamChoice, also: frozenset[StreamPoint] = frozenset()) -> Callable[[], bool]:
        """Mark the present end of the stream on each GPU.

        The result says, as `passed` does, whether all of them are there, and past the points `also`.
        """
        return partial(self.passed, also.union(self.points(stream).values()))

    def _streams(self, stream: StreamChoice) -> dict[int, int]:
        """The handle to use on each GPU. Raises InvalidInputError for one stream where there are several GPUs."""
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


@dataclass(frozen=True, slots=True)
class _Deferred:
    what: str
    ready: Callable[[], bool]
    send: Callable[[], None]


class DeferredCalls:
    """Calls that are sent as soon as their point is reached, in the order in which they were made. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: list[_Deferred] = []
        self._unproved: list[str] = []
        """Calls that were never sent, since the GPU could not be asked whether it had come that far."""

    def __len__(self) -> int:
        return len(self._waiting)

    def send_when(self, ready: Callable[[], bool], what: str, send: Callable[[], None]) -> None:
        """Send now when `ready()` and nothing waits before it, else keep it for `send_due`. `what` is for messages.

        `ready` asks whether the GPU has come far enough and never waits. Raises what `send` raises when it sends now.
        """
        self.send_due()
        if not self._waiting and ready():
            send()
            return
        self._waiting.append(_Deferred(what, ready, send))

    def send_due(self) -> None:
        """Send what is due.

        Raises NotReadyError or DeadlineError for a call that the node does not take in time; it stays, and the next call sends it
        again. A call that the node refuses is logged and dropped; so is one whose GPU has failed, and `finish` raises for it.
        """
        while self._waiting:
            first = self._waiting[0]
            try:
                due = first.ready()
            except BridgeError as error:
                log.error("deferred_call_unproven", call=first.what, code=error.code, reason=str(error))
                self._unproved.append(self._waiting.pop(0).what)
                continue
            if not due:
                return
            try:
                first.send()
            except (NotReadyError, DeadlineError):
                raise
            except BridgeError as error:
                log.warning("deferred_call_failed", call=first.what, code=error.code, reason=str(error))
            self._waiting.pop(0)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent. Raises DeadlineError, which names what is left, or TransportError for a failed GPU."""
        deadline_s = time.monotonic() + timeout_s
        self.send_due()
        while self._waiting:
            if time.monotonic() >= deadline_s:
                names = ", ".join(one.what for one in self._waiting)
                raise DeadlineError(
                    f"the GPU has not come to the end of its work within {timeout_s} s; still to do: {names}"
                )
            time.sleep(LOOK_AGAIN_S)
            self.send_due()
        if self._unproved:
            raise TransportError(
                f"the GPU failed before it was known to be through with: {', '.join(self._unproved)}; the node uses those pages "
                "again when this process has ended"
            )


def current_gpu(device: int | None) -> AbstractContextManager[None]:
    """Work on a GPU (None: on host memory), and leave the thread's current one as the engine has it."""
    return nullcontext() if device is None else torch.cuda.device(device)
