"""Host copies of device pages that one rank makes for the node.

A slice begins when the slice before it is done, and after a pause that leaves time to transfers and to sparse decode: copies use at
most `link_share` of each second, at any speed of the link.

An order that fails is answered at once. If the device may still write for it, the order is answered again as soon as the device is
idle. Until then the node backs nothing up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import structlog

from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import BridgeError, InvalidInputError, TransportError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.geometry.tiers import copy_space
from kvbridge.core.ids import HOST_COPIES, IndexSpace, MemoryKind, PageMoves
from kvbridge.core.process import Clock
from kvbridge.core.wire.worker_messages import CopyPages, PagesCopied
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import RankPart
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier, backup_shares
from kvbridge.worker.rank import NodeLink, RankIdentity, answered, contained

log = structlog.get_logger(__name__)


SLICE_BYTES = {MemoryKind.DRAM: 4 << 20, MemoryKind.VRAM: 64 << 20}
"""Bytes copied between two checks of the transfers: about a millisecond."""


class BackupCopier:
    """Copies pages to the host copies of a node: its own lanes, and its share of pages that several ranks of its stage hold."""

    def __init__(self, identity: RankIdentity) -> None:
        """Raises InvalidInputError when the node has no host copies, UnsupportedError for memory that the GPU cannot copy."""
        form, regions = identity.manifest, identity.manifest.regions
        gpu = next((region.device for region in regions if region.memory is MemoryKind.VRAM), None)
        layers = tuple(sorted({region.layer for region in regions}))
        part = RankPart(rank=identity.rank, pp_size=form.pp_size, tp_size=form.tp_size, layers=layers)
        shares = backup_shares(identity.geometry, part, identity.stage_tp_ranks)
        means = CopyMeans(CopyBackend(identity.copy_backend), gpu)
        self._copier = HostCopier(
            identity.geometry, regions, identity.twins, direction=Direction.BACKUP, means=means, shares=shares
        )
        self._stream = None if gpu is None else runtime.Stream.create(gpu)
        copied = {(region.component, region.layer, region.space): region for region in identity.twins}
        found = dict.fromkeys(HOST_COPIES, 0.0)
        for region in regions:
            twin = copied.get((region.component, region.layer, HOST_COPIES.get(region.space, region.space)))
            if twin is not None and region.space in HOST_COPIES:
                lanes = (region.lane_stop - region.lane_start) / (twin.lane_stop - twin.lane_start)
                found[region.space] += twin.page_bytes * lanes / shares[region.component][1]
        self.page_bytes: Mapping[IndexSpace, float] = found
        """Bytes of a page of each space that this rank copies, on average over the pages of an order."""
        # Slices begin where a share does, so that the ranks share a slice as they would share the whole order.
        unit = math.lcm(*(count for _, count in shares.values()))
        slice_bytes = SLICE_BYTES[MemoryKind.DRAM if gpu is None else MemoryKind.VRAM]
        self.slice_pages: Mapping[IndexSpace, int] = {
            space: unit * max(1, int(slice_bytes // max(1, unit * each))) for space, each in found.items()
        }

    def copy(self, moves: PageMoves) -> int:
        """Begin to copy and return a ticket. Raises InvalidInputError before anything is touched, TransportError."""
        return self._copier.copy(moves, stream=0 if self._stream is None else self._stream.handle)

    def done(self, ticket: int) -> bool:
        """Return whether the copy is proved to be done; never waits. Raises TransportError."""
        return self._copier.done(ticket)

    def idle(self) -> bool:
        """Return whether no copy is under way; never waits. Raises TransportError."""
        return self._stream is None or self._stream.idle()

    def close(self) -> None:
        """Release everything. Call it when idle."""
        self._copier.close()
        if self._stream is not None:
            self._stream.close()


class PageCopies:
    """The orders of one rank to copy pages, one after another."""

    def __init__(
        self,
        identity: RankIdentity,
        link: NodeLink,
        *,
        clock: Clock,
        create: Callable[[RankIdentity], BackupCopier] = BackupCopier,
    ) -> None:
        """`create` is called with the first order; an error that it raises fails the order."""
        self._identity = identity
        self._link = link
        self._clock = clock
        self._create = create
        self._copier: BackupCopier | None = None
        self._waiting: deque[CopyPages] = deque()
        self._slices: deque[PageMoves] | None = None
        """The slices of the first order that are left; None before the order has begun."""
        self._bytes, self._busy_s = 0.0, 0.0
        """Bytes that the first order has copied, and the time that its slices took."""
        self._ticket: int | None = None
        """The ticket of the slice that is being copied."""
        self._writing = False
        """Whether the copier has a slice that is not proved to be done."""
        self._unquiet: list[PagesCopied] = []
        """Answers to failed orders for which the device may still write; they are sent again when the device is idle."""
        self._asked_in_vain = ""
        """The last logged reason why the copier could not be asked."""
        self._begun_s = 0.0
        self._not_before_s = 0.0

    def __len__(self) -> int:
        """Count the orders that have not been answered."""
        return len(self._waiting)

    def take(self, request: CopyPages) -> None:
        """Queue an order."""
        self._waiting.append(request)

    def step(self) -> bool:
        """Begin or end one slice, if it is time for that. Return whether anything has changed.

        Any failure fails the order alone, also a defect in this code: the rank has rooms to serve.
        """
        quiet = self._say_quiet()
        if not self._waiting:
            return quiet
        try:
            with contained("copying pages", order=self._waiting[0].order):
                changed = self._step(self._waiting[0])
        except BridgeError as error:
            self._end(error)
            return True
        if self._slices is not None and not self._slices:
            self._end()
        return changed or quiet

    def _step(self, request: CopyPages) -> bool:
        if self._copier is None:
            self._copier = self._create(self._identity)
        if self._slices is None:
            self._slices = deque(_cut(self._copier, request))
        if self._ticket is not None:
            return self._look(self._copier, self._slices, self._ticket)
        if not self._slices:
            return True
        self._begun_s = self._clock()
        if self._begun_s < self._not_before_s:
            return False
        self._writing = True
        self._ticket = self._copier.copy(self._slices[0])
        self._look(self._copier, self._slices, self._ticket)
        return True

    def _look(self, copier: BackupCopier, slices: deque[PageMoves], ticket: int) -> bool:
        """Account for the slice under way if it is done. Return whether it is."""
        if not copier.done(ticket):
            return False
        self._ticket, self._writing = None, False
        now_s = self._clock()
        took_s = now_s - self._begun_s
        self._busy_s += took_s
        self._bytes += sum(len(ids) * copier.page_bytes[space] for space, (ids, _) in slices.popleft().items())
        self._not_before_s = now_s + took_s * (1 / self._waiting[0].link_share - 1)
        return True

    def _end(self, error: BridgeError | None = None) -> None:
        """Answer an order. The device may still write for an order that fails while a slice is under way."""
        answer = PagesCopied(
            rank=self._identity.rank,
            order=self._waiting.popleft().order,
            bytes=round(self._bytes),
            seconds=self._busy_s,
            quiet=not self._writing or self._is_idle(),
            **answered(error),
        )
        if not answer.quiet:
            self._unquiet.append(answer)
        self._slices = self._ticket = None
        self._bytes, self._busy_s, self._writing = 0.0, 0.0, False
        self._link.send(answer)

    def _say_quiet(self) -> bool:
        """Answer orders again that were not quiet, once the copier is idle. Return whether it answered."""
        if not self._unquiet or not self._is_idle():
            return False
        for answer in self._unquiet:
            self._link.send(answer.model_copy(update={"quiet": True}))
        self._unquiet.clear()
        return True

    def _is_idle(self) -> bool:
        """Return whether the copier writes nothing. A device that cannot be asked proves nothing."""
        try:
            with contained("asking whether copies have ended", rank=str(self._identity.rank)):
                return self.idle()
        except BridgeError as error:
            if self._asked_in_vain != str(error):
                self._asked_in_vain = str(error)
                log.error("copies_not_quiet", rank=str(self._identity.rank), code=error.code, reason=str(error))
            return False

    def idle(self) -> bool:
        """Return whether nothing writes to host copies; never waits. Raises TransportError when the device cannot be asked."""
        return self._copier is None or self._copier.idle()

    def close(self) -> None:
        """Copy nothing more. Raises TransportError unless idle: the device may then write to host copies until the process ends."""
        self._waiting.clear()
        if not self.idle():
            raise TransportError(
                f"the GPU of rank {self._identity.rank} has not ended its copies of pages; it may still write to host memory"
            )
        if self._copier is not None:
            self._copier.close()


def _cut(copier: BackupCopier, request: CopyPages) -> Iterator[PageMoves]:
    """Cut an order into slices. Raises InvalidInputError for tables that do not belong together."""
    for move in request.moves:
        space = move.device.space
        device, twins = (tables_from_wire((table,))[table.space].ids for table in (move.device, move.twins))
        if len(device) != len(twins) or move.twins.space is not copy_space(space):
            raise InvalidInputError(
                f"{len(device)} pages of '{space}' cannot be copied to {len(twins)} of '{move.twins.space}'"
            )
        for at in range(0, len(device), copier.slice_pages[space]):
            part = slice(at, at + copier.slice_pages[space])
            yield {space: (device[part], twins[part])}
