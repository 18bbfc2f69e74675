"""The hot buffer of a decode rank: admit, step, release.

A step, for the requests that decode together, as the engine calls it:

    begin_step(entries)            the host says which requests, and how many rows each has after the step
    for each sparse layer:
        append(layer, rows)        the new rows, of the requests that complete one
        swap_in(layer, top_k)      physical rows for the indexer's choice; attention reads them in `hot_pages(layer)`
    end_step()                     pages that are complete now start on their way to the host

`append` and `swap_in` read only device memory that never moves, so they may be captured into a CUDA graph for a batch size and
replayed; the other verbs stay outside. No verb waits for the device, and none allocates device memory. All work happens on torch's
current stream of the device, or beside it and in order with it.

A request's page table names its host pages. Other requests read the first `shared_pages` of them too, and nobody writes these. All
others are this request's alone from `admit` until the result of `release` says that they are quiet. Give them back only then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvbridge.core.errors import ConflictError, DeadlineError, InvalidInputError, NotFoundError, PageOutOfBoundsError
from kvbridge.core.geometry.components import Component
from kvbridge.core.geometry.costs import SparseBytes, SparseSettings
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import PageIdArray
from kvbridge.core.plan.operations import page_copies
from kvbridge.core.process import Closing
from kvbridge.core.wire.engine_messages import SparseRows
from kvbridge.kernels.copies import StretchCopier
from kvbridge.kernels.swap_in import AppendRows, CudaSwapIn, ReferenceSwapIn, Step, SwapIn
from kvbridge.sparse.memory import HotMemory, checked_regions, layer_memory, layer_pages
from kvbridge.sparse.requests import PagePlace, Request, RequestBook
from kvbridge.sparse.streams import Point, SideStream, Staging, Streams

STEPS_AHEAD = 16
"""Steps that a host may be ahead of its device before it waits."""
ADMISSIONS_AHEAD = 8
POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The rows that a request's steps selected, over all layers, without ring rows."""

    hits: int
    """Rows that were in a hot slot, each step's distinct ones."""
    loaded: int
    """Rows that were loaded from the host, preloaded ones not counted."""
    preloaded: int
    """Rows that admission put into hot slots."""
    resident: int
    """Rows in hot slots now."""

    @property
    def evicted(self) -> int:
        """Rows that gave way to others."""
        return self.preloaded + self.loaded - self.resident


class ReleasedRequest:
    """A request that has ended, while copies between its hot rows and its host pages may still be under way."""

    def __init__(self, slot: int, point: Point, known: SparseRows, tallies: torch.Tensor) -> None:
        """`known`: the figures of the host; `tallies`: int32 [layers, TALLIES] on the host, there when `point` is reached."""
        self._slot, self._point, self._known, self._tallies = slot, point, known, tallies

    def reached(self) -> bool:
        """Return whether all copies have ended, so that the host pages may be given back; never waits."""
        return self._point.reached()

    def wait(self, timeout_s: float) -> None:
        """Wait until all copies have ended. Raises DeadlineError after `timeout_s`: then keep the pages."""
        deadline_s = time.monotonic() + timeout_s
        while not self.reached():
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"request slot {self._slot}: copies of its rows are still under way after {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def rows(self) -> SparseRows:
        """Return the request's figures, for `DecodeEngine.release`. Raises ConflictError before all copies have ended."""
        if not self.reached():
            raise ConflictError("the figures of a request are known when its copies have ended: wait for that first")
        _, hits, loaded, _ = self._tallies.sum(dim=0).tolist()
        return self._known.model_copy(update={"hit": hits, "loaded": loaded})


