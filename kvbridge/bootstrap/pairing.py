"""From a request to a ticket: reserve both ends of the best pair, or leave nothing behind.

Prefill is reserved first. Until decode admits a room nobody has offered anything: giving a prefill reservation back is
one local step, and an offer never arrives before its room. The other way round decode grants a lease on its pages and
sends offers at once, so that taking it back needs the prefill side to answer Drained. When bootstrap dies half-way, a prefill room
stays behind that ends with its ticket (`timeouts.ticket_s`), and a claim on the room's id that another replica
may take over when pairing cannot be under way any more.

Each attempt at a room has its own generation, so that a late answer to an earlier one is recognised as stale. The store hands
generations out, so that they only rise whichever replica pairs the room. A ticket counts once it is in the store: a pairing that
cannot keep its ticket gives both ends back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from kvbridge.api.client import DaemonClient
from kvbridge.api.directory import EndReport, PairReport, PairRequest, Ticket
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.fit import Candidate, Looks
from kvbridge.bootstrap.prefixes import noted_keys
from kvbridge.bootstrap.stores.base import Claim, Store
from kvbridge.config.limits import BootstrapTimeouts
from kvbridge.config.services import PairingConfig
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ClientLimitError,
    ConflictError,
    DeadlineError,
    IntegrityError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.context import TRACE
from kvbridge.telemetry.facts import EndReserved, PairingEnded
from kvbridge.telemetry.stream import EventStream
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

TRY_ANOTHER = (CapacityError, PeerError, DeadlineError)
"""Refusals that say something about one pair only; every other one is the request's own and ends the pairing."""
NOTHING_TO_CANCEL = frozenset({"", UnknownRoomError.code, StaleError.code})
DRAWS = 8
"""Random room ids that may be in use, one after another, before something is wrong."""
PAIRED, CANCELLED = "paired", "cancelled"
"""How a request for a pair ended, when not by an error: its caller may have left."""
RETRY_AFTER_S = 1.0
"""When a refused caller is told to come back, where no daemon says."""


@dataclass(slots=True)
class _Attempt:
    """One pairing under way."""

    claim: Claim
    request: PairRequest
    keys: Keys
    generation: int
    """The last one that was used; the claim's base before the first attempt."""
    wait_until_s: float = 0.0
    """Until then the room may wait for pages; in the past while it may not."""
    use_until_s: float = 0.0
    """When the ticket runs out."""

    @property
    def room(self) -> int:
        return self.claim.room


