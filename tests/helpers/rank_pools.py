"""The pools of one instance on one node, in shared memory, and paint that shows every stray byte in any memory."""

import contextlib
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry, RowInterval
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.operations import split_rows
from kvbridge.core.wire import worker_messages
from kvbridge.core.wire.messages import Heartbeat, RankDescription
from kvbridge.engine.memory import adopted_region
from kvbridge.engine.views import PoolViews, RegionView, place_rows
from kvbridge.pool.memory.layout import Chunking, RankPart, device_placement, host_placement
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.worker.lifecycle import serve_rank

SCAN_BYTES = 1 << 20
CANARY = 0xC5
NO_KINDS: frozenset[ComponentKind] = frozenset()
UNCUT = Chunking()


@dataclass(frozen=True)
class Ranks:
    pp: int = 1
    tp: int = 1
    boundaries: tuple[int, ...] = ()
    """First layers of the stages but the first."""

    def __str__(self) -> str:
        return f"pp{self.pp}tp{self.tp}"

    @property
    def all(self) -> list[Rank]:
        return [Rank(pp=pp, tp=tp) for pp in range(self.pp) for tp in range(self.tp)]


@dataclass(frozen=True)
class Form:
    pages: Mapping[IndexSpace, int]
    host: frozenset[ComponentKind] = NO_KINDS
    layout: HostLayout = HostLayout.LAYER_FIRST
    chunking: Chunking = UNCUT
    """Pages of the device pools."""
    host_chunking: Chunking = UNCUT
    page_first: bool = False
    """On the device."""


class Canvas:
    """Memory of one colour (uint8 arrays), and the views of all ranks in it; drop the canvas before the memory is unmapped."""

    def __init__(self, views: Sequence[PoolViews], memory: Sequence[npt.NDArray[np.uint8]], colour: int) -> None:
        self.views = list(views)
        self._memory = list(memory)
        self._colour = colour

    def paint(self) -> None:
        for array in self._memory:
            array[:] = self._colour

    def paint_request(self, tables: Tables, *, tokens: int, prefix_tokens: int = 0, whole_pages: bool = False) -> None:
        """Repaint a request's live rows and the paddings of its complete pages, or (`whole_pages`) all of these pages."""
        for views in self.views:
            for component in views.geometry.components:
                for layer in views.layers(component.kind):
                    view = views.home(component.kind, layer, tables=tables)
                    self._paint_rows(view, tables, tokens, prefix_tokens)
                    if whole_pages:
                        self._paint_pages(view, tables, component.live_rows(tokens, prefix_tokens))

    def _paint_rows(self, view: RegionView, tables: Tables, tokens: int, prefix_tokens: int) -> None:
        component, table = view.component, view.table(tables)
        rows = component.live_rows(tokens, prefix_tokens)
        if not rows.count:
            return
        colour = torch.full((rows.count, view.row_bytes), self._colour, dtype=torch.uint8)
        view.write(place_rows(component, table, rows.start, rows.stop), colour)
        padding = view.region.lanes * component.lane_block_bytes
        if padding < view.region.page_bytes:
            for page_id in complete_pages(component, table, rows.start, rows.stop):
                view.page(page_id)[padding:] = self._colour

    def _paint_pages(self, view: RegionView, tables: Tables, rows: RowInterval) -> None:
        table = view.table(tables)
        for page in split_rows(view.component, rows).touched if rows.count else ():
            view.page(int(table.ids[page - table.first_page]))[:] = self._colour

    def stray(self) -> str | None:
        """Return where the first byte lies that does not have the colour, in words, or None."""
        for array in self._memory:
            for start in range(0, len(array), SCAN_BYTES):
                wrong = _differs(array[start : start + SCAN_BYTES], self._colour)
                if wrong is not None:
                    return self._owner(array.ctypes.data + start + wrong)
        return None

    def _owner(self, address: int) -> str:
        for views in self.views:
            for region in views.regions:
                for extent, base in enumerate(region.extent_addresses):
                    page, offset = divmod(address - base, region.page_stride_bytes)
                    if 0 <= page < region.pages_per_extent and offset < region.page_bytes:
                        number = extent * region.pages_per_extent + page
                        return f"byte {offset} of page {number} of '{region.space}', {region.label} of {views!r}"
        return f"{address:#x}, which belongs to no page"

    def close(self) -> None:
        self.views.clear()
        self._memory.clear()


def _differs(array: npt.NDArray[np.uint8], colour: int) -> int | None:
    """The first byte that has another colour, if any; in words where the length allows, since that is faster."""
    if len(array) % 8 == 0:
        words = array.view(np.uint64)
        if (words == np.uint64(int.from_bytes(bytes([colour]) * 8, "little"))).all():
            return None
    wrong = array != colour
    return int(wrong.argmax()) if wrong.any() else None


