"""From a request to a ticket: reserve both ends of the best pair, or leave nothing behind.

Owns: the order of reservations, their undoing, the memory of paired rooms. Must not know: HTTP, how pairs are ranked.

Prefill is reserved first. Until decode admits a room nobody has offered anything: giving a prefill reservation back is
one local step, and an offer never arrives before its room. The other way round decode grants a lease on its pages and
sends offers at once, so that taking it back needs the prefill side to answer Drained. What stays behind when bootstrap
dies half-way is a prefill room that ends by `timeouts.offer_s` of its daemon.

Each attempt at a room has its own generation, so that a late answer to an earlier one is recognised as stale.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ConflictError,
    DeadlineError,
    NotReadyError,
    PeerError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.ids import FrozenModel, Positive, Role, Uint64
from kvbridge.service.directory import Directory, Instance
from kvbridge.service.fit import Candidate, candidates, demand
from kvbridge.service.ports import AdmissionRequest, PairRequest, RoomReport, RoomState, Ticket, TicketEnd

log = structlog.get_logger(__name__)

RESERVATION_ORDER = (Role.PREFILL, Role.DECODE)
TRY_ANOTHER = (CapacityError, PeerError, DeadlineError)
"""Refusals that say something about one pair only; every other one is the request's own and ends the pairing."""

NOTHING_TO_CANCEL = frozenset({"", UnknownRoomError.code, StaleError.code})


class ReservePort(Protocol):
    """The doors of all daemons, by URL."""

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        """Reserve one end. Raises what the daemon raised, or PeerError when it cannot be reached."""

    async def report(self, url: str, room: int) -> RoomReport:
        """Return one end's report. Raises UnknownRoomError."""

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        """Give one end back. Raises UnknownRoomError, and StaleError when the room is there in another generation."""


@dataclass(frozen=True, slots=True)
class PairingLimits:
    """Deadlines in seconds, named as in the configuration, and bounds."""

    reserve_s: float
    cancel_s: float
    report_s: float
    pair_s: float
    ticket_s: float
    room_keep_s: float
    retry_after_s: float = 1.0
    attempts: int = 3
    max_rooms: int = 100_000


class EndReport(FrozenModel):
    """What one daemon says of a room, or why it could not be asked."""

    url: str
    report: RoomReport | None = None
    error_code: str = ""
    error: str = ""


