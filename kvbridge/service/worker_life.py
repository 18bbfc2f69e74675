"""How a rank worker comes to life, in a process of its own or in an engine's: hello, setup, memory, transports, service.

Owns: that order, and the report of a failure on the way. Must not know: who started it, how its link is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from kvbridge.config.transports import TransportSettings
from kvbridge.control.local import LocalClient
from kvbridge.core.errors import BridgeError, DeadlineError
from kvbridge.core.geometry.checks import check_manifest
from kvbridge.core.geometry.manifest import RankManifest, Region, fingerprint
from kvbridge.core.ids import Rank
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.core.wire.worker_messages import (
    NodeToWorker,
    Shutdown,
    WorkerFailed,
    WorkerHello,
    WorkerSetup,
    WorkerToNode,
)
from kvbridge.pool.adopted_pool import AdoptedPool
from kvbridge.pool.extent import Extent
from kvbridge.pool.layout import RankPart
from kvbridge.pool.sharing import MappedRegions, registered_extents
from kvbridge.service.rank_worker import NodeLink, RankIdentity, RankWorker
from kvbridge.service.rooms import REASON_CHARS
from kvbridge.transport.base import Memory, SharedFile, Transport
from kvbridge.transport.registry import create_transport


def open_node_link(path: Path, name: str) -> LocalClient[NodeToWorker, WorkerToNode]:
    """Connect to the node that listens for rank workers on `path`; used by the thread that serves the rank."""
    client: LocalClient[NodeToWorker, WorkerToNode] = LocalClient(name, NODE_TO_WORKER, WORKER_TO_NODE)
    client.connect(path)
    return client


def serve_rank(
    link: NodeLink,
    rank: Rank,
    *,
    pid: int,
    setup_timeout_s: float,
    adopted: Sequence[Region] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one rank until the node says Shutdown or `stopped()` is true. Returns then; raises what made it impossible.

    `adopted` is the device memory that this process brings. A failure is reported to the node before it is raised.
    """
    link.send(WorkerHello(rank=rank, pid=pid, adopted=bool(adopted)))
    setup = _setup(link, setup_timeout_s, stopped)
    if setup is None:
        return
    try:
        with ExitStack() as stack:
            regions, extents = _pools(setup, adopted, stack)
            identity = _identity(setup, regions, extents)
            worker = RankWorker(identity, link, _factory(setup), transfer_timeout_s=setup.transfer_timeout_s, pid=pid)
            worker.run(stopped)
    except Exception as error:
        code = error.code if isinstance(error, BridgeError) else BridgeError.code
        told = WorkerFailed(rank=rank, code=code, message=(str(error) or type(error).__name__)[:REASON_CHARS])
        with suppress(BridgeError):  # the node may be what is gone
            link.send(told)
        raise


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


def _pools(setup: WorkerSetup, adopted: Sequence[Region], stack: ExitStack) -> tuple[tuple[Region, ...], list[Extent]]:
    """Map what the node owns and adopt what this process brings; `stack` unmaps it again."""
    mapped = stack.enter_context(MappedRegions((*setup.device, *setup.host)))
    regions, extents = mapped.regions, registered_extents(mapped.regions, mapped.mappings)
    if adopted:
        part = RankPart(rank=setup.rank, pp_size=setup.pp_size, tp_size=setup.tp_size, layers=setup.layers)
        pool = AdoptedPool(setup.geometry, part, adopted, exclude={shared.region.component for shared in setup.host})
        regions, extents = regions + pool.regions(), [*extents, *pool.extents()]
    return regions, extents


def _identity(setup: WorkerSetup, regions: tuple[Region, ...], extents: Sequence[Extent]) -> RankIdentity:
    manifest = RankManifest(
        fingerprint=fingerprint(setup.geometry),
        rank=setup.rank,
        pp_size=setup.pp_size,
        tp_size=setup.tp_size,
        regions=regions,
    )
    check_manifest(manifest, setup.geometry)
    memory = tuple(
        Memory(
            address=extent.address,
            length_bytes=extent.length_bytes,
            kind=extent.memory,
            device=extent.device,
            shared=SharedFile(path=extent.path, offset_bytes=extent.offset_bytes) if extent.path else None,
            label=extent.label,
        )
        for extent in extents
    )
    settings = TransportSettings.model_validate_json(setup.transports)
    order = tuple(str(name) for name in settings.order)
    return RankIdentity(setup.geometry, manifest, memory, order, epoch=setup.epoch)


def _factory(setup: WorkerSetup) -> Callable[[str, int], Transport]:
    settings = TransportSettings.model_validate_json(setup.transports)

    def create(name: str, epoch: int) -> Transport:
        return create_transport(name, settings, epoch=epoch)

    return create