class NodePools:
    """All pools of a node; every byte has `colour` until somebody writes. Close it."""

    def __init__(self, geometry: ModelGeometry, ranks: Ranks, form: Form, *, directory: Path, colour: int) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.form = form
        self._parts = [
            RankPart.of(geometry, rank, pp_size=ranks.pp, tp_size=ranks.tp, boundaries=ranks.boundaries or None)
            for rank in ranks.all
        ]
        name = f"{directory.name}-{colour:x}"
        self._device = [
            MemoryPool.in_files(
                device_placement(
                    geometry,
                    part,
                    page_counts=form.pages,
                    exclude=form.host,
                    chunking=form.chunking,
                    page_first=form.page_first,
                ),
                directory,
                name,
            )
            for part in self._parts
        ]
        self._host = (
            MemoryPool.in_files(
                host_placement(
                    geometry,
                    form.host,
                    page_count=form.pages[IndexSpace.HOST],
                    layout=form.layout,
                    chunking=form.host_chunking,
                ),
                directory,
                name,
            )
            if form.host
            else None
        )
        self.pools: list[MemoryPool] = [*self._device, *([self._host] if self._host else [])]
        self.canvas = Canvas(
            [PoolViews(geometry, pool.regions) for pool in self.pools],
            [np.frombuffer(mapping.buffer, dtype=np.uint8) for pool in self.pools for mapping in pool.mappings],
            colour,
        )
        if colour:  # new pools are zero
            self.canvas.paint()

    @property
    def views(self) -> list[PoolViews]:
        """One for each rank's device pool, and one for the host pool at the end."""
        return self.canvas.views

    def close(self) -> None:
        self.canvas.close()
        for pool in self.pools:
            pool.close()

    def setups(self, transports: str, transfer_timeout_s: float) -> list[worker_messages.WorkerSetup]:
        return [
            worker_messages.WorkerSetup(
                geometry=self.geometry,
                rank=part.rank,
                pp_size=part.pp_size,
                tp_size=part.tp_size,
                layers=part.layers,
                device=pool.shared_regions(),
                host=self._host.shared_regions() if self._host else (),
                transports=transports,
                transfer_timeout_s=transfer_timeout_s,
            )
            for part, pool in zip(self._parts, self._device, strict=True)
        ]


@dataclass
class EngineMemory:
    """Tensors of an engine's own, of the colour `CANARY`, for all ranks of its node."""

    regions: dict[Rank, list[Region]]
    tensors: list[torch.Tensor]

    @classmethod
    def make(cls, geometry, ranks, pages, *, exclude=frozenset(), in_host=frozenset(), device="cpu"):
        made = cls({}, [])
        for rank in ranks.all:
            part = RankPart.of(geometry, rank, pp_size=ranks.pp, tp_size=ranks.tp)
            made.regions[rank] = []
            for component, layers in part.components(geometry, exclude):
                is_host = component.kind in in_host
                # Rows of a larger tensor, as engines have them: the stride is not the page.
                shape = pages[IndexSpace.HOST if is_host else component.space], component.page_bytes() + 64
                for layer in layers:
                    made.tensors.append(tensor := torch.full(shape, CANARY, dtype=torch.uint8, device=device))
                    mine = tensor[:, : component.page_bytes()]
                    made.regions[rank].append(adopted_region(component, layer, mine, in_host=is_host))
        return made

    @property
    def memory(self) -> list[npt.NDArray[np.uint8]]:
        return [tensor.reshape(-1).numpy() for tensor in self.tensors]


def complete_pages(component: Component, table: PageTable, start_row: int, stop_row: int) -> list[int]:
    """Ids of the pages of which every row is in [start_row, stop_row); rings never are."""
    if component.liveness is not Liveness.GROWING:
        return []
    slots = component.slots_per_page
    return table.ids[-(-start_row // slots) : stop_row // slots].tolist()


ANSWER_LIMIT_S = 30.0
END_LIMIT_S = 30.0

AnswerT = TypeVar("AnswerT", bound=FrozenModel)


class ThreadLink:
    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[worker_messages.NodeToWorker] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[worker_messages.WorkerToNode] = queue.SimpleQueue()

    def send(self, message: worker_messages.WorkerToNode) -> None:
        if not isinstance(message, Heartbeat | worker_messages.WorkerProgress | worker_messages.WorkerHello):
            self.reports.put(message)

    def receive(self, timeout_s: float) -> worker_messages.NodeToWorker | None:
        try:
            return self.orders.get(timeout=timeout_s) if timeout_s > 0 else self.orders.get_nowait()
        except queue.Empty:
            return None


class WorkerThread:
    def __init__(self, setup: worker_messages.WorkerSetup) -> None:
        self.setup = setup
        self._link = ThreadLink()
        self._link.orders.put(setup)
        self._thread = threading.Thread(target=self._serve, name=f"worker-{setup.rank}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(BridgeError):  # told to the node, where `hear` raises it
            serve_rank(self._link, self.setup.rank, setup_timeout_s=ANSWER_LIMIT_S)

    def tell(self, message: worker_messages.NodeToWorker) -> None:
        self._link.orders.put(message)

    def hear(self, kind: type[AnswerT], limit_s: float = ANSWER_LIMIT_S) -> AnswerT:
        try:
            report = self._link.reports.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"rank {self.setup.rank} said no {kind.__name__} for {limit_s} s") from None
        assert isinstance(report, kind), f"rank {self.setup.rank} said {report!r} instead of {kind.__name__}"
        return report

    def description(self) -> RankDescription:
        return self.hear(worker_messages.WorkerReady).description

    def stop(self) -> None:
        """Ask it to end; `join` waits."""
        self.tell(worker_messages.Shutdown())

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

    def start(self, setups: Sequence[worker_messages.WorkerSetup]) -> tuple[RankDescription, ...]:
        self._pipe.send(tuple(setups))
        return self._answer()

    def begin_stop(self) -> None:
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
            setups: tuple[worker_messages.WorkerSetup, ...] = pipe.recv()
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
