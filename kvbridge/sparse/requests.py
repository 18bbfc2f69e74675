"""The request slots of a cache: the request in each, its rows, and the work of a step. Pure.

Everything is decided from numbers that the scheduler knows anyway, so that no step has to look at the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, ConflictError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import PageIdArray
from kvbridge.kernels.swap_in import SwapInShape


@dataclass(slots=True, eq=False)
class Request:
    """The request in one slot."""

    slot: int
    rows: int
    """Complete rows, those of the step under way included."""
    ring_begin: int
    """First row that was put into the ring; a multiple of a page's rows."""
    pages: PageIdArray
    """Host page ids, in the order of the request's rows."""
    shared_pages: int = 0
    """The number of pages, from the first on, that other requests read too: nothing is written there."""
    preloaded_rows: int = 0
    """Rows that admission put into hot slots."""


@dataclass(frozen=True, slots=True)
class PagePlace:
    """A logical page of a request, its place in the ring, and its host page."""

    slot: int
    page: int
    hot_page: int
    """Page id in a layer's hot region."""
    host_page: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, decided and not yet begun."""

    slots: tuple[int, ...]
    """The request slot of each entry."""
    places: npt.NDArray[np.int32]
    """int32 [entries]: the physical row of the entry's new row, or -1."""
    overwritten: tuple[PagePlace, ...]
    """Ring pages whose first row is written in this step and that held another page: its backup must be over."""
    completed: tuple[PagePlace, ...]
    """Pages that are complete with this step, and go to the host after it."""


