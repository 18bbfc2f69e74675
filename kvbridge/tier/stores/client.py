"""A node's end of its store: orders with deadlines to a process of its own, and what is known of the pages that they are about.

Owns: the process and the proof of its end, which orders are under way, which pages they may still touch, whether the store is asked
at all. Must not know: which store it is, rooms, the index.

An order has an answer by its deadline, whatever the store does. Its pages are another matter: a store that does not answer may go
on reading or writing them. So an operation has two ends, `answer` and `settled`. What is not settled soon after its deadline is
settled by killing the process, and counts as that only when the process has ended. Nothing is lost with a process: the store keeps
what it has, and what was under way is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import structlog

from kvbridge.config.stores import StoreLimits, StoreSettings
from kvbridge.core.wire.codec import FrameError
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import REMEDIES, Answer, Capabilities, Outcome, Remedy, Verb
from kvbridge.tier.stores.breaker import Breaker, BreakerState, FailedKeys
from kvbridge.tier.stores.messages import (
    LENGTH,
    NODE_TO_STORE,
    STORE_TO_NODE,
    StoreFailed,
    StoreOrder,
    StoreReady,
    StoreReport,
    StoreSetup,
    framed,
    length_of,
)
from kvbridge.tier.stores.objects import ObjectForm, PageIds, check_request, names_of, object_name

log = structlog.get_logger(__name__)

CALLS = 4
"""Orders that a process works on at once."""
NO_PAGES: PageIds = np.empty(0, dtype=np.int32)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STABLE_AFTER_S = 30.0
"""A process that was ready for so long is followed by the next one after the first pause."""


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
        """Whether it has been said what the answer means for the store."""
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
        self._number = 0
        self._failed = FailedKeys(self._limits.remember_s)
        self.breaker = Breaker(self._limits.failures)
        self.breaker_changes: Counter[BreakerState] = Counter()
        """How often it came to be open, and closed again."""
        self.counts: Counter[tuple[Verb, Outcome]] = Counter()
        """Objects, by what was asked and how it ended."""
        self.moved_bytes: Counter[Verb] = Counter()
        """Of pages that were put or got, whole."""

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
        if answer.failed:
            self.breaker.failure(now_s)
        else:
            self.breaker.success()
        if self.breaker.state is not before:
            self.breaker_changes[self.breaker.state] += 1
            log.warning("store_breaker", state=self.breaker.state.value, before=before.value, reason=answer.detail)
        found = [(name, REMEDIES[outcome]) for name, outcome in zip(operation.names, answer.outcomes, strict=True)]
        if operation.verb in {Verb.GET, Verb.HAS}:
            self._failed.add((name for name, remedy in found if remedy in {Remedy.COMPUTE, Remedy.REPLACE}), now_s)
        elif operation.verb is Verb.PUT:
            self._failed.forget(name for name, remedy in found if remedy is Remedy.NOTHING)
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


class StoreProcess:
    """Keeps a process running: started, told what to serve, killed when it must be, started again. Used in one running loop."""

    def __init__(
        self,
        setup: StoreSetup,
        *,
        start_s: float,
        on_report: Callable[[StoreReport], None],
        on_gone: Callable[[str], None],
        log_level: str,
    ) -> None:
        """`on_gone(reason)`: the process has ended, with all of its threads; called before the next one is started.

        `start_s`: for a process to be ready. Raises InvalidInputError for a setup that no message holds.
        """
        self._setup = framed(NODE_TO_STORE.encode_body(setup))
        self._start_s = start_s
        self._on_report = on_report
        self._on_gone = on_gone
        self._log_level = log_level
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reason = ""
        """Why the present process ends, as far as that is known."""
        self._closing = False
        self.starts = 0
        """How often one was started, or could not be."""
        self.capabilities: Capabilities | None = None
        """Of the store, while the process takes orders."""
        self.why_not = "the store process has not been started"
        """Why it takes none, else."""

    @property
    def pid(self) -> int:
        """Of the process that runs, else 0."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Keep a process running from now on."""
        self._task = asyncio.create_task(self._keep(), name="keep the store process")

    async def failed(self) -> None:
        """Raise when the process, once started, is not looked after any more, by a defect."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def send(self, order: StoreOrder) -> None:
        """Give the process something to do, while it has `capabilities`."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framed(NODE_TO_STORE.encode_body(order)))

    def kill(self, why: str) -> None:
        """End the process, however it hangs. Harmless when it has ended."""
        self._take_no_more(why)
        if self._process is None:
            return
        if not self._reason:
            self._reason = why
            log.warning("store_process_killed", pid=self.pid, why=why)
        self._end()

    def _end(self) -> None:
        # Not through `_process`, which would look for the exit code itself and so take it from whoever waits for it.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """End the process by ending its input, or by force after `timeout_s`. Returns when it has ended."""
        self._closing = True
        self._take_no_more("the node ends")
        if self._task is None:
            return
        if self._process is None or self._process.stdin is None:
            self._task.cancel()
        else:
            self._process.stdin.close()
        await asyncio.wait([self._task], timeout=timeout_s)
        self.kill(f"it did not end within {timeout_s:g} s")
        await asyncio.gather(self._task, return_exceptions=True)

    def _take_no_more(self, why: str) -> None:
        self.capabilities, self.why_not = None, why

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            begun_s = loop.time()
            reason = await self._run()
            self._take_no_more(f"the store process has ended: {reason}")
            self._on_gone(reason)
            if not self._closing:
                log.error("store_process_gone", reason=reason)
                await asyncio.sleep(pause_s)
            pause_s = FIRST_PAUSE_S if loop.time() - begun_s > STABLE_AFTER_S else min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _run(self) -> str:
        """Start a process and wait for its end. Returns why it ended, or did not even begin."""
        self._take_no_more("the store process is being started")
        self.starts += 1
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvbridge.tier.stores.process"),
                *("--log-level", self._log_level, "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the node's
                # It is told all that it is to know: no token travels further than it must.
                env={name: value for name, value in os.environ.items() if not name.startswith("KVBRIDGE_")},
            )
        except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
            return f"it could not be started: {error}"
        assert process.stdin is not None
        assert process.stdout is not None
        self._reason = ""
        process.stdin.write(self._setup)
        why = f"it was not ready after {self._start_s:g} s"
        self._late = asyncio.get_running_loop().call_later(self._start_s, self.kill, why)
        try:
            await self._read(process.stdout)
            self._take_no_more("its output has ended")
            if not self._closing:
                self._end()
            code = await process.wait()
        finally:
            self._late.cancel()
            self._process = None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._reason or how

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the process says until its output ends, which ends the process."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                match STORE_TO_NODE.decode_body(await reader.readexactly(length)):
                    case StoreReady() as ready:
                        self._late.cancel()
                        if not self._reason and not self._closing:
                            self.capabilities, self.why_not = ready.capabilities, ""
                            log.info("store_process_ready", pid=self.pid, store=ready.capabilities.kind)
                    case StoreFailed() as failed:
                        self._reason = f"it cannot serve: {failed.message}"
                    case StoreReport() as report:
                        self._on_report(report)
        except (asyncio.IncompleteReadError, OSError):
            return  # it ends, or has been told to
        except FrameError as error:
            self.kill(f"it said what no store process says: {error}")
