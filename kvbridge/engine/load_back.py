"""Pages of a prefix that the node has in host memory, on their way into the pages of a room.

Owns: the copiers of this process (one a rank), their streams, and the loads of rooms that have not been let go of. Must not know:
the verbs, which prompts these are.

The engine's own process copies, on a stream of its own: a kernel of another process would take turns with the engine's compute.
Nothing here waits for a GPU. Sources and destinations stay what they are until the room is let go of, which is behind the points of
its load. With pools in host memory the copies are done when `start` returns, and there are no points.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbridge.config.tier import CopyBackend
from kvbridge.core.closing import Closing
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.geometry.tiers import twin_pieces
from kvbridge.core.ids import IndexSpace, PageMoves, Rank
from kvbridge.core.wire.engine_messages import Pages
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.engine.attach import Attachment
from kvbridge.engine.stream_order import StreamChoice, StreamOrder, current_gpu
from kvbridge.tier.copies import CopyMeans, Direction, TwinCopier


@dataclass(frozen=True, slots=True)
class RankCopier:
    """What copies into the device pools of one rank."""

    copier: TwinCopier
    device: int | None
    """The GPU; None: host memory."""
    layers: frozenset[int]
    """That have twins."""
    page_bytes: Mapping[IndexSpace, int]
    """What is copied of a page of each device space that has twins on this rank."""


@dataclass(slots=True, eq=False)
class Load:
    """The load of one room, as it was enqueued."""

    tickets: dict[Rank, int] = field(default_factory=dict)
    points: Mapping[str, StreamPoint] = field(default_factory=dict)
    """For each rank with a GPU, by its name: behind which all of it is there."""
    bytes: int = 0
    """Over all ranks."""
    host_s: float = 0.0
    """For how long `start` has taken, which with pools in host memory is the load."""
    began: dict[int, Any] = field(default_factory=dict)
    ended: dict[int, Any] = field(default_factory=dict)
    """Events with times, by GPU."""

    def seconds(self) -> float:
        """How long the slowest GPU copied; for a load that is over."""
        return max((self.began[gpu].elapsed_time(self.ended[gpu]) / 1000 for gpu in self.ended), default=self.host_s)


def rank_copiers(attachment: Attachment) -> dict[Rank, RankCopier]:
    """Make a copier for each rank that has something in host memory; they are the caller's to close."""
    found: dict[Rank, RankCopier] = {}
    with ExitStack() as stack:
        for rank, views in attachment.views.items() if attachment.twins else ():
            geometry = views.geometry
            regions, page_bytes = [], Counter[IndexSpace]()
            for twin in attachment.twins:
                component = geometry.component(twin.component)
                if twin.layer not in views.layers(component.kind):
                    continue
                region = views.region(component.kind, twin.layer, space=component.space).region
                lanes = [(each.lane_start, each.lane_stop) for each in (region, twin)]
                page_bytes[region.space] += sum(
                    piece.length_bytes for piece in twin_pieces(geometry, component, *lanes)
                )
                regions.append(region)
            if not regions:
                continue  # a stage of layers that have none, such as windows alone on decode
            means = CopyMeans(CopyBackend(attachment.answer.copy_backend), views.device)
            with current_gpu(views.device):
                copier = TwinCopier(geometry, regions, attachment.twins, direction=Direction.LOAD_BACK, means=means)
            stack.callback(copier.close)
            layers = frozenset(region.layer for region in regions)
            found[rank] = RankCopier(copier, views.device, layers, page_bytes)
        stack.pop_all()
    return found


class LoadBacks(Closing):
    """The loads of one engine process. Used by one thread."""

    def __init__(self, copiers: Mapping[Rank, RankCopier], order: StreamOrder) -> None:
        """`copiers`: of each rank that this process serves and whose pages have twins. They are closed here."""
        self._copiers = copiers
        self._order = order
        devices = {each.device for each in copiers.values() if each.device is not None}
        self._streams = {device: torch.cuda.Stream(device) for device in sorted(devices)}  # type: ignore[no-untyped-call]
        self._loads: dict[int, Load] = {}

    def start(self, room: int, pages: Pages, *, by_layer: bool) -> Load:
        """Enqueue the load that an answer to `begin` or `claim` asks for, once for each rank, whatever the number of layers.

        Unless `by_layer`, the current stream of each GPU goes on only behind it. Raises TransportError when it cannot be enqueued;
        `points` then says behind which what was enqueued ends.
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
        """Let the stream go on only behind what a room loads of one layer. Harmless for a room that loads nothing."""
        load = self._loads.get(room)
        if load is None:
            return
        for rank, each in self._copiers.items():
            if layer not in each.layers:
                continue
            with current_gpu(each.device):
                each.copier.wait_layer(layer, load.tickets[rank], stream=self._order.handle(each.device, stream))

    def points(self, room: int | None = None) -> frozenset[StreamPoint]:
        """Behind which all is over that was enqueued for a room that has not been forgotten; None: for all of them."""
        loads = self._loads.values() if room is None else filter(None, [self._loads.get(room)])
        return frozenset(point for load in loads for point in load.points.values())

    def forget(self, room: int) -> None:
        """The room has been let go of, or will be behind its points. Harmless for one that loads nothing."""
        self._loads.pop(room, None)

    def _handle(self, device: int | None) -> int:
        return 0 if device is None else int(self._streams[device].cuda_stream)

    def _marks(self) -> dict[int, Any]:
        """Mark the present end of each stream, with the time when it is reached."""
        marks = {}
        for device, stream in self._streams.items():
            marks[device] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            marks[device].record(stream)
        return marks

    def close(self) -> None:
        """End the copiers; everything that they were given has been done. Harmless when closed."""
        for each in self._copiers.values():
            each.copier.close()


def page_moves(pages: Pages) -> PageMoves:
    """Return which device pages an answer wants to be loaded, and from which twins."""
    own, twins = tables_from_wire(pages.tables), tables_from_wire(pages.load)
    moves: PageMoves = {}
    if (found := twins.get(IndexSpace.FULL_TWIN)) is not None:
        first, stop = found.first_page, found.first_page + len(found)
        moves[IndexSpace.FULL] = own[IndexSpace.FULL].ids[first:stop], found.ids
    if (found := twins.get(IndexSpace.SWA_TWIN)) is not None and pages.restore is not None:
        moves[IndexSpace.SWA] = tables_from_wire((pages.restore.table,))[IndexSpace.SWA].ids, found.ids
    return moves
