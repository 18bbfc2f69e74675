"""Admission: every request for a room, by HTTP or by an engine, is admitted, made to wait, or refused here.

A request that waits (`wait_s`) is looked at again whenever pages have become available: free, or cached and not read any more. It
waits for all pages that it can need; the cache is asked when its turn comes. While a request waits, one that does not wait gets
only pages that no waiting request needs. Open rooms come first: an engine that extends one takes pages past the queue, since it has
to go on to end.

A client's rooms count until their pages are back, and its waiting requests count with them: a request in the queue is never over
its client's cap when its turn comes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import structlog

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.api.status import AdmissionStatus, ClientStatus
from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.errors import BridgeError, CapacityError, ClientLimitError, InvalidInputError, NotReadyError
from kvbridge.core.ids import REQUEST_SPACES, IndexSpace
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces
from kvbridge.core.process import Clock, moment, monotonic
from kvbridge.node.admission_queue import AdmissionQueue, Waiting
from kvbridge.node.room import OVER_HTTP, AdmittingEngine
from kvbridge.node.rooms import Rooms
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook, PageState
from kvbridge.telemetry.context import TRACE
from kvbridge.telemetry.facts import EventStream, RequestAnswered, RequestRefused, RequestWaited

log = structlog.get_logger(__name__)

SHOWN_CLIENTS = 20
SHOWN_REASONS = 3
QUEUE_FULL, WAIT_TIMEOUT = "queue_full", "wait_timeout"
"""Codes of two refusals that are counted apart from the others with the code `capacity`."""
LEFT = "left"
"""Code of a request whose caller left before it was answered."""
WINDOW_S = 30.0
"""A release counts e times less after this time; after a minute it hardly counts."""
JITTER = 0.25
"""Callers that were refused together are told to come back spread over this part of the time."""


class ReleaseRate:
    """Releases a second, of which the latest count most. The first release only starts the measurement."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._at_s = 0.0
        self._weighted = 0.0

    def add(self, count: int, now_s: float) -> None:
        """Count things that have been released."""
        if self._begun_s is None:
            self._begun_s = now_s
        else:
            self._weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S) + count
        self._at_s = now_s

    def seconds_for(self, count: float, now_s: float) -> float:
        """Estimate how long `count` more take; 0 before the first measurement, so that the caller soon asks again."""
        if self._begun_s is None or now_s <= self._begun_s or not self._weighted:
            return 0.0
        measured_s = WINDOW_S * -math.expm1((self._begun_s - now_s) / WINDOW_S)
        weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S)
        return count * measured_s / weighted if weighted else math.inf


@dataclass(eq=False)
class _WaitingRequest(Waiting):
    """A waiting request, and where its answer goes."""

    request: AdmissionRequest
    outcome: asyncio.Future[RoomReport]
    context: Context
    """The context of the request: whoever frees the pages acts on behalf of another one."""


