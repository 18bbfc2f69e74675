"""Pages that are written over and over by their engine's GPU, as it does while it computes: until they are let be, or it dies.

Owns: a thread, and what it gives to a GPU. Must not know: rooms, what the pages are for. Where pages lie in host memory the
processor writes them, more slowly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

KERNELS_AT_ONCE = 500
"""Of one CUDA graph: about a millisecond, so that a GPU does not wait for a process that is being killed."""
GRAPHS_AHEAD = 4
HOST_PAUSE_S = 0.002
STOP_S = 20.0

Write = Callable[[torch.Tensor], object]


def scribble(page: torch.Tensor) -> None:
    """What an engine leaves in a page before its rows are final: anything."""
    page.fill_(0xA5)


def write_back(page: torch.Tensor) -> None:
    """Write what is there: harmless to whoever owns the page, and visible when somebody else has got it meanwhile."""
    page.bitwise_xor_(0)


class BusyPages:
    """Pages (uint8 each) of one place that are written again and again, from the making of this object until `stop`."""

    def __init__(self, pages: Sequence[torch.Tensor], write: Write) -> None:
        self._pages, self._write = pages, write
        self._stopped = threading.Event()
        place = pages[0].device
        if place.type == "cuda":
            write(pages[0])  # its code is loaded before anything is captured
            self._graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(place),
                torch.cuda.graph(self._graph),
            ):  # here: no other thread may ask CUDA meanwhile
                for number in range(KERNELS_AT_ONCE):
                    write(pages[number % len(pages)])
        self._thread = threading.Thread(target=self._on_gpu if place.type == "cuda" else self._on_host, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing writes them any more."""
        self._stopped.set()
        self._thread.join(STOP_S)
        assert not self._thread.is_alive(), "the GPU does not come to the end of its kernels"

    def _on_gpu(self) -> None:
        with torch.cuda.device(self._pages[0].device):
            stream = torch.cuda.Stream()
            ends: list[torch.cuda.Event] = []
            while not self._stopped.is_set():
                with torch.cuda.stream(stream):
                    self._graph.replay()
                    ends.append(torch.cuda.Event())
                    ends[-1].record(stream)
                if len(ends) >= GRAPHS_AHEAD:
                    ends.pop(0).synchronize()
            stream.synchronize()

    def _on_host(self) -> None:
        while not self._stopped.wait(HOST_PAUSE_S):
            for page in self._pages:
                self._write(page)
