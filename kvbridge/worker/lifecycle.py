"""The life of a rank worker, in a process of its own or in an engine's: hello, setup, memory, transports, service, end."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import structlog

from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.errors import BridgeError, DeadlineError, NotReadyError, RegistrationError
from kvbridge.core.geometry.manifest import RankManifest, Region, check_manifest, fingerprint
from kvbridge.core.ids import MemoryKind, Rank
from kvbridge.core.wire.messages import REASON_CHARS, SharedRegion
from kvbridge.core.wire.worker_messages import (
    Shutdown,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerSetup,
)
from kvbridge.pool.memory.gpu_memory import HostRegistration, export, forget_export
from kvbridge.pool.memory.layout import Extent, Progress, RankPart, device_placement
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from kvbridge.telemetry.logs import configure_logs
from kvbridge.transport import create_transport
from kvbridge.transport.local.host import PROCESS_LOCK_FILES
from kvbridge.worker.loop import RankWorker
from kvbridge.worker.rank import NodeLink, RankIdentity, WorkerLimits, open_node_link

log = structlog.get_logger(__name__)

EXIT_FAILED = 3
"""The worker could not serve; the reason was reported to the node."""
CLOSE_ANSWER_S = 2.0
"""Time that a worker that has closed its transports waits for the node's answer. Without an answer it ends all the same, and the
node waits for the end of its process."""
CLOSE_MARGIN_S = 2.0
"""Time for closing transports beyond their own time limits: a library's engine takes a second."""
_STAYING: list[ExitStack] = []
"""Stacks that would undo the memory of workers that did not close: their transports may reach this memory until the process
ends."""


def serve(given: argparse.Namespace) -> int:
    """Serve one rank until the node says Shutdown or is gone. Return the exit code."""
    rank = Rank(pp=given.pp, tp=given.tp)
    names = {"role": given.role, "instance": given.instance, "node": given.node, "rank": str(rank)}
    os.set_inheritable(given.log_descriptor, False)  # no child may hold it open
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
    """The node did not take the worker's hello, so the worker has not begun."""


class UnclosedError(BridgeError):
    """A worker has ended without closing: its transports, or its GPU, may still move bytes until the process ends."""


def serve_rank(
    link: NodeLink,
    rank: Rank,
    *,
    setup_timeout_s: float,
    adopted: Sequence[Region] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one rank until the node says Shutdown or `stopped()` is true.

    `adopted` is the device memory that this process brings. A failure is reported to the node, and raised. Afterwards every
    transport is closed; when one cannot be closed, UnclosedError is raised and all memory stays as it is. NoNodeError: nothing had
    begun.
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
            progress = partial(_report_progress, link, rank, stopped)
            worker = RankWorker(
                bring_memory(setup, settings, adopted, stack, on_progress=progress),
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
    """Tell the node that no peer can write here any more, and wait for the node's answer."""
    try:
        link.send(WorkerClosed(rank=rank))
        deadline_s = time.monotonic() + CLOSE_ANSWER_S
        while time.monotonic() < deadline_s:
            if isinstance(link.receive(0.1), Shutdown):
                return
        log.warning("worker_end_unanswered", rank=str(rank), limit_s=CLOSE_ANSWER_S)
    except BridgeError as error:  # the node is gone, or has forgotten this worker: nothing waits for the message
        log.info("worker_end_unheard", rank=str(rank), code=error.code, reason=str(error))


def _setup(link: NodeLink, timeout_s: float, stopped: Callable[[], bool]) -> WorkerSetup | None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and not stopped():
        match link.receive(0.1):
            case WorkerSetup() as setup:
                return setup
            case Shutdown():
                return None
            case _:  # before its welcome the node expects nothing more
                continue
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


# ------------------------------------------------------------------------------------------- memory


def bring_memory(
    setup: WorkerSetup,
    settings: TransportSettings,
    adopted: Sequence[Region],
    stack: ExitStack,
    *,
    on_progress: Progress,
) -> RankIdentity:
    """Map the node's memory, make the node's pool on the GPU, and adopt what this process brings; `stack` undoes all of it.

    Only device memory that was made stays, because other processes may have it open until this one ends (see `MemoryPool`).
    `on_progress` is called while the host pool and the host copies are page-locked. Raises RegistrationError, InvalidInputError,
    UnsupportedError.
    """
    mapped = stack.enter_context(MappedRegions((*setup.device, *setup.host)))
    kept = stack.enter_context(MappedRegions(setup.twins))
    regions, extents = mapped.regions, mapped.extents()
    made: tuple[SharedRegion, ...] = ()
    part = RankPart(rank=setup.rank, pp_size=setup.pp_size, tp_size=setup.tp_size, layers=setup.layers)
    if setup.allocate is not None:
        vram = part.model_copy(update={"memory": MemoryKind.VRAM, "device": setup.allocate.device})
        placement = device_placement(
            setup.geometry,
            vram,
            page_counts=setup.allocate.page_counts,
            exclude=setup.allocate.exclude,
            page_first=setup.allocate.page_first,
        )
        pool = MemoryPool.on_gpu(placement, on_progress=on_progress)
        regions, extents, made = pool.regions + regions, [*pool.extents, *extents], pool.shared_regions()
    if adopted:
        on_host = {shared.region.component for shared in setup.host}
        exported = _exported(adopted, stack, required=TransportName.LOCAL in settings.order)
        ours = MemoryPool.adopted(
            setup.geometry, part, adopted, exclude=on_host, own_host=setup.own_host, shared=exported
        )
        regions, extents = regions + ours.regions, [*extents, *ours.extents]
    device = next((region.device for region in regions if region.memory is MemoryKind.VRAM), None)
    if device is not None:
        locked = (*mapped.mappings, *kept.mappings)
        stack.enter_context(
            HostRegistration(
                locked, extents=[*mapped.extents(), *kept.extents()], device=device, on_progress=on_progress
            )
        )
    manifest = RankManifest(
        fingerprint=fingerprint(setup.geometry),
        rank=setup.rank,
        pp_size=setup.pp_size,
        tp_size=setup.tp_size,
        regions=regions,
        own_host=bool(setup.own_host),
    )
    check_manifest(manifest, setup.geometry)
    return RankIdentity(
        setup.geometry,
        manifest,
        tuple(extents),
        tuple(map(str, settings.order)),
        epoch=setup.epoch,
        made=made,
        twins=kept.regions,
        stage_tp_ranks=setup.stage_tp_ranks,
        copy_backend=setup.copy_backend,
    )


def _exported(adopted: Sequence[Region], stack: ExitStack, *, required: bool) -> list[Extent]:
    """Export the engine's device memory to other processes of the host, each allocation once.

    Raises RegistrationError for memory that cannot be shared if that is `required`, because the `local` transport is to reach it.
    """
    allocations: list[Extent] = []
    for region in adopted:
        if region.memory is not MemoryKind.VRAM:
            continue
        address = region.extent_addresses[0]
        if any(known.holds(address, address + region.page_bytes, region.memory) for known in allocations):
            continue
        try:
            exported = export(region.device, address)
        except RegistrationError as error:
            if required:
                raise RegistrationError(f"{region.label}: {error}; or take `local` out of transports.order") from error
            log.info("device_memory_not_shared", region=region.label, reason=str(error))
            continue
        stack.callback(forget_export, exported)
        allocations.append(exported)
    return allocations