class SparseCache(Closing):
    """The hot buffer of one component on one device. Used by one thread."""

    def __init__(
        self, settings: SparseSettings, component: Component, host_regions: Sequence[Region], device: torch.device
    ) -> None:
        """Allocate everything. `host_regions`: the component's host-pool region of each layer that this rank holds.

        Their addresses are this process's own, and on a GPU registered with CUDA; they stay mapped until `close`. Raises
        InvalidInputError or UnsupportedError for sizes that do not suit each other, torch's OutOfMemoryError.
        """
        regions = checked_regions(component, host_regions)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.type not in {"cuda", "cpu"}:
            raise InvalidInputError(f"a sparse cache lives on 'cpu' or 'cuda:N', got '{device}'")
        ordinal = device.index if device.type == "cuda" else None
        self.settings, self.component, self.device = settings, component, device
        self.layers = tuple(region.layer for region in regions)
        """Global ids, ascending."""
        self.memory = HotMemory(settings, component, layer_count=len(regions), device=device)
        self.requests = RequestBook(self.memory.shape, settings.max_requests)
        self._host_page_count = min(region.page_count for region in regions)
        self._positions = {layer: position for position, layer in enumerate(self.layers)}
        self._streams = Streams(device)
        self._load_stream, self._backup_stream = self._streams.side_stream(), self._streams.side_stream()
        self._pages = layer_pages(self.memory.pages, regions)
        self._copier = StretchCopier(ordinal)
        self._copier.reserve(len(regions) * settings.max_requests, 2 * STEPS_AHEAD)
        layers = [layer_memory(*both) for both in zip(self.memory.pages, regions, strict=True)]
        self._swap_in: SwapIn = (
            ReferenceSwapIn(self.memory.shape, self.memory.state, layers)
            if ordinal is None
            else CudaSwapIn(ordinal, self.memory.shape, self.memory.state, layers)
        )
        self._append = AppendRows(self.memory.shape, ordinal)
        self._admitted = [self._streams.point() for _ in range(settings.max_requests)]
        self._unsettled: set[int] = set()
        """Slots whose admission compute has not been told to wait for."""
        self._backed_up = [
            [self._streams.point() for _ in range(settings.ring_pages)] for _ in range(settings.max_requests)
        ]
        requests, pinned = settings.max_requests, device.type == "cuda"
        table_words = 2 * self.memory.shape.max_pages + 1
        self._tables = Staging(self._streams, words=table_words, count=ADMISSIONS_AHEAD, pinned=pinned)
        self._steps = Staging(self._streams, words=3 * requests, count=STEPS_AHEAD, pinned=pinned)
        # The memory was set on the current stream; the other streams come after it.
        self._load_stream.follow()
        self._backup_stream.follow()

    # ------------------------------------------------------------------ requests come and go

    def admit(self, request_slot: int, host_page_ids: PageIdArray, rows: int, *, shared_pages: int = 0) -> None:
        """Begin a request of `rows` complete rows in a free slot.

        `host_page_ids`: int32, the request's host pages in the order of its rows; all pages that it will need, or as many as it has
        now and the rest by `extend`. `shared_pages`: the number of them, from the first on, that hold a prefix which this node had
        already (`prefix_tokens` of the claim, in pages); a step that would write one is refused with IntegrityError. The rows of
        the first step are loaded beside compute. Raises CapacityError, ConflictError, InvalidInputError, PageOutOfBoundsError; then
        nothing has changed.
        """
        self._check_ids(request_slot, host_page_ids)
        request = self.requests.admit(request_slot, host_page_ids.copy(), rows, shared_pages=shared_pages)
        loads = self._loads(request)
        stream, memory = self._load_stream, self.memory
        stream.follow()  # steps of the request that had the slot before
        stream.follow(self._backup_stream)
        with self._tables.buffer(stream) as words, stream.running():
            memory.forget(request_slot)
            self._send_table(request, words)
            begin = words[2 * memory.shape.max_pages :]
            begin[0] = request.ring_begin
            memory.ring_begin[request_slot : request_slot + 1].copy_(begin, non_blocking=True)
            self._copy_pages(loads, stream, load=True)
            if request.preloaded_rows:
                memory.note_resident(request_slot, request.preloaded_rows)
        stream.mark(self._admitted[request_slot])
        self._unsettled.add(request_slot)

    def extend(self, request_slot: int, host_page_ids: PageIdArray) -> None:
        """Give a request a longer page table, which begins with the one that it has. Not between begin_step and end_step."""
        if self.requests.stepping:
            raise ConflictError("extend between begin_step and end_step; end the step first")
        self._check_ids(request_slot, host_page_ids)
        request = self.requests.extend(request_slot, host_page_ids.copy())
        self._settle(request_slot)
        with self._tables.buffer() as words:
            self._send_table(request, words)

    def release(self, request_slot: int) -> ReleasedRequest:
        """End a request. Its slot may be admitted to at once; its host pages may be given back when the result is reached."""
        request, slots = self.requests.release(request_slot), self.component.slots_per_page
        self._settle(request_slot)
        self._backup_stream.follow()
        tallies = torch.empty_like(self.memory.tallies, device="cpu", pin_memory=self.device.type == "cuda")
        with self._backup_stream.running():
            tallies.copy_(self.memory.tallies, non_blocking=True)  # all of them: a part would take device memory
        told = SparseRows(
            preloaded=request.preloaded_rows * len(self.layers),
            backed_up=(request.rows // slots * slots - request.ring_begin) * len(self.layers),
        )
        point = self._streams.point()
        self._backup_stream.mark(point)
        return ReleasedRequest(request_slot, point, told, tallies[:, request_slot])

    # ------------------------------------------------------------------ a step

    def begin_step(self, entries: Sequence[tuple[int, int]]) -> None:
        """Begin a step of some requests: (request slot, its complete rows after this step), in the order of the batch.

        Each has as many rows as before or one more. Raises InvalidInputError (also for a page that would be complete with this step
        but has no host page), NotFoundError or ConflictError before anything has been changed or enqueued.
        """
        plan = self.requests.begin_step(entries)
        for slot, _ in entries:
            self._settle(slot)
        for place in plan.overwritten:
            self._streams.wait(self._point(place))
        with self._steps.buffer() as words:
            step = words.numpy().reshape(self.memory.step.shape)
            step.fill(-1)
            if entries:
                step[:2, : len(entries)] = np.array(entries, dtype=np.int32).T
                step[2, : len(entries)] = plan.places
            self.memory.step.copy_(words.view(self.memory.step.shape), non_blocking=True)

    def end_step(self) -> None:
        """Back up the pages that are complete with this step: one copy for all layers, beside compute."""
        plan = self.requests.end_step()
        if not plan.completed:
            return
        stream = self._backup_stream
        stream.follow()
        self._copy_pages(plan.completed, stream, load=False)
        for place in plan.completed:
            stream.mark(self._point(place))

    def places(self, batch: int) -> torch.Tensor:
        """Return where new rows go: int32 [batch] in the cache's memory, physical rows, -1 for no new row and for padding."""
        return self.memory.step[2, :batch]

    def append(self, layer: int, rows: torch.Tensor) -> None:
        """Write rows of one layer, uint8 [batch, row_bytes], contiguous, on the device, to their `places`; skip the others."""
        batch, row_bytes = rows.shape[0], self.component.row_bytes
        if rows.dtype is not torch.uint8 or tuple(rows.shape) != (batch, row_bytes) or not rows.is_contiguous():
            raise InvalidInputError(
                f"new rows are a contiguous uint8 tensor [batch, {row_bytes}], got {rows.dtype} of shape {tuple(rows.shape)}"
            )
        self._check_batch(rows, batch)
        pages = self.hot_pages(layer)
        self._append.append(
            rows=rows.data_ptr(),
            places=self.memory.step[2].data_ptr(),
            count=batch,
            hot_address=pages.data_ptr(),
            hot_stride_bytes=pages.stride(0),
            stream=self._streams.handle(),
        )

    def swap_in(self, layer: int, top_k: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the physical rows of the selected ones: int32 [batch, top_k], of the same shape as `top_k`.

        -1 where `top_k` is -1 or no row of the request, and for padding. Without `out` the answer lies in memory of the cache until
        the next call.
        """
        batch = top_k.shape[0]
        self._check_batch(top_k, batch)
        found = self.memory.found[:batch] if out is None else out
        shape = (batch, self.settings.top_k)
        for tensor in (top_k, found):
            if tensor.dtype is not torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise InvalidInputError(
                    f"selected rows are a contiguous int32 tensor [batch, {self.settings.top_k}], got {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}; fill up with -1"
                )
        self._swap_in.swap_in(
            self._position(layer),
            Step(batch, self.memory.step[0].data_ptr(), self.memory.step[1].data_ptr()),
            top_k=top_k.data_ptr(),
            out=found.data_ptr(),
            stream=self._streams.handle(),
        )
        return found

    # ------------------------------------------------------------------ reading

    def hot_pages(self, layer: int) -> torch.Tensor:
        """Return a layer's hot region: uint8 [pages, page_bytes]; physical row p is slot p % slots_per_page of page p // that."""
        return self.memory.pages[self._position(layer)]

    def rows(self, layer: int, physical_rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of physical rows, for attention in plain torch: uint8 [*physical_rows.shape, row_bytes], zeros for -1."""
        pages, slots = self.hot_pages(layer), self.component.slots_per_page
        wanted = physical_rows.clamp(min=0).long()
        parts = []
        for number, part_bytes in enumerate(self.component.row_parts_bytes):
            shape, strides = (pages.shape[0], slots, part_bytes), (pages.stride(0), part_bytes, 1)
            offset = pages.storage_offset() + self.component.part_offset(number)
            parts.append(torch.as_strided(pages, shape, strides, offset)[wanted // slots, wanted % slots])
        return torch.cat(parts, dim=-1).masked_fill_((physical_rows < 0).unsqueeze(-1), 0)

    def counts(self, request_slot: int) -> RequestCounts:
        """Return the counts of a request so far. Waits for the device."""
        request = self.requests.get(request_slot)
        self._streams.synchronize()
        _, hits, loaded, _ = self.memory.tallies[:, request_slot].sum(dim=0).tolist()
        resident = int((self.memory.row_of_slot[:, request_slot] >= 0).sum())
        return RequestCounts(hits, loaded, request.preloaded_rows * len(self.layers), resident)

    def memory_bytes(self) -> SparseBytes:
        """Return the device memory by part, without some KiB of the copiers' descriptions."""
        return self.memory.bytes_by_part()

    def close(self) -> None:
        """Wait for the device and let everything go; the host regions may be unmapped afterwards. Harmless when closed."""
        self._streams.synchronize()
        self._copier.close()
        if isinstance(self._swap_in, CudaSwapIn):
            self._swap_in.close()

    def __repr__(self) -> str:
        used = len(self.requests)
        return f"<SparseCache on {self.device}: {used} of {self.settings.max_requests} requests, {len(self.layers)} layers>"

    # ------------------------------------------------------------------ inside

    def _copy_pages(self, places: Sequence[PagePlace], stream: SideStream, *, load: bool) -> None:
        """Copy pages between the hot region and the host, in all layers, on a side stream."""
        if not places:
            return
        hot_ids, host_ids = np.array([(one.hot_page, one.host_page) for one in places], dtype=np.int64).T
        for hot, host in self._pages:
            sides = ((host, host_ids), (hot, hot_ids)) if load else ((hot, hot_ids), (host, host_ids))
            self._copier.submit(page_copies(*sides, self.component.page_bytes()), stream=stream.handle())

    def _loads(self, request: Request) -> list[PagePlace]:
        """Return host pages to load at admission: the incomplete one, into the ring, and all complete ones of a short request."""
        slot, slots = request.slot, self.component.slots_per_page
        complete = request.rows // slots
        short = request.rows <= self.settings.preload_limit_rows
        request.preloaded_rows = complete * slots if short else 0
        first = slot * self.settings.pages_per_request(self.component)
        pages = request.pages[: complete if short else 0].tolist()
        loads = [PagePlace(slot, page, first + page, host_page) for page, host_page in enumerate(pages)]
        partial = self.requests.partial_page(slot)
        return [*loads, partial] if partial is not None else loads

    def _send_table(self, request: Request, words: torch.Tensor) -> None:
        """Upload a request's host pages and their ranks, on torch's current stream."""
        table = self.memory.host_pages[request.slot]
        staged = words[: table.numel()].view(table.shape)
        numbers = staged.numpy()
        numbers.fill(-1)
        count = len(request.pages)
        numbers[:count, 0] = request.pages
        numbers[np.argsort(request.pages), 1] = np.arange(count)
        table.copy_(staged, non_blocking=True)

    def _settle(self, slot: int) -> None:
        """Let compute wait for the slot's admission, once an admission."""
        if slot in self._unsettled:
            self._unsettled.discard(slot)
            self._streams.wait(self._admitted[slot])

    def _point(self, place: PagePlace) -> Point:
        return self._backed_up[place.slot][place.page % self.settings.ring_pages]

    def _position(self, layer: int) -> int:
        if layer not in self._positions:
            raise NotFoundError(f"layer {layer} has no {self.component.kind} here; there are {self.layers}")
        return self._positions[layer]

    def _check_batch(self, tensor: torch.Tensor, batch: int) -> None:
        if tensor.device != self.memory.pages.device or batch > self.settings.max_requests:
            here = self.memory.pages.device
            raise InvalidInputError(
                f"a batch of at most {self.settings.max_requests} on {here} is needed, got {batch} on {tensor.device}"
            )

    def _check_ids(self, slot: int, host_page_ids: PageIdArray) -> None:
        last, count = int(host_page_ids.max(initial=-1)), self._host_page_count
        if last >= count:
            raise PageOutOfBoundsError(
                f"request slot {slot}: host page {last} does not exist: the host pool has {count} pages"
            )
