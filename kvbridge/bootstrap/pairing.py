"""From a request to a ticket: reserve both ends of the best pair, or leave nothing behind.

Prefill is reserved first. Nobody has offered anything before decode admits the room, so giving a prefill reservation back is one
local step, and an offer never arrives before its room. A decode node leases its pages and sends offers at once; taking that back
would need the prefill side to answer Drained. When bootstrap dies half-way, two things stay behind: a prefill room that ends with
its ticket (`timeouts.ticket_s`), and a claim on the room's id that another replica may take over when the pairing must have ended.

Each attempt at a room has its own generation, so that a late answer to an earlier attempt is recognised as stale. The store hands
generations out; they rise whichever replica pairs the room. A ticket counts once it is in the store: a pairing that cannot keep its
ticket gives both ends back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from kvbridge.api.client import DaemonClient
from kvbridge.api.directory import EndReport, PairReport, PairRequest, Ticket
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.fit import Pair, noted_keys
from kvbridge.bootstrap.nodes import Instance
from kvbridge.bootstrap.store import Claim, Store
from kvbridge.config.limits import BootstrapTimeouts
from kvbridge.config.schema import PairingConfig
from kvbridge.core import errors
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.context import TRACE
from kvbridge.telemetry.facts import EndReserved, EventStream, PairingEnded
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

TRY_ANOTHER = (errors.CapacityError, errors.PeerError, errors.DeadlineError)
"""Refusals by one end; another pair may serve the request. Every other error is the request's own and ends the pairing."""
NOTHING_TO_CANCEL = frozenset({"", errors.UnknownRoomError.code, errors.StaleError.code})
DRAWS = 8
"""The most random room ids that are drawn when those before are in use."""
PAIRED, CANCELLED = "paired", "cancelled"
"""Outcomes of a request beside errors' codes; cancelled: the caller may have left."""
RETRY_AFTER_S = 1.0
"""A refused caller is told to come back after this, unless a daemon has said when."""


@dataclass(slots=True)
class _Attempt:
    """One pairing under way."""

    claim: Claim
    request: PairRequest
    generation: int
    """The last generation that was used; the claim's base before the first."""
    wait_until_s: float = 0.0
    """Until then the room may wait for pages."""
    use_until_s: float = 0.0
    """The time at which the ticket runs out."""
    refusals: dict[str, errors.BridgeError] = field(default_factory=dict)
    """By instance, since candidates were last chosen."""

    @property
    def room(self) -> int:
        return self.claim.room

    @property
    def keys(self) -> Keys:
        return Keys(self.request.page_hashes)