class PairingService:
    """Pairs requests, and finds paired rooms again. Holds nothing itself but what it is doing just now."""

    def __init__(
        self,
        directory: Directory,
        rooms: Store,
        daemons: DaemonClient,
        *,
        config: PairingConfig,
        timeouts: BootstrapTimeouts,
        clock: Clock = monotonic,
    ) -> None:
        self.events = EventStream(clock)
        """Facts about requests: each end that is asked for, and how each request was answered."""
        self._clock = clock
        self._directory = directory
        self._rooms = rooms
        self._looks = Looks(directory, rooms)
        self._ends = RoomEnds(daemons, timeouts, self.events, clock)
        self._config = config
        self._timeouts = timeouts
        self._under_way = 0
        self._waiting = 0
        """Those under way that only wait for pages."""

    async def pair(self, request: PairRequest, may_name: Namespaces = ANY_NAMESPACE) -> Ticket:
        """Return a ticket for a request that is now reserved on both ends, or raise with nothing reserved.

        `may_name`: the namespaces of the caller; raises NamespaceError for another one. Raises ConflictError when the room is in
        use, CapacityError (NotReadyError, ClientLimitError) when nobody can take it now, or within its `wait_s`, or the store is
        away, FingerprintMismatchError, InvalidInputError, DeadlineError when `timeouts.pair_s` is over. CapacityError at once while
        `max_under_way` others are being paired: asked for more than this process can do, all of them would take longer and longer,
        and in the end none would be paired in time.
        """
        begun_s, outcome, ticket = self._clock(), CANCELLED, None
        try:
            may_name.require(request.namespace, keyed=bool(request.page_hashes))
            self._check_limits(request)
            self._under_way += 1
            try:
                ticket = await self._pair(request)
            finally:
                self._under_way -= 1
            outcome = PAIRED
        except BridgeError as error:
            outcome = error.code
            raise
        else:
            return ticket
        finally:
            self.events.emit(
                PairingEnded(
                    room=ticket.room if ticket is not None else None,
                    generation=ticket.generation if ticket is not None else 0,
                    seconds=self._clock() - begun_s,
                    outcome=outcome,
                    trace=TRACE.get(),
                )
            )

    def _check_limits(self, request: PairRequest) -> None:
        if request.wait_s > self._config.max_wait_s:
            raise InvalidInputError(
                f"wait_s is {request.wait_s:g} s, at most {self._config.max_wait_s:g} s are served (pairing.max_wait_s)"
            )
        busy = self._under_way - self._waiting
        if busy >= self._config.max_under_way:
            raise CapacityError(f"{busy} requests are being paired already (pairing.max_under_way)")

    async def _pair(self, request: PairRequest) -> Ticket:
        wait_until_s = self._clock() + request.wait_s
        claim = await self._claim(request.room, rounds=2 if request.wait_s else 1)
        attempt = _Attempt(claim, request, Keys(request.page_hashes), claim.base)
        kept = False
        try:
            try:
                ticket = await self._in_time(attempt)
            except CapacityError as error:
                if error.code != CapacityError.code or not request.wait_s or self._waiting >= self._config.max_waiting:
                    raise
                attempt.wait_until_s = wait_until_s
                self._waiting += 1
                try:
                    ticket = await self._in_time(attempt)
                finally:
                    self._waiting -= 1
            kept = True
        finally:
            if not kept:
                await _finish(self._give_up(attempt))
        return ticket

    async def _in_time(self, attempt: _Attempt) -> Ticket:
        """Try candidates for as long as they may take besides what they wait for pages. Raises DeadlineError."""
        try:
            async with asyncio.timeout(self._timeouts.pair_s + self._wait_left_s(attempt)):
                return await self._try_candidates(attempt)
        except TimeoutError as error:
            raise DeadlineError(
                f"room {attempt.room}: no pair was reserved within {self._timeouts.pair_s:g} s (timeouts.pair_s)"
            ) from error

    async def report(self, room: int) -> PairReport:
        """Ask both ends. Raises UnknownRoomError for a room that was not paired or is forgotten."""
        ticket = await self._ticket(room)
        prefill, decode = await asyncio.gather(
            self._ends.report(ticket.prefill.http_urls, room), self._ends.report(ticket.decode.http_urls, room)
        )
        return _pair_report(ticket, prefill, decode)

    async def cancel(self, room: int, reason: str) -> PairReport:
        """Abort a room on both ends, decode first: it holds the lease. Raises UnknownRoomError as `report` does."""
        ticket = await self._ticket(room)
        decode = await self._ends.cancel(ticket.decode.http_urls, room, ticket.generation, reason)
        prefill = await self._ends.cancel(ticket.prefill.http_urls, room, ticket.generation, reason)
        if all(end.error_code in NOTHING_TO_CANCEL for end in (*prefill, *decode)):
            await self._rooms.cancelled(room, ticket.generation)
        return _pair_report(ticket, prefill, decode)

    # ------------------------------------------------------------------------------------- rooms

    async def _claim(self, wanted: int | None, *, rounds: int) -> Claim:
        """`rounds`: how often candidates may be tried, each with generations of its own."""
        for _ in range(DRAWS):
            room = secrets.randbits(ROOM_BITS) if wanted is None else wanted
            claim = await self._rooms.claim(room, generations=rounds * self._config.attempts)
            if isinstance(claim, Claim):
                return claim
            if wanted is not None:
                raise ConflictError(
                    f"room {room} is in use (paired {claim.age_s:.0f} s ago): draw another id, or cancel it first"
                )
        raise IntegrityError(f"{DRAWS} random room ids in a row were in use")

    async def _give_up(self, attempt: _Attempt) -> None:
        try:
            await self._rooms.give_up(attempt.claim, attempt.generation)
        except BridgeError as error:
            # The caller is told why there is no ticket, which matters more; the claim ends by its age.
            log.warning("room_stays_claimed", room=attempt.room, code=error.code, reason=str(error))

    async def _ticket(self, room: int) -> Ticket:
        ticket = await self._rooms.ticket(room)
        if ticket is None:
            raise UnknownRoomError(
                f"room {room} was not paired here, or is forgotten: rooms are remembered for "
                f"{self._timeouts.room_keep_s:g} s (timeouts.room_keep_s)"
            )
        return ticket

    # ------------------------------------------------------------------------------- reservations

    async def _try_candidates(self, attempt: _Attempt) -> Ticket:
        """Try the best pair, then the best without those that refused; of pairs that look full, only one."""
        look = await self._looks.look(attempt.request, attempt.keys)
        refusals: dict[str, BridgeError] = {}
        """By instance."""
        looks_full = False
        while len(refusals) < self._config.attempts and not looks_full:
            candidate = look.ranking.best(without=refusals)
            if candidate is None:
                break
            outcome = await self._reserve(attempt, candidate, refusals)
            if outcome is not None:
                for fact in look.judged(outcome) if attempt.keys else ():
                    self.events.emit(fact)
                return outcome
            looks_full = candidate.looks_full
        raise self._nobody(attempt.room, refusals)

    def _nobody(self, room: int, refusals: dict[str, BridgeError]) -> CapacityError:
        """Full beats a client's limit beats unreachable: the caller is told to come back, and every cause is named."""
        limits = [error for error in refusals.values() if isinstance(error, CapacityError)]
        kinds = {type(error) for error in limits}
        kind = next((kind for kind in (CapacityError, ClientLimitError) if kind in kinds), NotReadyError)
        causes = "; ".join(f"'{instance}': {error}" for instance, error in refusals.items())
        return kind(
            f"room {room}: no pair could be reserved: {causes}",
            retry_after_s=max((error.retry_after_s for error in limits), default=RETRY_AFTER_S),
        )

    async def _reserve(
        self, attempt: _Attempt, candidate: Candidate, refusals: dict[str, BridgeError]
    ) -> Ticket | None:
        """Admit on every node of both instances, or on none. None: an instance has refused for reasons of its own.

        Each end is told what is left of the ticket, and enforces that itself.
        """
        attempt.generation += 1
        # One clock for both ends and the ticket; what waiting may take comes on top.
        attempt.use_until_s = self._clock() + self._wait_left_s(attempt) + self._timeouts.ticket_s
        # Before anybody is asked: others who are pairing meanwhile should see it, and the nodes' own heartbeats come after it.
        ends = (candidate.prefill, candidate.decode)
        await self._directory.charge((instance, candidate.demands[instance.name]) for instance in ends)
        asked: list[str] = []
        reports: list[RoomReport] = []
        kept = False
        try:
            for instance in ends:
                for url in instance.end.http_urls:
                    # Noted before the answer: a daemon that answers too late may have admitted all the same.
                    asked.append(url)
                    try:
                        reports.append(await self._ends.admit(url, self._admission(attempt, candidate, instance.role)))
                    except TRY_ANOTHER as error:
                        refusals[instance.name] = error
                        log.warning(
                            "reservation_refused", room=attempt.room, peer_instance=instance.name, reason=str(error)
                        )
                        return None
            ticket = Ticket(
                room=attempt.room,
                generation=attempt.generation,
                prefill=candidate.prefill.end,
                decode=candidate.decode.end,
                expires_in_s=self._ticket_left_s(attempt),
                prefix_tokens=min(report.prefix_tokens for report in reports if report.role is Role.DECODE),
                computed_tokens=min(report.computed_tokens for report in reports if report.role is Role.PREFILL),
            )
            kept = await self._rooms.settle(attempt.claim, ticket, noted_keys(attempt.keys, attempt.request.namespace))
        finally:
            if not kept:
                reason = "the other end could not be reserved"
                await _finish(self._ends.cancel(asked, attempt.room, attempt.generation, reason))
        if not kept:
            raise NotReadyError(
                f"room {attempt.room}: another pairing has taken the room, or the store has lost it; nothing is reserved"
            )
        return ticket

    def _ticket_left_s(self, attempt: _Attempt) -> float:
        """How long the ticket can still be used. Raises DeadlineError."""
        left_s = attempt.use_until_s - self._clock()
        if left_s <= 0:
            raise DeadlineError("its ticket had run out before both ends were reserved (timeouts.ticket_s)")
        return left_s

    def _wait_left_s(self, attempt: _Attempt) -> float:
        return max(0.0, attempt.wait_until_s - self._clock())

    def _admission(self, attempt: _Attempt, candidate: Candidate, role: Role) -> AdmissionRequest:
        """Return what one side is asked to reserve; only decode learns of the writers."""
        decode, request = role is Role.DECODE, attempt.request
        # An instance that says nothing of its model shares nothing; it may be of a release that does not know page keys.
        keyed = (candidate.decode if decode else candidate.prefill).first.model_identity is not None
        return AdmissionRequest(
            room=attempt.room,
            generation=attempt.generation,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens if decode else 0,
            prefill=candidate.controls if decode else (),
            client=request.client,
            wait_s=self._wait_left_s(attempt),
            begin_within_s=self._ticket_left_s(attempt),
            page_hashes=request.page_hashes if keyed else b"",
            namespace=request.namespace if keyed else "",
            retention=request.retention if keyed else None,
        )


