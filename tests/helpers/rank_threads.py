"""Rank workers on threads, here and in a second process: real transports, maps and plans under an imaginary node.

Every wait has a limit; leaving `DestinationProcess` ends it, whatever state it is in.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.wire.messages import Heartbeat, RankDescription
from kvbridge.core.wire.worker_messages import (
    NodeToWorker,
    Shutdown,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
    WorkerToNode,
)
from kvbridge.worker.lifecycle import serve_rank

ANSWER_LIMIT_S = 30.0
END_LIMIT_S = 30.0

AnswerT = TypeVar("AnswerT", bound=FrozenModel)


class ThreadLink:
    """A node link without a wire: two queues."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[NodeToWorker] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[WorkerToNode] = queue.SimpleQueue()

    def send(self, message: WorkerToNode) -> None:
        if not isinstance(message, Heartbeat | WorkerProgress | WorkerHello):
            self.reports.put(message)

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        try:
            return self.orders.get(timeout=timeout_s) if timeout_s > 0 else self.orders.get_nowait()
        except queue.Empty:
            return None


class WorkerThread:
    """One rank worker with its transports, serving on a thread of its own from the moment it is made."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self._link = ThreadLink()
        self._link.orders.put(setup)
        self._thread = threading.Thread(target=self._serve, name=f"worker-{setup.rank}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(BridgeError):  # told to the node, where `hear` raises it
            serve_rank(self._link, self.setup.rank, setup_timeout_s=ANSWER_LIMIT_S)

    def tell(self, message: NodeToWorker) -> None:
        self._link.orders.put(message)

    def hear(self, kind: type[AnswerT], limit_s: float = ANSWER_LIMIT_S) -> AnswerT:
        """Return the next report, which must be of this kind."""
        try:
            report = self._link.reports.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"rank {self.setup.rank} said no {kind.__name__} for {limit_s} s") from None
        assert isinstance(report, kind), f"rank {self.setup.rank} said {report!r} instead of {kind.__name__}"
        return report

    def description(self) -> RankDescription:
        """What it reports once its memory is registered."""
        return self.hear(WorkerReady).description

    def stop(self) -> None:
        """Ask it to end; `join` waits."""
        self.tell(Shutdown())

    def join(self) -> None:
        self._thread.join(END_LIMIT_S)
        assert not self._thread.is_alive(), f"the worker of rank {self.setup.rank} did not end within {END_LIMIT_S} s"


def stop_all(workers: Sequence[WorkerThread]) -> None:
    """End workers together, since a transport may take a second to close."""
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join()


class DestinationProcess:
    """A second process with the rank workers of one decode node at a time. A context manager."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs,), name="destination", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(END_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_LIMIT_S)

    def start(self, setups: Sequence[WorkerSetup]) -> tuple[RankDescription, ...]:
        """Serve these ranks; returns how each is reached, in the same order."""
        self._pipe.send(tuple(setups))
        return self._answer()

    def begin_stop(self) -> None:
        """Tell the workers to end, without waiting."""
        self._pipe.send(())

    def finish_stop(self) -> None:
        """Wait for their end; afterwards nothing of their memory is registered or mapped there."""
        self._answer()

    def _answer(self) -> tuple[RankDescription, ...]:
        assert self._pipe.poll(ANSWER_LIMIT_S + END_LIMIT_S), "the destination process does not answer"
        answer = self._pipe.recv()
        assert not isinstance(answer, str), f"the destination process failed: {answer}"
        return answer


def _obey(pipe: Connection) -> None:
    """The process: one tuple of setups in, their descriptions (or a text on failure) out, until the pipe closes."""
    os.dup2(2, 1)  # whatever libraries print
    workers: list[WorkerThread] = []
    while True:
        try:
            setups: tuple[WorkerSetup, ...] = pipe.recv()
        except EOFError:
            break
        try:
            stop_all(workers)
            workers = [WorkerThread(setup) for setup in setups]
            pipe.send(tuple(worker.description() for worker in workers))
        except AssertionError as error:
            pipe.send(str(error))
    for worker in workers:
        worker.stop()
    os._exit(0)  # some transfer libraries crash in their own exit handlers; that is not what is tested here
