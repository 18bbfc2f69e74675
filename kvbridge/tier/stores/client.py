"""A node's side of its store: orders with deadlines to a process of its own, which the client keeps running and can kill.

An order has an answer by its deadline, but a store that does not answer may still read or write the order's pages. An operation
therefore has two ends, `answer` and `settled`. When it is not settled soon after its deadline, the client kills the process: the
end of the process settles everything. The store keeps its objects, and orders under way are misses.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Sequence
from enum import StrEnum
from typing import Any

import structlog

from kvbridge.config.tier import StoreLimits, StoreSettings
from kvbridge.core.wire.codec import FrameError
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.processes import ChildEnd, SupervisedChild
from kvbridge.tier.keys import NO_KEYS, Keys
from kvbridge.tier.stores.objects import (
    BAD,
    LENGTH,
    NO_PAGES,
    NODE_TO_STORE,
    STORE_TO_NODE,
    Answer,
    ObjectForm,
    Outcome,
    PageIds,
    StoreFailed,
    StoreOrder,
    StoreReady,
    StoreReport,
    StoreSetup,
    Verb,
    check_request,
    framed,
    length_of,
)

log = structlog.get_logger(__name__)

CALLS = 4
"""Orders that a process works on at once."""
FIRST_OPEN_S, LONGEST_OPEN_S = 1.0, 30.0
"""A breaker stays open for so long."""


class BreakerState(StrEnum):
    """The states of a breaker."""

    CLOSED = "closed"
    """The store is asked."""
    OPEN = "open"
    """The store has failed too often, and is not asked."""
    HALF_OPEN = "half_open"
    """One request tries whether the store works again; for all others the breaker is open."""


class Breaker:
    """Opens after so many failures in a row, then lets one request through after a pause, twice as long after each failure."""

    def __init__(self, failures: int) -> None:
        self.state = BreakerState.CLOSED
        self._limit = failures
        self._failures = 0
        self._pause_s = FIRST_OPEN_S
        self._until_s = 0.0

    def admits(self, now_s: float) -> bool:
        """Return whether a request goes to the store now. The caller reports `success` or `failure` of each that does."""
        if self.state is BreakerState.OPEN and now_s >= self._until_s:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def success(self) -> None:
        """Close: the store has answered, perhaps with a miss. An answer while open is to an older request, and proves nothing."""
        if self.state is not BreakerState.OPEN:
            self.state, self._failures, self._pause_s = BreakerState.CLOSED, 0, FIRST_OPEN_S

    def failure(self, now_s: float) -> None:
        """Count a request that the store could not carry out. A failure while open is of an older request, and is nothing new."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(LONGEST_OPEN_S, 2 * self._pause_s)
        elif self.state is BreakerState.OPEN or self._failures < self._limit:
            return
        self.state, self._until_s = BreakerState.OPEN, now_s + self._pause_s


class FailedKeys:
    """Names of objects that were missing or bad less than `keep_s` ago: the store is not asked for them."""

    def __init__(self, keep_s: float, most: int = 10_000) -> None:
        """`most`: the most names that are remembered; the oldest go first."""
        self._keep_s, self._most = keep_s, most
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str], now_s: float) -> None:
        """Remember names."""
        for name in names:
            self._until_s[name] = now_s + self._keep_s
            self._until_s.move_to_end(name)
        while len(self._until_s) > self._most:
            self._until_s.popitem(last=False)

    def forget(self, names: Iterable[str]) -> None:
        """Forget names whose objects have been stored."""
        for name in names:
            self._until_s.pop(name, None)

    def has(self, name: str, now_s: float) -> bool:
        """Return whether a name is remembered."""
        return now_s < self._until_s.get(name, now_s)


