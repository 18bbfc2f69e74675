"""The rank workers of a node: their socket, their processes, their setup, and the watch over them."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any, Protocol

import structlog

from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.local import LocalCallbacks, LocalServer
from kvbridge.control.processes import PeerProcess
from kvbridge.control.runtime_directory import WORKER_SOCKET
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import NodeIdentity, Rank
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    Digested,
    EndpointsRevoked,
    NodeToWorker,
    PagesCopied,
    PathsChanged,
    PeerConnected,
    Rerouted,
    RoomClosed,
    Sent,
    Shutdown,
    TransportsNotBuilt,
    Verified,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
    WorkerToNode,
)
from kvbridge.daemon.worker_output import WorkerOutput
from kvbridge.node.workers import WorkerSet, WorkerState
from kvbridge.processes import ChildEnd, EndCause, SupervisedChild
from kvbridge.telemetry.facts import WorkerLost, WorkerStarted
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)

ABSENT_AFTER_S = 0.5
"""A node whose last tick is longer ago was itself stopped or starved: messages of its workers are still unread."""

WorkerReport = (
    PeerConnected | PathsChanged | Rerouted | Digested | Sent | Verified | PagesCopied | RoomClosed | EndpointsRevoked
)
"""Reports of a worker about rooms and peers."""


Reports = Mapping[type[WorkerReport], Callable[[Any], None]]
"""Handler of each kind of report that workers of this role send."""


class WorkerListener(Protocol):
    """Receives news of a node's rank workers."""

    def worker_ready(self, rank: Rank) -> None:
        """A rank worker is ready (again), perhaps with new endpoints."""

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone, and with it everything that it had under way."""


class WorkerHost:
    """All rank workers of a node. Built and used in one running loop."""

    def __init__(
        self,
        config: PrefillConfig | DecodeConfig,
        layers: dict[Rank, tuple[int, ...]],
        events: EventStream,
        seldom: Seldom,
    ) -> None:
        """`seldom`: for the lines of libraries below the workers."""
        self._config = config
        self._events = events
        self._seldom = seldom
        self._listener: WorkerListener
        self._reports: Reports
        self._setup: Callable[[Rank], WorkerSetup]
        self._server: LocalServer[WorkerToNode, NodeToWorker] | None = None
        self._children: dict[Rank, SupervisedChild] | None = None
        """The processes of workers; None while engines bring the workers."""
        self._early: dict[str, WorkerHello] | None = {}
        """By link, workers of engines that came before the memory was made; None once it is."""
        self._unended: dict[Rank, dict[str, PeerProcess]] = {}
        """By rank and link, processes of engines whose workers are gone: peers may still write to endpoints there."""
        self._revoked: dict[Rank, EndpointsRevoked] = {}
        """By rank, a report that holds only when the worker's predecessors have ended."""
        self._over: dict[str, list[CloseRoom]] = {}
        """By link, completed rooms that the worker can forget; sent with the next message, or at the next tick."""
        self._heard_s: dict[Rank, float] = {}
        self._looked_s = math.inf
        self._closing = False
        self.workers = WorkerSet(layers, events)

    def serve(self, listener: WorkerListener, reports: Reports) -> None:
        """Set who receives news and reports of workers. Call before `open`."""
        self._listener, self._reports = listener, reports

    def open(self, incarnation: str) -> None:
        """Listen for workers. Raises ConflictError when another daemon uses the runtime directory."""
        path = self._config.runtime_dir / WORKER_SOCKET
        callbacks = LocalCallbacks(self._on_message, on_gone=self._on_link_gone, on_refused=self._events.frame_refused)
        self._server = LocalServer(incarnation, path, WORKER_TO_NODE, NODE_TO_WORKER, callbacks)
        self.workers.connect(self._post)

    def start(self, setup: Callable[[Rank], WorkerSetup], identity: NodeIdentity | None) -> None:
        """Start a process for each rank, or welcome the workers of engines, now that the memory is made.

        `setup(rank)` returns what a worker serves. `identity` is for the workers' log; None when engines bring the workers.
        """
        self._setup = setup
        if identity is not None:
            config = self._config
            options = {
                "socket": str(config.runtime_dir / WORKER_SOCKET),
                "setup-timeout-s": str(config.timeouts.worker_start_s),
                "log-level": config.telemetry.log_level.value,
                **{name: str(getattr(identity, name)) for name in ("role", "instance", "node")},
            }
            self._children = {
                rank: worker_process(rank, options, self._seldom, partial(self._on_process_gone, rank))
                for rank in self.workers.layers
            }
            for child in self._children.values():
                child.start()
        early, self._early = self._early or {}, None
        for link, message in early.items():
            self._welcome(link, message)

    async def failed(self) -> None:
        """Raise when a process is not supervised any more, by a defect; return at once when engines bring the workers."""
        await asyncio.gather(*(child.failed() for child in (self._children or {}).values()))

    async def close(self, timeout_s: float) -> None:
        """End every worker; kill those that do not end in time."""
        self._closing = True
        for rank in self.workers.layers:
            self.workers.send(rank, Shutdown())
        why = "it did not end in time (timeouts.shutdown_close_s)"
        children = self._children or {}
        killed = await asyncio.gather(*(child.stop(timeout_s, why) for child in children.values()))
        for rank in compress(children, killed):
            log.warning("worker_killed", rank=str(rank), why=why)
        if self._server is not None:
            self._server.close()

    def watch(self) -> None:
        """Give up workers that hang: ours are started again, those of engines come back by themselves. To be called often."""
        for link in tuple(self._over):
            self._tell_over(link)
        self._forgive_absence()
        timeouts = self._config.timeouts
        limits_s = {
            WorkerState.STARTING: (timeouts.worker_start_s, "timeouts.worker_start_s"),
            WorkerState.READY: (timeouts.worker_silence_s, "timeouts.worker_silence_s"),
        }
        for rank, state in self.workers.states().items():
            limit_s, name = limits_s.get(state, (math.inf, ""))
            silent_s = time.monotonic() - self._heard_s.get(rank, math.inf)
            if silent_s > limit_s:
                del self._heard_s[rank]
                self._end(rank, f"it said nothing for {silent_s:.1f} s (limit: {name})")

    def _end(self, rank: Rank, reason: str) -> None:
        if self._children is not None:
            self._kill(rank, reason)
            return
        link = self.workers.link_of(rank)
        if link and self._server is not None:  # an engine's process is not ours to end
            self._await_end(link, rank, self._server.process(link))
            self._server.drop(link)
            self._lost(rank, reason)

    def _forgive_absence(self) -> None:
        """Extend every worker's deadline by the time in which this process itself was suspended."""
        now_s = time.monotonic()
        absent_s = now_s - self._looked_s
        self._looked_s = now_s
        if absent_s > ABSENT_AFTER_S:
            self._heard_s = {rank: min(now_s, heard_s + absent_s) for rank, heard_s in self._heard_s.items()}

    def _post(self, link: str, message: NodeToWorker) -> None:
        """Send to a worker; raises BridgeError when it is gone. Completed rooms are sent later, so as not to wake the worker."""
        if isinstance(message, CloseRoom) and message.all_sent:
            self._over.setdefault(link, []).append(message)
            return
        self._tell_over(link)
        if self._server is not None:
            self._server.send(link, message)

    def _tell_over(self, link: str) -> None:
        over = self._over.pop(link, ())
        if self._server is not None:
            with suppress(BridgeError):  # a worker that is gone has forgotten them
                for message in over:
                    self._server.send(link, message)

    def _on_message(self, link: str, message: WorkerToNode) -> None:
        if isinstance(message, WorkerHello):
            self._welcome(link, message)
            return
        if isinstance(message, WorkerClosed):
            self._on_closed(link)
            return
        rank = self.workers.rank_of(link)
        if rank is None or (not isinstance(message, Heartbeat) and message.rank != rank):
            detail = f"{message.type} of worker {link}, which does not serve that rank (any more)"
            self._events.frame_refused("stale", detail)
            return
        self._heard_s[rank] = time.monotonic()
        match message:
            case WorkerProgress():
                self.workers.progress(message)
            case WorkerReady():
                self.workers.ready(message)
                self._events.emit(WorkerStarted(rank=rank, pid=message.pid))
                self._listener.worker_ready(rank)
            case WorkerFailed():
                self.workers.failed(message)
            case TransportsNotBuilt():
                self.workers.not_built(message)
            case EndpointsRevoked() if self._unended.get(rank):
                self._revoked[rank] = message
            case Heartbeat():
                pass
            case _:
                self._report(rank, message)

    def _report(self, rank: Rank, message: WorkerReport) -> None:
        take = self._reports.get(type(message))
        if take is None:
            self._events.frame_refused("wrong_direction", f"{message.type} from rank worker {rank} of this role")
        else:
            take(message)

    def _welcome(self, link: str, message: WorkerHello) -> None:
        if self._early is not None:
            self._early[link] = message
            return
        rank = message.rank
        self._heard_s[rank] = time.monotonic()
        replaced = self.workers.hello(link, message, self._setup)
        if replaced and self._server is not None:
            if self._children is None:
                self._await_end(replaced, rank, self._server.process(replaced))
            self._server.drop(replaced)
            self._listener.worker_gone(rank, "another worker took its place")
        if self._children is None and self._server is not None:
            self._on_returned(rank, self._server.process(link))

    def _on_link_gone(self, link: str, process: PeerProcess) -> None:
        if self._early is not None:
            self._early.pop(link, None)
        rank = self.workers.rank_of(link)
        if rank is None or self._closing:
            return
        if self._children is None:
            self._await_end(link, rank, process)
            self._lost(rank, "its connection ended")
        else:  # only the end of the process proves that nothing moves any more
            self._kill(rank, "its connection ended")

    def _on_closed(self, link: str) -> None:
        """An engine's worker has closed its transports: nothing waits for the end of its process."""
        self.workers.answer(link, Shutdown())
        if self._early is not None:
            self._early.pop(link, None)
        rank = self.workers.rank_of(link)
        if rank is not None and self._children is None and self._server is not None and not self._closing:
            self._server.drop(link)
            self._lost(rank, "its engine has closed it")

    def _await_end(self, link: str, rank: Rank, process: PeerProcess) -> None:
        """An engine's worker is gone without having closed its endpoints, which end with its process."""
        self._unended.setdefault(rank, {})[link] = process
        log.warning("worker_gone_unclosed", worker=link, rank=str(rank), pid=process.pid, followed=process.followed)
        process.when_ended(lambda: self._on_ended(link, rank))

    def _on_returned(self, rank: Rank, process: PeerProcess) -> None:
        """A process serves a rank again, and does so only after closing its former endpoints (`engine/adopted.py`)."""
        unended = self._unended.get(rank, {})
        for link in [link for link, before in unended.items() if process.pid and before.pid == process.pid]:
            self._on_ended(link, rank)

    def _on_ended(self, link: str, rank: Rank) -> None:
        self._unended[rank].pop(link, None)
        if not self._unended[rank] and rank in self._revoked:
            self._report(rank, self._revoked.pop(rank))

    def _kill(self, rank: Rank, why: str) -> None:
        """End a worker's process, which is started again."""
        child = (self._children or {})[rank]
        if child.kill(why):
            log.error("worker_killed", rank=str(rank), pid=child.pid, why=why)

    def _on_process_gone(self, rank: Rank, end: ChildEnd) -> None:
        if not self._closing:
            if end.cause is EndCause.START_FAILED:
                log.error("worker_start_failed", rank=str(rank), reason=end.reason)
            else:
                log.error("worker_gone", rank=str(rank), pid=end.pid, reason=end.reason)
            self._lost(rank, end.reason, cause=end.cause.value)

    def _lost(self, rank: Rank, reason: str, *, cause: str = "") -> None:
        self._events.emit(WorkerLost(rank=rank, cause=cause, reason=reason))
        self.workers.gone(rank, reason)
        self._listener.worker_gone(rank, reason)


def worker_process(
    rank: Rank, options: Mapping[str, str], seldom: Seldom, on_end: Callable[[ChildEnd], None]
) -> SupervisedChild:
    """Return the process of a rank's worker, not started yet. `options`: of its command line."""
    options = {"pp": str(rank.pp), "tp": str(rank.tp), "parent": str(os.getpid()), **options}
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]

    async def live() -> None:
        with WorkerOutput(rank, seldom) as output:
            process = await child.launch(
                "kvbridge.worker.process",
                *(*arguments, "--log-descriptor", str(output.log_end)),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=output.errors_end,
                pass_fds=(output.log_end,),
            )
            output.started()
            await process.wait()

    child = SupervisedChild(f"rank {rank}", live, on_end)
    return child
