"""A node's end of its store: orders with deadlines to a process of its own, and what is known of the pages that they are about.

An order has an answer by its deadline, whatever the store does. Its pages are another matter: a store that does not answer may go
on reading or writing them. So an operation has two ends, `answer` and `settled`. What is not settled soon after its deadline is
settled by killing the process, and counts as that only when the process has ended. Nothing is lost with a process: the store keeps
what it has, and what was under way is a miss.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import structlog

from kvbridge.config.tier import StoreLimits, StoreSettings
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import BAD, Answer, Outcome, Verb
from kvbridge.tier.stores.breaker import Breaker, FailedKeys
from kvbridge.tier.stores.messages import StoreOrder, StoreReport, StoreSetup
from kvbridge.tier.stores.objects import ObjectForm, PageIds, check_request, names_of, object_name
from kvbridge.tier.stores.supervisor import StoreProcess

log = structlog.get_logger(__name__)

CALLS = 4
"""Orders that a process works on at once."""
NO_PAGES: PageIds = np.empty(0, dtype=np.int32)


class Operation:
    """One order. `await` it for its answer; giving that up changes nothing."""

    def __init__(self, verb: Verb, form: ObjectForm, names: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self.verb = verb
        self.form = form
        self.names = names
        self.asked: list[int] = []
        """Which of its objects the store was asked for, by position."""
        self.answer: asyncio.Future[Answer] = loop.create_future()
        """There by the deadline. What it says of `settled` was so at that time."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when nothing touches the pages of the order any more. Several may wait for it: shield it."""
        self.judged = False
        """True once the store has been judged by the answer."""
        self.answered_before = 0
        """Number of orders that the store had answered when it was given this one."""
        self.timer: asyncio.TimerHandle | None = None

    def __await__(self) -> Generator[Any, None, Answer]:
        return asyncio.shield(self.answer).__await__()