@dataclass
class RequestBook:
    """All request slots of one cache. Called from the engine's thread."""

    shape: SwapInShape
    max_requests: int
    _requests: dict[int, Request] = field(default_factory=dict)
    _step: StepPlan | None = None

    def __post_init__(self) -> None:
        self._page_rows = self.shape.slots_per_page
        self._ring_pages = self.shape.ring_rows // self._page_rows

    # ------------------------------------------------------------------ asking

    def get(self, slot: int) -> Request:
        """Return the request in a slot. Raises NotFoundError."""
        if slot not in self._requests:
            raise NotFoundError(f"request slot {slot} holds no request; admit it first")
        return self._requests[slot]

    def __len__(self) -> int:
        """Number of slots in use."""
        return len(self._requests)

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def free_slot(self) -> int:
        """Return the lowest free slot. Raises CapacityError when all are taken."""
        for slot in range(self.max_requests):
            if slot not in self._requests:
                return slot
        raise CapacityError(
            f"all {self.max_requests} request slots of the hot buffer are in use; release one, or raise sparse.max_requests"
        )

    def hot_page(self, slot: int, page: int) -> int:
        """Return the page id, in the hot region, of logical page `page` while it is in the ring."""
        each = self.shape.rows_per_request // self._page_rows
        return (slot + 1) * each - self._ring_pages + page % self._ring_pages

    # ------------------------------------------------------------------ verbs

    def admit(self, slot: int, pages: PageIdArray, rows: int, *, shared_pages: int = 0) -> Request:
        """Put a request into a free slot. Raises CapacityError, ConflictError, InvalidInputError; then nothing has changed."""
        if not 0 <= slot < self.max_requests:
            raise CapacityError(
                f"request slot {slot} does not exist: the hot buffer was made for {self.max_requests} requests "
                "(sparse.max_requests)"
            )
        if slot in self._requests:
            raise ConflictError(f"request slot {slot} is in use; release it first")
        self._check_rows(slot, rows)
        self._check_pages(slot, pages)
        needed, complete = -(-rows // self._page_rows), rows // self._page_rows
        if len(pages) < needed:
            raise InvalidInputError(
                f"request slot {slot}: {rows} rows lie in {needed} host pages, the page table names {len(pages)}"
            )
        if not 0 <= shared_pages <= complete:
            raise InvalidInputError(
                f"request slot {slot}: {shared_pages} host pages are said to be shared, but only {complete} are complete with "
                f"{rows} rows, and steps write the others"
            )
        request = self._requests[slot] = Request(slot, rows, complete * self._page_rows, pages, shared_pages)
        return request

    def extend(self, slot: int, pages: PageIdArray) -> Request:
        """Give a request a longer page table, which begins with the pages that it has."""
        request = self.get(slot)
        self._check_pages(slot, pages)
        held = len(request.pages)
        if not np.array_equal(pages[:held], request.pages):
            raise InvalidInputError(
                f"request slot {slot}: the new page table of {len(pages)} pages must begin with the {held} that it has"
            )
        request.pages = pages
        return request

    def begin_step(self, entries: Sequence[tuple[int, int]]) -> StepPlan:
        """Decide a step of (slot, rows after). Raises InvalidInputError, NotFoundError, ConflictError; then nothing has changed."""
        if self._step is not None:
            raise ConflictError("a step is under way already; call end_step first")
        slots = tuple(slot for slot, _ in entries)
        if len(set(slots)) != len(slots):
            raise InvalidInputError(f"a request may be in a step once, got request slots {list(slots)}")
        places = np.full(len(entries), -1, dtype=np.int32)
        overwritten, completed = [], []
        for number, (slot, rows) in enumerate(entries):
            request = self.get(slot)
            if rows not in {request.rows, request.rows + 1}:
                raise InvalidInputError(
                    f"request slot {slot} has {request.rows} rows; after one step it has as many or one more, got {rows}"
                )
            self._check_rows(slot, rows)
            if rows == request.rows:
                continue
            page, place = divmod(rows - 1, self._page_rows)
            places[number] = self.hot_page(slot, page) * self._page_rows + place
            earlier = page - self._ring_pages
            if place == 0 and earlier * self._page_rows >= request.ring_begin:
                overwritten.append(self._place(request, earlier))
            if rows % self._page_rows == 0:
                completed.append(self._written(request, page))
        self._step = StepPlan(slots, places, tuple(overwritten), tuple(completed))
        for slot, rows in entries:
            self._requests[slot].rows = rows
        return self._step

    def end_step(self) -> StepPlan:
        """End the step. Raises ConflictError when none is under way."""
        step, self._step = self._step, None
        if step is None:
            raise ConflictError("no step is under way; call begin_step first")
        return step

    def partial_page(self, slot: int) -> PagePlace | None:
        """Return the page that a request is filling; None when its rows end with a page. Raises as `begin_step` does."""
        request = self.get(slot)
        page, rows = divmod(request.rows, self._page_rows)
        return self._written(request, page) if rows else None

    def release(self, slot: int) -> Request:
        """Take a request out of its slot. Raises NotFoundError, and ConflictError while a step is under way with it."""
        self.get(slot)
        if self._step is not None and slot in self._step.slots:
            raise ConflictError(f"request slot {slot} is in the step under way; call end_step first")
        return self._requests.pop(slot)

    # ------------------------------------------------------------------ inside

    def _place(self, request: Request, page: int) -> PagePlace:
        return PagePlace(request.slot, page, self.hot_page(request.slot, page), int(request.pages[page]))

    def _written(self, request: Request, page: int) -> PagePlace:
        """Return the place of a page that goes to the host. Raises IntegrityError for a shared page, InvalidInputError for none."""
        if page >= len(request.pages):
            raise InvalidInputError(
                f"request slot {request.slot}: logical page {page} is to be written to the host, but its page table names only "
                f"{len(request.pages)} pages; extend the request first"
            )
        if page < request.shared_pages:
            raise IntegrityError(
                f"request slot {request.slot}: logical page {page} was to be written to host page {request.pages[page]}, which "
                f"other requests read too ({request.shared_pages} pages are shared)"
            )
        return self._place(request, page)

    def _check_rows(self, slot: int, rows: int) -> None:
        if not 0 <= rows <= self.shape.max_rows:
            raise InvalidInputError(
                f"request slot {slot}: {rows} rows, the hot buffer's tables hold {self.shape.max_rows} (sparse.max_tokens)"
            )

    def _check_pages(self, slot: int, pages: PageIdArray) -> None:
        if pages.dtype != np.int32 or pages.ndim != 1:
            raise InvalidInputError(
                f"request slot {slot}: host page ids are a one-dimensional int32 array, got {pages.dtype} of shape {pages.shape}"
            )
        if len(pages) > self.shape.max_pages:
            raise InvalidInputError(
                f"request slot {slot}: {len(pages)} host pages, the hot buffer's tables hold {self.shape.max_pages} "
                "(sparse.max_tokens)"
            )
        if len(np.unique(pages)) != len(pages) or (len(pages) and int(pages.min()) < 0):
            raise InvalidInputError(f"request slot {slot}: host page ids must be distinct and not negative")
