"""What the daemons of a room are asked: to reserve one end, to report on it, to give it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

import structlog

from kvbridge.api.directory import EndReport, PairReport, Ticket
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.limits import BootstrapTimeouts
from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, DeadlineError, PeerError, StaleError, UnknownRoomError
from kvbridge.core.ids import Role
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.context import TRACE
from kvbridge.telemetry.facts import EndReserved
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)

NOTHING_TO_CANCEL = frozenset({"", UnknownRoomError.code, StaleError.code})


class ReservePort(Protocol):
    """The endpoints of all daemons, by URL."""

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        """Reserve one end. Raises what the daemon raised, or PeerError when it cannot be reached."""

    async def report(self, url: str, room: int) -> RoomReport:
        """Return one end's report. Raises UnknownRoomError."""

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        """Give one end back. Raises UnknownRoomError, and StaleError when the room is there in another generation."""


def pair_report(ticket: Ticket, prefill: tuple[EndReport, ...], decode: tuple[EndReport, ...]) -> PairReport:
    """Return what the ends of a room's ticket say as one."""
    answered = [end.report for end in (*decode, *prefill) if end.report is not None]
    state = answered[0].state if answered else RoomState.ADMITTED
    return PairReport(
        room=ticket.room, generation=ticket.generation, state=state, ticket=ticket, prefill=prefill, decode=decode
    )


class RoomEnds:
    """The ends of rooms at the daemons, by URL."""

    def __init__(self, port: ReservePort, timeouts: BootstrapTimeouts, events: EventStream, clock: Clock) -> None:
        self._port = port
        self._timeouts = timeouts
        self._events = events
        self._clock = clock

    async def admit(self, url: str, admission: AdmissionRequest) -> RoomReport:
        """Reserve one end. Raises what the daemon raised, DeadlineError, PeerError for another daemon's answer."""
        above, asked_s, code = TRACE.get(), self._clock(), "cancelled"
        trace = above.part(f"reserve {url} {admission.generation}") if above is not None else None
        bound = TRACE.set(trace)
        try:
            report = await self._admit(url, admission)
            code = ""
        except BridgeError as error:
            code = error.code
            raise
        else:
            return report
        finally:
            TRACE.reset(bound)
            self._events.emit(
                EndReserved(
                    room=admission.room or 0,
                    generation=admission.generation,
                    role=_role(admission).value,
                    url=url,
                    seconds=self._clock() - asked_s,
                    code=code,
                    trace=trace,
                )
            )

    async def _admit(self, url: str, admission: AdmissionRequest) -> RoomReport:
        try:
            async with asyncio.timeout(self._timeouts.reserve_s + admission.wait_s):
                report = await self._port.admit(url, admission)
        except TimeoutError as error:
            waited = f" after its wait of {admission.wait_s:g} s" if admission.wait_s else ""
            raise DeadlineError(
                f"{url} did not answer within {self._timeouts.reserve_s:g} s{waited} (timeouts.reserve_s)"
            ) from error
        wanted = (admission.room, admission.generation, _role(admission))
        if (report.room, report.generation, report.role) != wanted:
            raise PeerError(
                f"{url} has admitted room {report.room} generation {report.generation} as {report.role}, asked for "
                f"{wanted[0]} generation {wanted[1]} as {wanted[2]}: is http.advertise_url another daemon's?"
            )
        return report

    async def report(self, urls: Iterable[str], room: int) -> tuple[EndReport, ...]:
        """Ask about a room on every daemon at once; what goes wrong is part of the answer."""
        limit_s = self._timeouts.reserve_s
        calls = (_end(url, partial(self._port.report, url, room), limit_s) for url in urls)
        return tuple(await asyncio.gather(*calls))

    async def cancel(self, urls: Iterable[str], room: int, generation: int, reason: str) -> tuple[EndReport, ...]:
        """Give this generation of a room back; that a daemon has no such room, or a later one, is as good."""
        limit_s = self._timeouts.reserve_s
        calls = (
            _end(url, partial(self._port.cancel, url, room, reason, generation=generation), limit_s) for url in urls
        )
        ends = await asyncio.gather(*calls)
        for end in ends:
            if end.error_code not in NOTHING_TO_CANCEL:
                log.warning("reservation_not_given_back", room=room, url=end.url, error=end.error)
        return tuple(ends)


def _role(admission: AdmissionRequest) -> Role:
    return Role.DECODE if admission.prefill else Role.PREFILL


async def _end(url: str, call: Callable[[], Awaitable[RoomReport]], limit_s: float) -> EndReport:
    """Make one call within its limit; what goes wrong becomes part of the report."""
    try:
        async with asyncio.timeout(limit_s):
            return EndReport(url=url, report=await call())
    except TimeoutError:
        text = f"{url} did not answer within {limit_s:g} s (timeouts.reserve_s)"
        return EndReport(url=url, error_code=DeadlineError.code, error=text)
    except BridgeError as error:
        return EndReport(url=url, error_code=error.code, error=str(error))