class StoreClient:
    """A store, by means of a process of its own. Used in one running loop: `start` it, and `close` it."""

    def __init__(
        self,
        settings: StoreSettings,
        forms: Sequence[Sequence[SharedRegion]],
        limits: StoreLimits | None = None,
        *,
        model: str = "",
        log_level: str = "info",
    ) -> None:
        """`forms`: of each kind of object the regions of host memory that its pages lie in; orders name them by position.

        `model`: see ObjectForm. Raises InvalidInputError for regions that cannot be objects.
        """
        self._limits = limits or StoreLimits()
        self._forms = [ObjectForm((shared.region for shared in form), model) for form in forms]
        self.process = StoreProcess(
            StoreSetup(settings=settings.model_dump_json(), forms=tuple(map(tuple, forms)), model=model, calls=CALLS),
            start_s=self._limits.start_s,
            on_report=self._on_report,
            on_gone=self._on_gone,
            log_level=log_level,
        )
        self._under_way: dict[int, Operation] = {}
        """All that is not settled, by number."""
        self._answered = 0
        """Number of orders that the store has answered in time."""
        self._number = 0
        self._failed = FailedKeys(self._limits.remember_s)
        self.breaker = Breaker(self._limits.failures)
        self.counts: Counter[tuple[Verb, Outcome]] = Counter()
        """Objects, by what was asked and how it ended."""
        self.moved_bytes: Counter[Verb] = Counter()
        """Bytes of pages that were put or got, whole."""

    def start(self) -> None:
        """Start the process. Until it is ready (it has `capabilities`), the store is `unreachable`."""
        self.process.start()

    async def close(self, timeout_s: float) -> None:
        """Let what is under way end, then the process, each within half of the time. Afterwards everything is settled."""
        waits = [operation.settled for operation in self._under_way.values()]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s / 2)
        await self.process.close(timeout_s / 2)

    @property
    def unsettled(self) -> list[Operation]:
        """Operations whose pages may still be touched, answered or not."""
        return list(self._under_way.values())

    def put(self, form: int, keys: Keys, pages: PageIds, *, timeout_s: float) -> Operation:
        """Begin to store whole pages that nobody writes: each `stored`, `full`, `timed_out` or `unreachable`.

        `pages`: int32 of shape (keys, spaces of the form, in the order of their names); in use until the operation is settled. As
        all verbs: at most `BATCH_LIMIT` objects, better `capabilities.batch`; raises InvalidInputError for what can never work.
        """
        return self._begin(Verb.PUT, form, keys, pages, timeout_s)

    def get(self, form: int, keys: Keys, pages: PageIds, *, timeout_s: float) -> Operation:
        """Begin to fill pages: each a `hit`, every byte compared, or a miss by its kind, and then undefined. Else as `put`."""
        return self._begin(Verb.GET, form, keys, pages, timeout_s)

    def has(self, form: int, keys: Keys, *, timeout_s: float) -> Operation:
        """Begin to ask which objects are `present` or `absent`."""
        return self._begin(Verb.HAS, form, keys, NO_PAGES, timeout_s)

    def drop(self, form: int, keys: Keys, *, timeout_s: float) -> Operation:
        """Begin to remove objects."""
        return self._begin(Verb.DROP, form, keys, NO_PAGES, timeout_s)

    def clear(self, form: int, *, timeout_s: float) -> Operation:
        """Begin to remove all objects of a form, whoever has put them there: one outcome for all, `dropped` or why not."""
        return self._begin(Verb.CLEAR, form, Keys(), NO_PAGES, timeout_s)

    # ------------------------------------------------------------------ inside

    def _begin(self, verb: Verb, form: int, keys: Keys, pages: PageIds, timeout_s: float) -> Operation:
        known = self._forms[form] if verb is Verb.CLEAR else check_request(self._forms, form, keys)
        if verb in {Verb.PUT, Verb.GET}:
            known.check(pages, len(keys))
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        names = [names_of(known)] if verb is Verb.CLEAR else [object_name(known, key) for key in keys.to_list()]
        operation = Operation(verb, known, names)
        remembers = verb in {Verb.GET, Verb.HAS}
        operation.asked = [
            index for index, name in enumerate(operation.names) if not (remembers and self._failed.has(name, now_s))
        ]
        without = Answer.of_all(Outcome.ABSENT, len(names), detail="it was missing a moment ago")
        is_ready = self.process.capabilities is not None
        if operation.asked and not (is_ready and self.breaker.admits(now_s)):
            why = (
                "the store has failed too often, and is asked again after a pause" if is_ready else self.process.why_not
            )
            without, operation.asked = Answer.of_all(Outcome.UNREACHABLE, len(names), detail=why), []
        if not operation.asked:
            self._end(operation, without)
            self._settle(operation)
            return operation
        self._number += 1
        operation.answered_before = self._answered
        self._under_way[self._number] = operation
        operation.timer = loop.call_later(timeout_s, self._late, self._number, timeout_s)
        self.process.send(
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

    def _on_report(self, report: StoreReport) -> None:
        operation = self._under_way.get(report.number)
        if operation is None or len(report.outcomes) != len(operation.asked):
            self.process.kill(f"it answered order {report.number}, which it was not given so")
            return
        if not operation.judged:
            outcomes = [Outcome.ABSENT] * len(operation.names)
            for index, outcome in zip(operation.asked, report.outcomes, strict=True):
                outcomes[index] = outcome
            self._judge(operation, Answer(tuple(outcomes), report.settled, report.detail, report.cleared))
        if report.settled:
            del self._under_way[report.number]
            self._settle(operation)
        else:
            self.process.kill(f"a {operation.verb} has ended in the store, but not for its pages: {report.detail}")

    def _late(self, number: int, timeout_s: float) -> None:
        operation = self._under_way[number]
        detail = f"the store did not answer within {timeout_s:g} s"
        self._judge(operation, Answer.of_all(Outcome.TIMED_OUT, len(operation.names), settled=False, detail=detail))
        why = f"it did not end a {operation.verb} within {self._limits.settle_s:g} s of its deadline"
        operation.timer = asyncio.get_running_loop().call_later(self._limits.settle_s, self.process.kill, why)

    def _on_gone(self, reason: str) -> None:
        """The process has ended: so have all reading and writing of pages."""
        operations, self._under_way = list(self._under_way.values()), {}
        detail = f"the store process ended meanwhile: {reason}"
        for operation in operations:
            if not operation.judged:
                self._judge(operation, Answer.of_all(Outcome.UNREACHABLE, len(operation.names), detail=detail))
            self._settle(operation)

    def _judge(self, operation: Operation, answer: Answer) -> None:
        """Give the answer of an order that the store was asked, and take note of what it says about the store."""
        operation.judged = True
        before, now_s = self.breaker.state, asyncio.get_running_loop().time()
        is_busy = Outcome.UNREACHABLE not in answer.outcomes and self._answered > operation.answered_before
        if not answer.failed:
            self._answered += 1
            self.breaker.success()
        elif not is_busy:  # what comes late behind others of ours says nothing against a store that answers those
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