class AdmissionController:
    """Admits requests to the rooms of a node, and watches its page book. Called from the event loop's thread only."""

    def __init__(
        self,
        rooms: Rooms[Any],
        book: PageBook,
        *,
        limits: AdmissionConfig,
        events: EventStream,
        clock: Clock = monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` spreads Retry-After: it returns a number in [0, 1)."""
        self._rooms, self._book, self._limits = rooms, book, limits
        self._events, self._clock, self._draw = events, clock, draw
        self._in_use = rooms.book.in_use
        self._spaces = tuple(space for space in book.owned_spaces if space in REQUEST_SPACES)
        self._queue: AdmissionQueue[_WaitingRequest] = AdmissionQueue(
            max_waiting=limits.max_waiting, max_overtakes=limits.max_overtakes
        )
        self._page_rates: dict[IndexSpace, ReleaseRate] = {}
        self._room_rate = ReleaseRate()
        self._starved_since_s: float | None = None
        """Since when not even one page of each space was available; None while one is. An admission ends the shortage."""
        self.closed = ""
        """Why nobody is admitted any more; empty while requests are."""
        self._serving_soon = False
        book.watchers.append(self)

    # ------------------------------------------------------------------ admission

    async def admit(self, request: AdmissionRequest, may_name: Namespaces = ANY_NAMESPACE) -> RoomReport:
        """Admit at once or within `request.wait_s`. Nothing is kept of a request that is refused or whose caller is cancelled.

        `may_name`: the namespaces of the caller. Raises NamespaceError for another one, CapacityError when the request does not fit
        (in time), ClientLimitError, InvalidInputError, ConflictError, NotReadyError.
        """
        asked_s, code, report = self._clock(), LEFT, None
        try:
            with self._counting(request.client, QUEUE_FULL if request.wait_s else ""):
                may_name.require(request.namespace, keyed=bool(request.page_hashes))
                if self._rooms.store is not None and request.page_hashes:
                    self._check_caps(request.client)
                    await self._rooms.fetch(request)
                waiter = self._admit_or_wait(request) if request.wait_s else self._admit_at_once(request)
            report = waiter if isinstance(waiter, RoomReport) else await self._turn_of(waiter)
            code = ""
        except BridgeError as error:
            code = error.code
            raise
        else:
            return report
        finally:
            self._events.emit(
                RequestAnswered(
                    room=report.room if report is not None else request.room or 0,
                    generation=request.generation,
                    seconds=self._clock() - asked_s,
                    code=code,
                    trace=TRACE.get(),
                )
            )

    def admit_now(self, request: AdmissionRequest, *, engine: AdmittingEngine = OVER_HTTP) -> RoomReport:
        """Admit or refuse at once, and never before a request that waits for the same pages. Raises as `admit` does.

        `engine`: the one that admits the room itself, if one does.
        """
        with self._counting(request.client):
            return self._admit_at_once(request, engine)

    @contextmanager
    def _counting(self, client: str, kind: str = "") -> Iterator[None]:
        """Count a refusal. `kind`: counted in place of the code `capacity`."""
        try:
            yield
        except BridgeError as error:
            self._refused(client, error, kind if error.code == CapacityError.code else "")
            raise

    def _admit_at_once(self, request: AdmissionRequest, engine: AdmittingEngine = OVER_HTTP) -> RoomReport:
        self._check_caps(request.client)
        if self._queue:
            self._check_unclaimed(request)
        return self._admitted(request, engine)

    def _admit_or_wait(self, request: AdmissionRequest) -> RoomReport | _WaitingRequest:
        client = request.client
        if request.wait_s > self._limits.max_wait_s:
            raise InvalidInputError(
                f"wait_s is {request.wait_s:g} s, at most {self._limits.max_wait_s:g} s are served (admission.max_wait_s)"
            )
        self._check_caps(client)
        if not self._queue:
            try:
                return self._admitted(request)
            except CapacityError:  # `join` refuses a request that no wait would help
                log.debug("admission_waits", client=client, wait_s=request.wait_s)
        most, key = self._cap(client, "max_waiting")
        waiting = self._queue.waiting_of(client)
        if most and waiting >= most:
            raise self._over_cap(client, f"{waiting} waiting requests", key, most)
        outcome: asyncio.Future[RoomReport] = asyncio.get_running_loop().create_future()
        demand = self._rooms.demand(request)
        waiter = _WaitingRequest(client, demand, self._clock(), request, outcome, copy_context())
        self._queue.join(waiter, self._book.available_pages())
        return waiter

    async def _turn_of(self, waiter: _WaitingRequest) -> RoomReport:
        outcome, request = waiter.outcome, waiter.request
        try:
            self._serve()
            await asyncio.wait({outcome}, timeout=request.wait_s)
        except asyncio.CancelledError:  # nobody is there to be told any more: the reservation goes back
            if not outcome.done():
                self._leave(waiter, "left")
            elif outcome.exception() is None:
                await self._rooms.cancel(outcome.result().room, "its client left before it was told")
            raise
        if not outcome.done():
            self._leave(waiter, "timeout")
            late = self._not_in_time(waiter)
            self._refused(request.client, late, WAIT_TIMEOUT)
            raise late
        return outcome.result()

    def _admitted(self, request: AdmissionRequest, engine: AdmittingEngine = OVER_HTTP) -> RoomReport:
        if self._rooms_left() <= 0:
            raise self._too_many_rooms(0.0)
        report = self._rooms.admit(request, engine=engine)
        self._starved_since_s = None
        return report

    def _rooms_left(self) -> int:
        return self._limits.max_rooms - sum(self._in_use.values())

    def _serve(self) -> None:
        """Admit the requests whose turn it is, as long as one fits."""
        self._serving_soon = False
        while not self._rooms.workers.missing():
            waiter = self._queue.next(self._book.available_pages(), self._in_use, rooms_left=self._rooms_left())
            if waiter is None:
                return
            self._queue.granted(waiter)
            try:
                waiter.outcome.set_result(waiter.context.run(self._admitted, waiter.request))
                self._waited(waiter, "admitted")
            except BridgeError as error:  # such as its room id, which another request has used meanwhile
                self._refused(waiter.client, error)
                waiter.outcome.set_exception(error)
                self._waited(waiter, "refused")

    def _leave(self, waiter: _WaitingRequest, outcome: str) -> None:
        self._queue.leave(waiter)
        self._waited(waiter, outcome)
        self._serve()  # it may have held pages back from those behind it

    def _waited(self, waiter: _WaitingRequest, outcome: str) -> None:
        seconds = self._clock() - waiter.since_s
        self._events.emit(RequestWaited(outcome=outcome, seconds=seconds, client=waiter.client))

    # ------------------------------------------------------------------ refusals

    def _check_caps(self, client: str) -> None:
        """Raise NotReadyError once this node is closed, ClientLimitError when a client has as much as it may."""
        if self.closed:
            raise NotReadyError(f"this daemon admits nothing more: {self.closed}")
        most, key = self._cap(client, "max_rooms")
        if not most:
            return
        rooms, waiting = self._in_use.get(client, 0), self._queue.waiting_of(client)
        if rooms + waiting >= most:
            raise self._over_cap(client, f"{rooms} rooms and {waiting} waiting requests", key, most)

    def _cap(self, client: str, name: str) -> tuple[int, str]:
        """Return how much a client may have at once (0: no cap), and the configuration key that says so."""
        own: int | None = getattr(self._limits.clients.get(client), name, None)
        if own is not None:
            return own, f"admission.clients.{client}.{name}"
        return getattr(self._limits, f"client_{name}"), f"admission.client_{name}"

    def _over_cap(self, client: str, having: str, key: str, most: int) -> ClientLimitError:
        return ClientLimitError(
            f"client '{client}' has {having} on this daemon, as many as it may ({key} is {most}); a room counts until its pages "
            "are back",
            retry_after_s=self._room_ends_s(of=self._in_use.get(client, 0)),
        )

    def _too_many_rooms(self, waited_s: float) -> CapacityError:
        rooms = sum(self._in_use.values())
        waited = f", and none has ended within {waited_s:g} s (the request's wait_s)" if waited_s else ""
        return CapacityError(
            f"this daemon has {rooms} rooms, as many as it may (admission.max_rooms){waited}; a room counts until its pages are "
            "back",
            retry_after_s=self._room_ends_s(of=rooms),
        )

    def _check_unclaimed(self, request: AdmissionRequest) -> None:
        """Raise CapacityError unless a request fits without a room or a page that a waiting request needs."""
        left = self._rooms_left()
        if 0 < left <= len(self._queue):
            raise CapacityError(
                f"{len(self._queue)} requests wait for one of the {left} rooms that this daemon may still have "
                "(admission.max_rooms) before this one; send it with wait_s to wait too",
                retry_after_s=self._limits.retry_after_min_s,
            )
        lacking = self._queue.lacking(self._rooms.demand(request), self._book.available_pages())
        if lacking:
            raise CapacityError(
                f"{len(self._queue)} requests wait for pages of {', '.join(map(repr, map(str, lacking)))} before this "
                f"one; send it with wait_s to wait too",
                lacking=lacking,
            )

    def _not_in_time(self, waiter: _WaitingRequest) -> CapacityError:
        if self._rooms_left() <= 0:
            return self._too_many_rooms(waiter.request.wait_s)
        available = self._book.available_pages()
        wanted = ", ".join(
            f"{count} of '{space}' ({available.get(space, 0)} available)" for space, count in waiter.demand.items()
        )
        return CapacityError(
            f"the pages for {waiter.request.prompt_tokens} prompt tokens were not there within {waiter.request.wait_s:g} s "
            f"(limit: the request's wait_s, at most admission.max_wait_s): {wanted}",
            lacking=self._queue.lacking(waiter.demand, available),
        )

    def _refused(self, client: str, error: BridgeError, kind: str = "") -> None:
        """Count a refusal, and put its Retry-After into the error."""
        if isinstance(error, CapacityError):
            error.retry_after_s = self.retry_after_s(error)
        self._events.emit(RequestRefused(code=kind or error.code, client=client))

    # ------------------------------------------------------------------ when to come back

    def retry_after_s(self, error: CapacityError) -> float:
        """Return the Retry-After of a refusal: when the lacking pages may be available, else the error's own."""
        if not error.lacking:
            return error.retry_after_s
        now_s, soon, never = self._clock(), self._book.pages_being_released(), ReleaseRate()
        more = {space: max(0, count - soon.get(space, 0)) for space, count in error.lacking.items()}
        waits = (self._page_rates.get(space, never).seconds_for(count, now_s) for space, count in more.items())
        return self._spread(max(waits))

    def _room_ends_s(self, *, of: int) -> float:
        """Return the Retry-After of a client that waits for the end of the first of its `of` rooms."""
        rooms = sum(self._in_use.values())
        return self._spread(self._room_rate.seconds_for(rooms / max(1, of), self._clock()))

    def _spread(self, seconds: float) -> float:
        """Return the seconds or a little more, within the configured bounds."""
        least, most, spread = self._limits.retry_after_min_s, self._limits.retry_after_max_s, 1 + JITTER * self._draw()
        return min(most, max(least, min(seconds, most / (1 + JITTER))) * spread)

    # ------------------------------------------------------------------ the page book, time, and the end

    def freed(self, pages: Mapping[IndexSpace, int]) -> None:
        """Count pages that have become available. Waiting requests are served after the call that freed them, not inside it."""
        now_s = self._clock()
        for space, count in pages.items():
            if count:
                self._page_rates.setdefault(space, ReleaseRate()).add(count, now_s)
        if self._starved_since_s is not None:
            self._look()
        if self._queue and not self._serving_soon:
            self._serving_soon = True
            asyncio.get_running_loop().call_soon(self._serve)

    def gone(self, owner: Owner) -> None:
        """Count a room that has ended. The end of a copy between tiers makes no room for another request."""
        if owner.room != NO_ROOM:
            self._room_rate.add(1, self._clock())

    def tick(self) -> None:
        """Look at changes without an event: workers that are back, and how long nothing fits."""
        if self._queue:
            self._serve()
        self._look()

    def _look(self) -> None:
        available = self._book.available_pages()
        if all(available[space] for space in self._spaces):
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = self._clock()

    def close(self, reason: str) -> None:
        """Refuse all waiting and all later requests."""
        self.closed = reason
        for waiter in self._queue:
            self._queue.leave(waiter)
            self._waited(waiter, "refused")
            waiter.outcome.set_exception(NotReadyError(f"this daemon admits nothing more: {reason}"))

    # ------------------------------------------------------------------ for operators

    @property
    def starved_s(self) -> float:
        """How long not even one page of each space could be given out; 0 while one can."""
        return 0.0 if self._starved_since_s is None else self._clock() - self._starved_since_s

    def problem(self) -> str:
        """Say what has the pages, for `/ready`; empty unless the shortage has lasted for `admission.unready_after_s`."""
        if self._starved_since_s is None or self.starved_s < self._limits.unready_after_s:
            return ""
        available, reasons = self._book.available_pages(), list(self._book.quarantine_reasons())
        full = "; ".join(self._describe(space) for space in self._spaces if not available[space])
        more = f" and {len(reasons) - SHOWN_REASONS} more" if len(reasons) > SHOWN_REASONS else ""
        quarantined = f"; quarantined for: {'; '.join(reasons[:SHOWN_REASONS])}{more}" if reasons else ""
        return f"nothing could be admitted for {self.starved_s:.0f} s (limit: admission.unready_after_s): {full}{quarantined}"

    def _describe(self, space: IndexSpace) -> str:
        states = self._book.counts()[space]
        names = {state: str(state) for state in states if state is not PageState.FREE}
        names[PageState.CACHED] = "cached and read"
        used = ", ".join(f"{states[state]} {name}" for state, name in names.items() if states[state])
        return f"space '{space}' has no available page of {sum(states.values())} ({used})"

    def status(self) -> AdmissionStatus:
        """Return the queue and the clients, for `/status`."""
        return AdmissionStatus(
            waiting=len(self._queue),
            oldest_since=self._moment(self._queue.oldest_since_s()),
            starved_since=self._moment(self._starved_since_s),
            clients=self._clients(),
        )

    def _moment(self, since_s: float | None) -> float | None:
        return None if since_s is None else moment(self._clock() - since_s)

    def _clients(self) -> tuple[ClientStatus, ...]:
        in_use, waiting, none = self._in_use, self._queue.by_client(), (0, None)
        shown = sorted(
            in_use.keys() | waiting.keys(),
            key=lambda client: (-waiting.get(client, none)[0], -in_use.get(client, 0), client),
        )
        return tuple(
            ClientStatus(
                client=client,
                rooms=in_use.get(client, 0),
                waiting=waiting.get(client, none)[0],
                head_since=self._moment(waiting.get(client, none)[1]),
                max_rooms=self._cap(client, "max_rooms")[0],
                max_waiting=self._cap(client, "max_waiting")[0],
            )
            for client in shown[:SHOWN_CLIENTS]
        )