class Operation:
    """One order. `await` it for its answer; a caller who stops waiting changes nothing."""

    def __init__(self, verb: Verb, form: ObjectForm, names: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self.verb, self.form, self.names = verb, form, names
        self.asked: list[int] = []
        """Positions of the objects that the store was asked for."""
        self.answer: asyncio.Future[Answer] = loop.create_future()
        """Done by the deadline. `Answer.settled` is as of that time."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when nothing touches the pages of the order any more. Several may wait for it, so shield it."""
        self.judged = False
        """True once the breaker has counted the answer."""
        self.answered_before = 0
        """Number of orders that the store had answered when it got this one."""
        self.timer: asyncio.TimerHandle | None = None

    def __await__(self) -> Generator[Any, None, Answer]:
        return asyncio.shield(self.answer).__await__()


class StoreClient:
    """A store in a process of its own. Used in one running loop: `start` it, and `close` it."""

    def __init__(
        self,
        settings: StoreSettings,
        forms: Sequence[Sequence[SharedRegion]],
        limits: StoreLimits | None = None,
        *,
        model: str = "",
        log_level: str = "info",
    ) -> None:
        """`forms`: for each kind of object, the regions of host memory that its pages lie in; orders name forms by position.

        `model`: see ObjectForm. Raises InvalidInputError for regions that cannot be objects, or do not fit in a message.
        """
        self._limits = limits or StoreLimits()
        self._forms = [ObjectForm((shared.region for shared in form), model) for form in forms]
        setup = StoreSetup(
            settings=settings.model_dump_json(), forms=tuple(map(tuple, forms)), model=model, calls=CALLS
        )
        self._setup, self._log_level = framed(NODE_TO_STORE.encode_body(setup)), log_level
        self._child = SupervisedChild("the store process", self._live, self._ended)
        self._closing = False
        self.why_not = "the store process has not been started"
        """The reason why the process takes no orders; empty while it takes them."""
        self._under_way: dict[int, Operation] = {}
        """Operations that are not settled, by number."""
        self._answered = 0
        """Number of orders that the store has answered in time."""
        self._number = 0
        self._failed = FailedKeys(self._limits.remember_s)
        self.breaker = Breaker(self._limits.failures)
        self.counts: Counter[tuple[Verb, Outcome]] = Counter()
        """Numbers of objects, by request and outcome."""
        self.moved_bytes: Counter[Verb] = Counter()
        """Bytes of whole pages that were put or got."""

    @property
    def pid(self) -> int:
        """The id of the process that runs, else 0."""
        return self._child.pid

    @property
    def unsettled(self) -> list[Operation]:
        """Operations whose pages may still be touched, answered or not."""
        return list(self._under_way.values())

    def start(self) -> None:
        """Keep a process running from now on. Until the process is ready, every order is UNREACHABLE."""
        self._child.start()

    async def failed(self) -> None:
        """Raise when the process is not supervised any more, by a defect."""
        await self._child.failed()

    async def close(self, timeout_s: float) -> None:
        """Let operations end, then the process, each within half of the time. Afterwards every operation is settled."""
        waits = [operation.settled for operation in self._under_way.values()]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s / 2)
        self._closing = True
        self.why_not = "the node ends"
        process = self._child.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        why = f"it did not end within {timeout_s / 2:g} s"
        if await self._child.stop(timeout_s / 2, why):
            log.warning("store_process_killed", why=why)

    # ------------------------------------------------------------------ orders

    def begin(
        self, verb: Verb, form: int, keys: Keys = NO_KEYS, pages: PageIds = NO_PAGES, *, timeout_s: float
    ) -> Operation:
        """Begin a request; see Verb for the outcomes. Raises InvalidInputError for a request that can never work.

        `keys`: none for CLEAR, else at most `BATCH_LIMIT`. `pages`, for PUT and GET: int32 of shape (keys, spaces of the form, in
        the order of their names); in use until the operation is settled.
        """
        known = self._forms[form] if verb is Verb.CLEAR else check_request(self._forms, form, keys)
        if verb in {Verb.PUT, Verb.GET}:
            known.check(pages, len(keys))
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        names = [known.prefix] if verb is Verb.CLEAR else [known.object_name(key) for key in keys.to_list()]
        operation = Operation(verb, known, names)
        remembers = verb in {Verb.GET, Verb.HAS}
        operation.asked = [
            index for index, name in enumerate(operation.names) if not (remembers and self._failed.has(name, now_s))
        ]
        without = Answer.of_all(Outcome.ABSENT, len(names), detail="the object was missing a moment ago")
        if operation.asked and (self.why_not or not self.breaker.admits(now_s)):
            why = self.why_not or "the store has failed too often, and is asked again after a pause"
            without, operation.asked = Answer.of_all(Outcome.UNREACHABLE, len(names), detail=why), []
        if not operation.asked:
            self._end(operation, without)
            self._settle(operation)
            return operation
        self._number += 1
        operation.answered_before = self._answered
        self._under_way[self._number] = operation
        operation.timer = loop.call_later(timeout_s, self._late, self._number, timeout_s)
        self._send(
            StoreOrder(
                number=self._number,
                verb=verb,
                form=form,
                keys=b"".join(keys[index] for index in operation.asked[: len(keys)]),
                pages=pages[operation.asked].astype("<i4").tobytes() if pages.size else b"",
                until_s=now_s + timeout_s,
            )
        )
        return operation

    def _send(self, order: StoreOrder) -> None:
        process = self._child.process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(framed(NODE_TO_STORE.encode_body(order)))

    def _on_report(self, report: StoreReport) -> None:
        operation = self._under_way.get(report.number)
        if operation is None or len(report.outcomes) != len(operation.asked):
            self._kill(f"it answered order {report.number}, which it was not given in that form")
            return
        if not operation.judged:
            outcomes = [Outcome.ABSENT] * len(operation.names)
            for index, outcome in zip(operation.asked, report.outcomes, strict=True):
                outcomes[index] = outcome
            self._judge(operation, report.model_copy(update={"outcomes": tuple(outcomes)}))
        if report.settled:
            del self._under_way[report.number]
            self._settle(operation)
        else:
            self._kill(f"a {operation.verb} has ended, but the store may still touch its pages: {report.detail}")

    def _late(self, number: int, timeout_s: float) -> None:
        operation = self._under_way[number]
        detail = f"the store did not answer within {timeout_s:g} s"
        self._judge(operation, Answer.of_all(Outcome.TIMED_OUT, len(operation.names), settled=False, detail=detail))
        settle_s = self._limits.settle_s
        why = f"a {operation.verb} did not end within {settle_s:g} s of its deadline (store_limits.settle_s)"
        operation.timer = asyncio.get_running_loop().call_later(settle_s, self._kill, why)

    def _judge(self, operation: Operation, answer: Answer) -> None:
        """Give the answer of an order, and count it for or against the store."""
        operation.judged = True
        before, now_s = self.breaker.state, asyncio.get_running_loop().time()
        is_busy = Outcome.UNREACHABLE not in answer.outcomes and self._answered > operation.answered_before
        if not answer.failed:
            self._answered += 1
            self.breaker.success()
        elif not is_busy:  # a store that answers other orders meanwhile is not down, only slow
            self.breaker.failure(now_s)
        if self.breaker.state is not before:
            log.warning("store_breaker", state=self.breaker.state.value, before=before.value, reason=answer.detail)
        found = list(zip(operation.names, answer.outcomes, strict=True))
        if operation.verb in {Verb.GET, Verb.HAS}:
            self._failed.add((name for name, outcome in found if outcome in BAD or outcome is Outcome.ABSENT), now_s)
        elif operation.verb is Verb.PUT:
            self._failed.forget(name for name, outcome in found if outcome is Outcome.STORED)
        self._end(operation, answer)

    def _end(self, operation: Operation, answer: Answer) -> None:
        for outcome in answer.outcomes:
            self.counts[operation.verb, outcome] += 1
            if outcome in {Outcome.HIT, Outcome.STORED}:
                self.moved_bytes[operation.verb] += operation.form.payload_bytes
        if not operation.answer.done():
            operation.answer.set_result(answer)

    def _settle(self, operation: Operation) -> None:
        if operation.timer is not None:
            operation.timer.cancel()
        if not operation.settled.done():
            operation.settled.set_result(None)

    # ------------------------------------------------------------------ the process

    async def _live(self) -> None:
        self.why_not = "the store process is being started"
        arguments = ("--log-level", self._log_level, "--parent", str(os.getpid()))
        process = await self._child.launch("kvbridge.tier.stores.process", *arguments, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._setup)
        start_s = self._limits.start_s
        why = f"it was not ready within {start_s:g} s (store_limits.start_s)"
        late = asyncio.get_running_loop().call_later(start_s, self._kill, why)
        try:
            await self._read(process.stdout, late)
            self.why_not = "its output has ended"
            if not self._closing:
                self._child.kill()
            await process.wait()
        finally:
            late.cancel()

    async def _read(self, reader: asyncio.StreamReader, late: asyncio.TimerHandle) -> None:
        """Take the process's messages until its output ends. `late` kills a process that is not ready in time."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                match STORE_TO_NODE.decode_body(await reader.readexactly(length)):
                    case StoreReady() as ready:
                        late.cancel()
                        if not self._child.why and not self._closing:
                            self.why_not = ""
                            log.info("store_process_ready", pid=self.pid, store=ready.kind)
                    case StoreFailed() as failed:
                        self._child.why = f"it cannot open the store, or go on with it: {failed.message}"
                    case StoreReport() as report:
                        self._on_report(report)
        except (asyncio.IncompleteReadError, OSError):
            return  # the process ends
        except FrameError as error:
            self._kill(f"it sent bytes that are no message of a store process: {error}")

    def _ended(self, end: ChildEnd) -> None:
        """Settle everything: the process has ended, so nothing reads or writes pages any more."""
        reason = end.why or end.how
        self.why_not = f"the store process has ended: {reason}"
        operations, self._under_way = list(self._under_way.values()), {}
        detail = f"the store process ended meanwhile: {reason}"
        for operation in operations:
            if not operation.judged:
                self._judge(operation, Answer.of_all(Outcome.UNREACHABLE, len(operation.names), detail=detail))
            self._settle(operation)
        if not self._closing:
            remedy = "it is started again after a pause; until then prefixes that only the store has are computed"
            log.error("store_process_gone", reason=reason, remedy=remedy)

    def _kill(self, why: str) -> None:
        """End the process, however it hangs. Harmless when it has ended."""
        self.why_not = why
        if self._child.kill(why):
            log.warning("store_process_killed", pid=self.pid, why=why)
