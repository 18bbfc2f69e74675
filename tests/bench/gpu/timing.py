"""How long work takes on the device: events inside CUDA graphs, or around calls that no graph can hold.

Events outside of a graph would count the launch of the graph itself, some microseconds, which is more than a whole call of some
kernels here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Self

from cuda.bindings import runtime as library

from kvbridge.kernels.cuda import runtime

Work = Callable[[], None]


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the CUDA runtime answered. Raises RuntimeError when it failed."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"CUDA: {library.cudaGetErrorName(code)[1].decode()}")
    return values[0] if values else None


class TimedGraph:
    """A captured piece of work between two events; each `run_ms` replays it once and says how long it took."""

    def __init__(self, device: int, stream: int, work: Work) -> None:
        """`work` enqueues on `stream` only; it is called once, under capture, and does not run then."""
        runtime.use(device)
        self._device = device
        self._stream = stream
        self._events = [checked(library.cudaEventCreateWithFlags(0)) for _ in range(2)]
        checked(library.cudaStreamBeginCapture(stream, library.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed))
        try:
            self._mark(0)
            work()
            self._mark(1)
        finally:
            graph = checked(library.cudaStreamEndCapture(stream))
        self._graph = checked(library.cudaGraphInstantiate(graph, 0))
        checked(library.cudaGraphDestroy(graph))

    def run_ms(self) -> float:
        """Replay once, after what is on the stream already, and wait."""
        runtime.use(self._device)
        checked(library.cudaGraphLaunch(self._graph, self._stream))
        checked(library.cudaStreamSynchronize(self._stream))
        return float(checked(library.cudaEventElapsedTime(*self._events)))

    def close(self) -> None:
        """Give the graph and the events back."""
        checked(library.cudaGraphExecDestroy(self._graph))
        for event in self._events:
            checked(library.cudaEventDestroy(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self, which: int) -> None:
        checked(library.cudaEventRecordWithFlags(self._events[which], self._stream, library.cudaEventRecordExternal))


def event_us(device: int, stream: int, work: Work, *, replays: int = 21, before: Callable[[int], None]) -> float:
    """Call `work`, which no graph can hold, and return microseconds a call on the device: the median of all calls but the first."""
    runtime.use(device)
    begin, end = (checked(library.cudaEventCreateWithFlags(0)) for _ in range(2))
    took_ms = []
    for replay in range(replays + 1):
        before(replay)
        checked(library.cudaEventRecord(begin, stream))
        work()
        checked(library.cudaEventRecord(end, stream))
        checked(library.cudaStreamSynchronize(stream))
        took_ms.append(float(checked(library.cudaEventElapsedTime(begin, end))))
    for event in (begin, end):
        checked(library.cudaEventDestroy(event))
    return statistics.median(took_ms[1:]) * 1e3


def graph_us(
    device: int,
    stream: int,
    work: Work,
    *,
    replays: int = 21,
    calls: int = 1,
    before: Callable[[int], None],
) -> float:
    """Capture `work`, replay it, return microseconds a call: the median of all replays.

    `calls`: how many calls `work` holds. `before(replay)` enqueues what comes before each replay and is not counted. The
    first replay warms up and is left out.
    """
    with TimedGraph(device, stream, work) as graph:
        took_ms = []
        for replay in range(replays + 1):
            before(replay)
            took_ms.append(graph.run_ms())
    return statistics.median(took_ms[1:]) * 1e3 / calls