async def _finish(work: Awaitable[object]) -> None:
    """Wait for what must not stay undone, even while this task itself is being cancelled; `work` is bounded."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class RoomEnds:
    """The ends of rooms at the daemons, by URL: they reserve, report and give back."""

    def __init__(self, daemons: DaemonClient, timeouts: BootstrapTimeouts, events: EventStream, clock: Clock) -> None:
        self._daemons = daemons
        self._limit_s = timeouts.reserve_s
        self._events = events
        self._clock = clock

    async def admit(self, url: str, admission: AdmissionRequest) -> RoomReport:
        """Reserve one end. Raises the daemon's error, DeadlineError, PeerError for another daemon's answer."""
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
            async with asyncio.timeout(self._limit_s + admission.wait_s):
                report = await self._daemons.admit(url, admission)
        except TimeoutError as error:
            waited = f" after its wait of {admission.wait_s:g} s" if admission.wait_s else ""
            raise DeadlineError(
                f"{url} did not answer within {self._limit_s:g} s{waited} (timeouts.reserve_s)"
            ) from error
        wanted = (admission.room, admission.generation, _role(admission))
        if (report.room, report.generation, report.role) != wanted:
            raise PeerError(
                f"{url} has admitted room {report.room} generation {report.generation} as {report.role}, asked for "
                f"{wanted[0]} generation {wanted[1]} as {wanted[2]}: is http.advertise_url another daemon's?"
            )
        return report

    async def report(self, urls: Iterable[str], room: int) -> tuple[EndReport, ...]:
        """Ask about a room on every daemon at once; errors are part of the answer."""
        return await self._all(urls, lambda url: self._daemons.report(url, room))

    async def cancel(self, urls: Iterable[str], room: int, generation: int, reason: str) -> tuple[EndReport, ...]:
        """Give this generation of a room back; that a daemon has no such room, or a later one, is as good."""
        ends = await self._all(urls, lambda url: self._daemons.cancel(url, room, reason, generation=generation))
        for end in ends:
            if end.error_code not in NOTHING_TO_CANCEL:
                log.warning("reservation_not_given_back", room=room, url=end.url, error=end.error)
        return ends

    async def _all(self, urls: Iterable[str], call: Callable[[str], Awaitable[RoomReport]]) -> tuple[EndReport, ...]:
        return tuple(await asyncio.gather(*(self._end(url, call) for url in urls)))

    async def _end(self, url: str, call: Callable[[str], Awaitable[RoomReport]]) -> EndReport:
        """Make one call within its limit; an error becomes part of the report."""
        try:
            async with asyncio.timeout(self._limit_s):
                return EndReport(url=url, report=await call(url))
        except TimeoutError:
            text = f"{url} did not answer within {self._limit_s:g} s (timeouts.reserve_s)"
            return EndReport(url=url, error_code=DeadlineError.code, error=text)
        except BridgeError as error:
            return EndReport(url=url, error_code=error.code, error=str(error))


def _role(admission: AdmissionRequest) -> Role:
    return Role.DECODE if admission.prefill else Role.PREFILL


def _pair_report(ticket: Ticket, prefill: tuple[EndReport, ...], decode: tuple[EndReport, ...]) -> PairReport:
    """Return the reports of both ends of a ticket's room as one."""
    answered = [end.report for end in (*decode, *prefill) if end.report is not None]
    state = answered[0].state if answered else RoomState.ADMITTED
    return PairReport(
        room=ticket.room, generation=ticket.generation, state=state, ticket=ticket, prefill=prefill, decode=decode
    )