class PairingService:
    """Pairs requests, and finds paired rooms again. All else that lasts is in the store."""

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
        """Facts: each reservation of an end, and each answer to a request."""
        self._clock, self._config, self._timeouts = clock, config, timeouts
        self._directory, self._rooms, self._daemons = directory, rooms, daemons
        self._under_way = 0
        self._waiting = 0
        """Those under way that only wait for pages."""

    async def pair(self, request: PairRequest, may_name: Namespaces = ANY_NAMESPACE) -> Ticket:
        """Return a ticket for a request that is now reserved on both ends, or raise with nothing reserved.

        `may_name`: the namespaces of the caller; raises NamespaceError for another one. Raises ConflictError when the room is in
        use; CapacityError (NotReadyError, ClientLimitError) when nobody can take the room now, or within its `wait_s`, or the store
        does not answer, and at once while `max_under_way` others are being paired: with more than it can do, this process would end
        none in time; FingerprintMismatchError, InvalidInputError; DeadlineError after `timeouts.pair_s`.
        """
        begun_s, outcome, reason, ticket = self._clock(), CANCELLED, "", None
        try:
            may_name.require(request.namespace, keyed=bool(request.page_hashes))
            if request.wait_s > self._config.max_wait_s:
                raise errors.InvalidInputError(
                    f"wait_s is {request.wait_s:g} s, at most {self._config.max_wait_s:g} s are served (pairing.max_wait_s)"
                )
            if (busy := self._under_way - self._waiting) >= self._config.max_under_way:
                raise errors.CapacityError(f"{busy} requests are being paired already (pairing.max_under_way)")
            self._under_way += 1
            try:
                ticket = await self._pair(request)
            finally:
                self._under_way -= 1
            outcome = PAIRED
        except errors.BridgeError as error:
            outcome, reason = error.code, str(error)
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
                    reason=reason,
                    trace=TRACE.get(),
                )
            )

    async def report(self, room: int) -> PairReport:
        """Ask both ends. Raises UnknownRoomError for a room that was not paired or is forgotten."""
        ticket = await self._ticket(room)
        prefill, decode = await asyncio.gather(
            *(
                self._ask(end.http_urls, lambda url: self._daemons.report(url, room))
                for end in (ticket.prefill, ticket.decode)
            )
        )
        return _pair_report(ticket, prefill, decode)

    async def cancel(self, room: int, reason: str) -> PairReport:
        """Abort a room on both ends, decode first: it holds the lease. Raises UnknownRoomError as `report` does."""
        ticket = await self._ticket(room)
        decode = await self._cancel(ticket.decode.http_urls, room, ticket.generation, reason)
        prefill = await self._cancel(ticket.prefill.http_urls, room, ticket.generation, reason)
        if all(end.error_code in NOTHING_TO_CANCEL for end in (*prefill, *decode)):
            await self._rooms.cancelled(room, ticket.generation)
        return _pair_report(ticket, prefill, decode)

    async def _ticket(self, room: int) -> Ticket:
        ticket = await self._rooms.ticket(room)
        if ticket is None:
            raise errors.UnknownRoomError(
                f"room {room} was not paired here, or is forgotten: rooms are remembered for "
                f"{self._timeouts.room_keep_s:g} s (timeouts.room_keep_s)"
            )
        return ticket

    async def _pair(self, request: PairRequest) -> Ticket:
        wait_until_s = self._clock() + request.wait_s
        claim = await self._claim(request.room, rounds=2 if request.wait_s else 1)
        attempt = _Attempt(claim, request, claim.base)
        kept = False
        try:
            try:
                ticket = await self._in_time(attempt)
            except errors.CapacityError as error:
                if (
                    error.code != errors.CapacityError.code
                    or not request.wait_s
                    or self._waiting >= self._config.max_waiting
                ):
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

    async def _claim(self, wanted: int | None, *, rounds: int) -> Claim:
        """`rounds`: how often candidates may be tried, each time with generations of its own."""
        for _ in range(DRAWS):
            room = secrets.randbits(ROOM_BITS) if wanted is None else wanted
            claim = await self._rooms.claim(room, generations=rounds * self._config.attempts)
            if isinstance(claim, Claim):
                return claim
            if wanted is not None:
                raise errors.ConflictError(
                    f"room {room} is in use (paired {claim.age_s:.0f} s ago): draw another id, or cancel it first"
                )
        raise errors.IntegrityError(f"{DRAWS} random room ids in a row were in use")

    async def _give_up(self, attempt: _Attempt) -> None:
        try:
            await self._rooms.give_up(attempt.claim, attempt.generation)
        except errors.BridgeError as error:
            # Not raised: the caller has to learn why there is no ticket. The claim ends by its age.
            log.warning("room_stays_claimed", room=attempt.room, code=error.code, reason=str(error))

    async def _in_time(self, attempt: _Attempt) -> Ticket:
        """Try candidates within `timeouts.pair_s` and what is left of the wait for pages. Raises DeadlineError."""
        try:
            async with asyncio.timeout(self._timeouts.pair_s + self._wait_left_s(attempt)):
                return await self._try_candidates(attempt)
        except TimeoutError as error:
            raise errors.DeadlineError(
                f"room {attempt.room}: no pair was reserved within {self._timeouts.pair_s:g} s (timeouts.pair_s)"
            ) from error

    async def _try_candidates(self, attempt: _Attempt) -> Ticket:
        """Try the best pair, then the best without those that refused; of pairs that look full, only one."""
        ranking = await self._directory.look(attempt.request, attempt.keys)
        attempt.refusals = {}
        while len(attempt.refusals) < self._config.attempts:
            pair = ranking.best(without=attempt.refusals)
            if pair is None:
                break
            ticket = await self._reserve(attempt, pair)
            if ticket is not None:
                for fact in ranking.judged(ticket) if attempt.keys else ():
                    self.events.emit(fact)
                return ticket
            if pair.looks_full:
                break
        raise self._nobody(attempt)

    def _nobody(self, attempt: _Attempt) -> errors.CapacityError:
        """Return the error that tells the caller when to come back: full before a client's limit before unreachable."""
        limits = [error for error in attempt.refusals.values() if isinstance(error, errors.CapacityError)]
        kinds = {type(error) for error in limits}
        kind = next(
            (kind for kind in (errors.CapacityError, errors.ClientLimitError) if kind in kinds), errors.NotReadyError
        )
        causes = "; ".join(f"'{instance}': {error}" for instance, error in attempt.refusals.items())
        return kind(
            f"room {attempt.room}: no pair could be reserved: {causes}",
            retry_after_s=max((error.retry_after_s for error in limits), default=RETRY_AFTER_S),
        )

    async def _reserve(self, attempt: _Attempt, pair: Pair) -> Ticket | None:
        """Admit the room on every node of both instances, or on none. None: an instance has refused, and another pair may serve."""
        attempt.generation += 1
        # One deadline for both ends and the ticket; the wait for pages comes on top.
        attempt.use_until_s = self._clock() + self._wait_left_s(attempt) + self._timeouts.ticket_s
        # Before anybody is asked: others who pair meanwhile see the charge, and the nodes' own heartbeats come after it.
        await self._directory.charge((option.instance, option.needed) for option in pair)
        asked: list[str] = []
        reports: list[RoomReport] = []
        kept = False
        try:
            for instance in (pair.prefill.instance, pair.decode.instance):
                for url in instance.end.http_urls:
                    # Noted before the answer: a daemon that answers too late may have admitted the room all the same.
                    asked.append(url)
                    try:
                        reports.append(await self._admit(url, self._admission(attempt, pair, instance)))
                    except TRY_ANOTHER as error:
                        attempt.refusals[instance.name] = error
                        told = {"room": attempt.room, "peer_instance": instance.name}
                        log.warning("reservation_refused", **told, reason=str(error))
                        return None
            ticket = Ticket(
                room=attempt.room,
                generation=attempt.generation,
                prefill=pair.prefill.instance.end,
                decode=pair.decode.instance.end,
                expires_in_s=self._ticket_left_s(attempt),
                prefix_tokens=min(report.prefix_tokens for report in reports if report.role is Role.DECODE),
                computed_tokens=min(report.computed_tokens for report in reports if report.role is Role.PREFILL),
            )
            kept = await self._rooms.settle(attempt.claim, ticket, noted_keys(attempt.keys, attempt.request.namespace))
        finally:
            if not kept:
                reason = "the other end could not be reserved"
                await _finish(self._cancel(asked, attempt.room, attempt.generation, reason))
        if not kept:
            raise errors.NotReadyError(
                f"room {attempt.room}: another pairing has taken the room, or the store has lost it; nothing is reserved"
            )
        return ticket

    def _ticket_left_s(self, attempt: _Attempt) -> float:
        """Return for how long the ticket can still be used. Raises DeadlineError."""
        left_s = attempt.use_until_s - self._clock()
        if left_s <= 0:
            raise errors.DeadlineError("its ticket had run out before both ends were reserved (timeouts.ticket_s)")
        return left_s

    def _wait_left_s(self, attempt: _Attempt) -> float:
        return max(0.0, attempt.wait_until_s - self._clock())

    def _admission(self, attempt: _Attempt, pair: Pair, instance: Instance) -> AdmissionRequest:
        """Return what one side is asked to reserve; only decode learns of the writers."""
        decode, request = instance.first.role is Role.DECODE, attempt.request
        controls = (record.registration.control for record in pair.prefill.instance.nodes)
        # An instance that states no model shares nothing, and may be of a release that does not know page keys.
        keyed = instance.first.model_identity is not None
        return AdmissionRequest(
            room=attempt.room,
            generation=attempt.generation,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens if decode else 0,
            prefill=tuple(control for control in controls if control is not None) if decode else (),
            client=request.client,
            wait_s=self._wait_left_s(attempt),
            begin_within_s=self._ticket_left_s(attempt),
            page_hashes=request.page_hashes if keyed else b"",
            namespace=request.namespace if keyed else "",
            retention=request.retention if keyed else None,
        )

    async def _admit(self, url: str, admission: AdmissionRequest) -> RoomReport:
        """Reserve one end. Raises the daemon's error, DeadlineError, PeerError for another daemon's answer."""
        above, asked_s, code = TRACE.get(), self._clock(), "cancelled"
        role, limit_s = Role.DECODE if admission.prefill else Role.PREFILL, self._timeouts.reserve_s
        trace = above.part(f"reserve {url} {admission.generation}") if above is not None else None
        bound = TRACE.set(trace)
        try:
            async with asyncio.timeout(limit_s + admission.wait_s):
                report = await self._daemons.admit(url, admission)
            if (report.room, report.generation, report.role) != (admission.room, admission.generation, role):
                raise errors.PeerError(
                    f"{url} has admitted room {report.room} generation {report.generation} as {report.role}, asked for "
                    f"{admission.room} generation {admission.generation} as {role}: is http.advertise_url another daemon's?"
                )
            code = ""
        except TimeoutError as error:
            code = errors.DeadlineError.code
            waited = f" after its wait of {admission.wait_s:g} s" if admission.wait_s else ""
            raise errors.DeadlineError(f"{url} gave no answer in {limit_s:g} s{waited} (timeouts.reserve_s)") from error
        except errors.BridgeError as error:
            code = error.code
            raise
        else:
            return report
        finally:
            TRACE.reset(bound)
            self.events.emit(
                EndReserved(
                    room=admission.room or 0,
                    generation=admission.generation,
                    role=role.value,
                    url=url,
                    seconds=self._clock() - asked_s,
                    code=code,
                    trace=trace,
                )
            )

    async def _cancel(self, urls: Iterable[str], room: int, generation: int, reason: str) -> tuple[EndReport, ...]:
        """Give this generation of a room back. A daemon that has no such room, or a later generation, has done so."""
        ends = await self._ask(urls, lambda url: self._daemons.cancel(url, room, reason, generation=generation))
        for end in ends:
            if end.error_code not in NOTHING_TO_CANCEL:
                log.warning("reservation_not_given_back", room=room, url=end.url, error=end.error)
        return ends

    async def _ask(self, urls: Iterable[str], call: Callable[[str], Awaitable[RoomReport]]) -> tuple[EndReport, ...]:
        """Make one call to every daemon at once, each within `timeouts.reserve_s`; errors become part of the reports."""

        async def ask(url: str) -> EndReport:
            try:
                async with asyncio.timeout(self._timeouts.reserve_s):
                    return EndReport(url=url, report=await call(url))
            except TimeoutError:
                text = f"{url} did not answer within {self._timeouts.reserve_s:g} s (timeouts.reserve_s)"
                return EndReport(url=url, error_code=errors.DeadlineError.code, error=text)
            except errors.BridgeError as error:
                return EndReport(url=url, error_code=error.code, error=str(error))

        return tuple(await asyncio.gather(*map(ask, urls)))


async def _finish(work: Awaitable[object]) -> None:
    """Wait for work that must not stay undone, even while this task is being cancelled; the work ends in bounded time."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _pair_report(ticket: Ticket, prefill: tuple[EndReport, ...], decode: tuple[EndReport, ...]) -> PairReport:
    answered = [end.report for end in (*decode, *prefill) if end.report is not None]
    state = answered[0].state if answered else RoomState.ADMITTED
    room = {"room": ticket.room, "generation": ticket.generation, "state": state}
    return PairReport(**room, ticket=ticket, prefill=prefill, decode=decode)
