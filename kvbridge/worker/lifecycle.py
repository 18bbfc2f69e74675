"""How a rank worker starts and ends, in a process of its own or in an engine's: hello, setup, memory, transports, service."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import structlog

from kvbridge.config.transports import TransportSettings
from kvbridge.core.errors import BridgeError, DeadlineError, NotReadyError
from kvbridge.core.geometry.manifest import RankManifest, Region, check_manifest, fingerprint
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import REASON_CHARS, Heartbeat
from kvbridge.core.wire.worker_messages import (
    Shutdown,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerSetup,
)
from kvbridge.telemetry.logs import configure_logs
from kvbridge.transport import create_transport
from kvbridge.transport.local.host import PROCESS_LOCK_FILES
from kvbridge.worker.loop import RankWorker
from kvbridge.worker.memory import WorkerMemory, bring_memory
from kvbridge.worker.rank import NodeLink, RankIdentity, WorkerLimits, open_node_link

log = structlog.get_logger(__name__)

EXIT_FAILED = 3
"""The worker could not serve; the reason was reported to the node."""
CLOSE_ANSWER_S = 2.0
"""A worker that has closed its transports waits so long for the node to have read that. Then it ends all the same, and the node
waits for the end of its process."""


CLOSE_MARGIN_S = 2.0
"""What transports take to close besides what they wait for: a library's engine takes a second."""
_STAYING: list[ExitStack] = []
"""What would undo the memory of workers that are not closed: something may reach that memory until the process ends."""


def serve(given: argparse.Namespace) -> int:
    """Serve one rank until the node says Shutdown or is gone. Returns the exit code."""
    rank = Rank(pp=given.pp, tp=given.tp)
    names = {"role": given.role, "instance": given.instance, "node": given.node, "rank": str(rank)}
    os.set_inheritable(given.log_descriptor, False)  # it is of this process alone, and so is its end
    log_file = open(given.log_descriptor, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - to the end
    configure_logs(names=names, level=given.log_level, form="json", stream=log_file)
    link = open_node_link(Path(given.socket))
    try:
        serve_rank(link, rank, setup_timeout_s=given.setup_timeout_s)
    except BridgeError as error:
        log.error("worker_ends", code=error.code, reason=str(error))
        return EXIT_FAILED
    finally:
        link.close()
        PROCESS_LOCK_FILES.remove_names()  # this process ends without the interpreter's exit handlers
    return 0


class NoNodeError(NotReadyError):
    """Nobody answered the worker's hello, so it has not begun."""


class UnclosedError(BridgeError):
    """A worker has ended and is not closed: its transports, or its GPU, may still move bytes until the process ends."""


def serve_rank(
    link: NodeLink,
    rank: Rank,
    *,
    setup_timeout_s: float,
    adopted: Sequence[Region] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one rank until the node says Shutdown or `stopped()` is true. Returns then; raises what made it impossible.

    `adopted` is the device memory that this process brings. A failure is reported to the node before it is raised. Every transport
    is closed by then, else it is an UnclosedError, and all memory stays as it is; NoNodeError when nothing had begun.
    """
    try:
        link.send(WorkerHello(rank=rank, pid=os.getpid(), adopted=bool(adopted)))
    except BridgeError as error:
        raise NoNodeError(str(error)) from error
    worker: RankWorker | None = None
    try:
        setup = _setup(link, setup_timeout_s, stopped)
        if setup is None:
            return
        with ExitStack() as stack:
            settings = TransportSettings.model_validate_json(setup.transports)
            memory = bring_memory(
                setup, settings, adopted, stack, on_progress=partial(_report_progress, link, rank, stopped)
            )
            worker = RankWorker(
                _identity(setup, settings, memory),
                link,
                lambda name, epoch: create_transport(name, settings, epoch=epoch),
                WorkerLimits(transfer_s=setup.transfer_timeout_s, close_s=settings.close_s + CLOSE_MARGIN_S),
            )
            try:
                worker.run(stopped)
            finally:
                if not worker.closed:
                    _STAYING.append(stack.pop_all())
    except _StoppedError:
        return
    except Exception as error:
        code = error.code if isinstance(error, BridgeError) else BridgeError.code
        told = WorkerFailed(rank=rank, code=code, message=(str(error) or type(error).__name__)[:REASON_CHARS])
        with suppress(BridgeError):  # the node may be what is gone
            link.send(told)
        if worker is not None and not worker.closed:
            raise UnclosedError(f"{error}; something of rank {rank} may still move bytes: end this process") from error
        raise
    finally:
        if adopted and (worker is None or worker.closed):
            _say_closed(link, rank)


def _say_closed(link: NodeLink, rank: Rank) -> None:
    """Tell the node that nothing is left here that peers could write to, and wait until it has read that."""
    try:
        link.send(WorkerClosed(rank=rank))
        deadline_s = time.monotonic() + CLOSE_ANSWER_S
        while time.monotonic() < deadline_s:
            if isinstance(link.receive(0.1), Shutdown):
                return
        log.warning("worker_end_unanswered", rank=str(rank), limit_s=CLOSE_ANSWER_S)
    except BridgeError as error:  # the node is gone, or does not know us any more: nothing waits for this
        log.info("worker_end_unheard", rank=str(rank), code=error.code, reason=str(error))


def _setup(link: NodeLink, timeout_s: float, stopped: Callable[[], bool]) -> WorkerSetup | None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and not stopped():
        match link.receive(0.1):
            case WorkerSetup() as setup:
                return setup
            case Shutdown():
                return None
            case _:
                link.send(Heartbeat())
    if stopped():
        return None
    raise DeadlineError(f"the node did not answer the worker's hello within {timeout_s} s (timeouts.worker_start_s)")


class _StoppedError(Exception):
    """The worker was stopped while its memory was being registered, which takes minutes for a large pool."""


def _report_progress(
    link: NodeLink, rank: Rank, stopped: Callable[[], bool], done_bytes: int, total_bytes: int
) -> None:
    if stopped():
        raise _StoppedError
    link.send(WorkerProgress(rank=rank, done_bytes=done_bytes, total_bytes=total_bytes))


def _identity(setup: WorkerSetup, settings: TransportSettings, memory: WorkerMemory) -> RankIdentity:
    manifest = RankManifest(
        fingerprint=fingerprint(setup.geometry),
        rank=setup.rank,
        pp_size=setup.pp_size,
        tp_size=setup.tp_size,
        regions=memory.regions,
    )
    check_manifest(manifest, setup.geometry)
    order = tuple(str(name) for name in settings.order)
    return RankIdentity(
        setup.geometry,
        manifest,
        memory.extents,
        order,
        epoch=setup.epoch,
        made=memory.made,
        twins=memory.twins,
        stage_tp_ranks=setup.stage_tp_ranks,
        copy_backend=setup.copy_backend,
    )