class PairReport(FrozenModel):
    """A paired room, as its daemons see it now."""

    room: Uint64
    generation: Positive
    state: RoomState
    """The decode side's state, or the prefill side's when no decode daemon answers."""
    ticket: Ticket
    prefill: tuple[EndReport, ...]
    decode: tuple[EndReport, ...]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Which instance could not take a room, and what it said."""

    instance: str
    error: BridgeError


@dataclass(slots=True)
class _Pairing:
    """A room that bootstrap remembers. `ticket` is None while its ends are being reserved."""

    generation: int
    created_s: float
    ticket: Ticket | None = None
    cancelled: bool = False

    @property
    def in_use(self) -> bool:
        return not self.cancelled


class PairingService:
    """Pairs requests, and remembers the rooms for `room_keep_s`."""

    def __init__(
        self, directory: Directory, port: ReservePort, *, limits: PairingLimits, clock: Clock = monotonic
    ) -> None:
        self._directory = directory
        self._port = port
        self._limits = limits
        self._clock = clock
        self._rooms: OrderedDict[int, _Pairing] = OrderedDict()

    def __repr__(self) -> str:
        pending = sum(1 for pairing in self._rooms.values() if pairing.ticket is None)
        return f"PairingService({len(self._rooms)} rooms remembered, {pending} being paired)"

    async def pair(self, request: PairRequest) -> Ticket:
        """Return a ticket for a request that is now reserved on both ends, or raise with nothing reserved.

        Raises ConflictError when the room is in use, CapacityError (NotReadyError) when nobody can take it now,
        FingerprintMismatchError, InvalidInputError, DeadlineError when `timeouts.pair_s` is over.
        """
        self.sweep()
        room = self._draw() if request.room is None else request.room
        pairing = self._begin(room)
        try:
            async with asyncio.timeout(self._limits.pair_s):
                pairing.ticket = await self._try_candidates(room, pairing, request)
        except TimeoutError as error:
            raise DeadlineError(
                f"room {room}: no pair was reserved within {self._limits.pair_s:g} s (timeouts.pair_s)"
            ) from error
        finally:
            if pairing.ticket is None:
                pairing.cancelled = True  # the room's generation is remembered, its id may be used again
        return pairing.ticket

    async def report(self, room: int) -> PairReport:
        """Ask both ends. Raises UnknownRoomError for a room that was not paired here or is forgotten."""
        ticket = self._ticket(room)
        prefill, decode = await asyncio.gather(
            self._ask(ticket, ticket.prefill.http_urls), self._ask(ticket, ticket.decode.http_urls)
        )
        return _pair_report(ticket, prefill, decode)

    async def cancel(self, room: int, reason: str) -> PairReport:
        """Abort a room on both ends, decode first: it holds the lease. Raises UnknownRoomError as `report` does."""
        ticket = self._ticket(room)
        decode = await self._tell(ticket, ticket.decode.http_urls, reason)
        prefill = await self._tell(ticket, ticket.prefill.http_urls, reason)
        if all(end.error_code in NOTHING_TO_CANCEL for end in (*prefill, *decode)):
            self._rooms[room].cancelled = True
        return _pair_report(ticket, prefill, decode)

    def sweep(self) -> int:
        """Forget rooms older than `room_keep_s`, and the oldest beyond `max_rooms`; return how many."""
        now_s = self._clock()
        before = len(self._rooms)
        while self._rooms:
            room, oldest = next(iter(self._rooms.items()))
            if oldest.created_s + self._limits.room_keep_s > now_s and len(self._rooms) <= self._limits.max_rooms:
                break
            del self._rooms[room]
        return before - len(self._rooms)

    def counts(self) -> dict[str, int]:
        """Return how many rooms are remembered, by what became of them."""
        pending = sum(1 for pairing in self._rooms.values() if pairing.ticket is None and not pairing.cancelled)
        cancelled = sum(1 for pairing in self._rooms.values() if pairing.cancelled)
        return {"pairing": pending, "paired": len(self._rooms) - pending - cancelled, "cancelled": cancelled}

    # ------------------------------------------------------------------------------------- rooms

    def _draw(self) -> int:
        while (room := secrets.randbits(64)) in self._rooms:
            pass
        return room

    def _begin(self, room: int) -> _Pairing:
        known = self._rooms.get(room)
        if known is not None and known.in_use:
            raise ConflictError(
                f"room {room} is in use (paired {self._clock() - known.created_s:.0f} s ago): "
                "draw another id, or cancel it first"
            )
        pairing = _Pairing(generation=known.generation if known else 0, created_s=self._clock())
        self._rooms[room] = pairing
        self._rooms.move_to_end(room)
        return pairing

    def _ticket(self, room: int) -> Ticket:
        self.sweep()
        pairing = self._rooms.get(room)
        if pairing is None or pairing.ticket is None:
            raise UnknownRoomError(
                f"room {room} was not paired here, or is forgotten: rooms are remembered for "
                f"{self._limits.room_keep_s:g} s (timeouts.room_keep_s)"
            )
        return pairing.ticket

    # ------------------------------------------------------------------------------- reservations

    async def _try_candidates(self, room: int, pairing: _Pairing, request: PairRequest) -> Ticket:
        ranked = candidates(self._directory.instances(), request, retry_after_s=self._limits.retry_after_s)
        refusals: list[_Refusal] = []
        for candidate in ranked:
            if {candidate.prefill.name, candidate.decode.name} & {refusal.instance for refusal in refusals}:
                continue
            pairing.generation += 1
            refusal = await self._reserve(room, pairing.generation, candidate, request)
            if refusal is None:
                return self._issue(room, pairing.generation, candidate, request)
            log.warning("reservation refused", room=room, instance=refusal.instance, error=str(refusal.error))
            refusals.append(refusal)
            if len(refusals) == self._limits.attempts:
                break
        raise self._nobody(room, refusals)

    def _nobody(self, room: int, refusals: list[_Refusal]) -> CapacityError:
        """Full beats unreachable: the caller is told to come back, and every cause is named."""
        full = [refusal.error for refusal in refusals if isinstance(refusal.error, CapacityError)]
        kind = CapacityError if any(error.code == CapacityError.code for error in full) else NotReadyError
        causes = "; ".join(f"'{refusal.instance}': {refusal.error}" for refusal in refusals)
        return kind(
            f"room {room}: no pair could be reserved: {causes}",
            retry_after_s=max((error.retry_after_s for error in full), default=self._limits.retry_after_s),
        )

    async def _reserve(self, room: int, generation: int, candidate: Candidate, request: PairRequest) -> _Refusal | None:
        """Admit on every node of both instances, or on none; return who refused for reasons of its own."""
        asked: list[str] = []
        reserved = False
        try:
            for role in RESERVATION_ORDER:
                instance = candidate.prefill if role is Role.PREFILL else candidate.decode
                admission = _admission(room, generation, candidate, request, role)
                for url in instance.http_urls:
                    # Noted before the answer: a daemon that answers too late may have admitted all the same.
                    asked.append(url)
                    try:
                        await self._admit(url, admission)
                    except TRY_ANOTHER as error:
                        return _Refusal(instance.name, error)
            reserved = True
        finally:
            if not reserved:
                await self._give_back(room, generation, asked)
        return None

    async def _admit(self, url: str, admission: AdmissionRequest) -> None:
        try:
            async with asyncio.timeout(self._limits.reserve_s):
                await self._port.admit(url, admission)
        except TimeoutError as error:
            raise DeadlineError(
                f"{url} did not answer within {self._limits.reserve_s:g} s (timeouts.reserve_s)"
            ) from error

    async def _give_back(self, room: int, generation: int, urls: list[str]) -> None:
        """Cancel what may have been reserved, even while this task itself is being cancelled."""
        reason = "the other end could not be reserved"
        undo = asyncio.gather(*(self._cancel(url, room, generation, reason) for url in urls))
        try:
            await asyncio.shield(undo)
        except asyncio.CancelledError:
            await undo  # bounded by cancel_s; a reservation must not outlive its pairing
            raise

    async def _cancel(self, url: str, room: int, generation: int, reason: str) -> EndReport:
        """Cancel this generation on one daemon; that it has no such room, or a later one, is as good."""
        call = partial(self._port.cancel, url, room, reason, generation=generation)
        end = await _end(url, call, self._limits.cancel_s, "timeouts.cancel_s")
        if end.error_code not in NOTHING_TO_CANCEL:
            log.warning("reservation could not be given back", room=room, url=url, error=end.error)
        return end

    def _issue(self, room: int, generation: int, candidate: Candidate, request: PairRequest) -> Ticket:
        for instance in (candidate.prefill, candidate.decode):
            self._directory.charge(instance.name, demand(instance, request))
        return Ticket(
            room=room,
            generation=generation,
            prefill=_end_of(candidate.prefill),
            decode=_end_of(candidate.decode),
            expires_in_s=self._limits.ticket_s,
        )

    async def _ask(self, ticket: Ticket, urls: tuple[str, ...]) -> tuple[EndReport, ...]:
        limit_s = self._limits.report_s
        calls = (_end(url, partial(self._port.report, url, ticket.room), limit_s, "timeouts.report_s") for url in urls)
        return tuple(await asyncio.gather(*calls))

    async def _tell(self, ticket: Ticket, urls: tuple[str, ...], reason: str) -> tuple[EndReport, ...]:
        calls = (self._cancel(url, ticket.room, ticket.generation, reason) for url in urls)
        return tuple(await asyncio.gather(*calls))


async def _end(url: str, call: Callable[[], Awaitable[RoomReport]], limit_s: float, limit: str) -> EndReport:
    """Make one call within its limit; what goes wrong becomes part of the report."""
    try:
        async with asyncio.timeout(limit_s):
            return EndReport(url=url, report=await call())
    except TimeoutError:
        text = f"{url} did not answer within {limit_s:g} s ({limit})"
        return EndReport(url=url, error_code=DeadlineError.code, error=text)
    except BridgeError as error:
        return EndReport(url=url, error_code=error.code, error=str(error))


def _admission(room: int, generation: int, candidate: Candidate, request: PairRequest, role: Role) -> AdmissionRequest:
    """Return what one side is asked to reserve; only decode learns of the writers and of what it already holds."""
    decode = role is Role.DECODE
    return AdmissionRequest(
        room=room,
        generation=generation,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=request.max_new_tokens if decode else 0,
        prefix_tokens=request.prefix_tokens if decode else 0,
        prefill=candidate.controls if decode else (),
        client=request.client,
    )


def _end_of(instance: Instance) -> TicketEnd:
    return TicketEnd(instance=instance.name, http_urls=instance.http_urls)


def _pair_report(ticket: Ticket, prefill: tuple[EndReport, ...], decode: tuple[EndReport, ...]) -> PairReport:
    answered = [end.report for end in (*decode, *prefill) if end.report is not None]
    state = answered[0].state if answered else RoomState.ADMITTED
    return PairReport(
        room=ticket.room, generation=ticket.generation, state=state, ticket=ticket, prefill=prefill, decode=decode
    )
