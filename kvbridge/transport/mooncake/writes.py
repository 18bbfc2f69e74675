"""The two ways of giving a mooncake engine the operations of a transfer.

Each operation by itself (`SingleWrites`). The library then says of each when it has ended, so a transfer that failed becomes quiet.
Over TCP there is no other way: a batch that has failed leaves the rest of itself running for as long as the peer hangs, and more
than about 2,050 operations are applied in part.

In batches (`BatchWrites`), over RDMA, where 37,440 B take 0.75 us on the wire and a call of their own takes longer than that. The
following is known from the library's documentation and source, and was run over TCP only:

- One question covers a whole batch. It spins on a core until the batch has ended, so the last operation of each batch is given by
  itself and polled, which is cheap, and the others are asked after when that one has ended: by then they have, or nearly. A thread
  for each peer does that, so whoever waits longer waits for its own peer.
- After a batch has failed its state is unknown: the library may or may not have freed the batch's id. Such a batch is never polled
  again, and counts as in flight until the transport is closed. A batch that was refused counts likewise, since a part of the batch
  may have been posted before.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from queue import SimpleQueue
from threading import Thread

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import AddressArray, Operations
from kvbridge.transport.mooncake.library import (
    LIBRARY_ERRORS,
    STATUS_DONE,
    STATUS_FAILED,
    STATUS_PENDING,
    STATUS_UNKNOWN,
    Engine,
)
from kvbridge.transport.threads import start_thread
from kvbridge.transport.windowed import DONE, PENDING, Check, PartlyStartedError, Progress, Submitter

NO_BATCH = frozenset({-1, 0, 2**64 - 1})
"""Answers in place of a batch id when the library took nothing (the type differs between builds)."""
BATCH_DONE, BATCH_FAILED = 0, -1
REFUSED = -1
CONVERTED = 1024
"""Addresses that are made Python numbers at a time."""

WHY_REFUSED = "the peer cannot be reached, or its queue is full (lower transports.mooncake.window_operations)"
WHY_FAILED = (
    "the peer died, hangs (transports.mooncake.progress_timeout_s), has unregistered the memory, or cannot be reached; "
    "see its log, and the library's with transports.mooncake.log_level INFO"
)


@dataclass(slots=True, eq=False)
class Singles:
    """Operations that were given one by one and have not ended."""

    ids: list[int]
    failure: str = ""
    """The first failure; the group has ended once `ids` is empty."""


class SingleWrites(Submitter[Singles]):
    """Gives the library each operation of a transfer by itself, a few with each `start`."""

    def __init__(self, engine: Engine, session: str, operations: Operations) -> None:
        self._engine = engine
        self._session = session
        self._operations = operations
        self._arguments = [*map(_numbers, (operations.source, operations.destination, operations.length))]

    def start(self, first: int, stop: int) -> Singles:
        submit = self._engine.library.transfer_submit_write
        ids: list[int] = []
        refused = ""
        try:
            for single in map(submit, repeat(self._session, stop - first), *self._arguments):
                if single in NO_BATCH:
                    refused = _refusal(self._operations, first + len(ids))
                    break
                ids.append(single)
        except LIBRARY_ERRORS as error:
            refused = _raised(self._session, error)
        if not refused:
            return Singles(ids)
        if not ids:
            raise TransportError(refused)
        raise PartlyStartedError(refused, Singles(ids), first + len(ids))

    def check(self, handle: Singles) -> Check:
        """Ask after operations in their order, as far as the first that has not ended well."""
        ended = 0
        answer = STATUS_DONE
        if not handle.failure:
            status = self._engine.library.transfer_check_status
            try:
                for answer in map(status, handle.ids):
                    if answer != STATUS_DONE:
                        break
                    ended += 1
            except LIBRARY_ERRORS:
                answer = STATUS_UNKNOWN
            del handle.ids[:ended]
            if not handle.ids:
                return DONE
            if answer == STATUS_PENDING:
                return PENDING
            if answer == STATUS_FAILED:
                del handle.ids[0]  # the library has freed it
            handle.failure = _failure(answer)
        status_of = self._engine.status
        handle.ids = [single for single in handle.ids if status_of(single) in {STATUS_PENDING, STATUS_UNKNOWN}]
        return Check(Progress.STALLED if handle.ids else Progress.FAILED, handle.failure)


@dataclass(slots=True, eq=False)
class Batch:
    """Operations of one call (`others`), and those beside them that were given by themselves (`singles`)."""

    singles: list[int]
    """Ids of single operations that have not ended."""
    others: int
    """The library's id of the others; 0 when there are none, `REFUSED` when the library did not take them."""
    answer: int | None = None
    """The library's answer about the others; written by the waiter."""
    failure: str = ""


class BatchWrites(Submitter[Batch]):
    """Gives the library the operations of a transfer in batches.

    The first operation of a transfer is given by itself, before all others. It finds out a peer that cannot be reached, or whose
    description cannot be read, with nothing else under way.
    """

    def __init__(self, engine: Engine, session: str, operations: Operations, waiter: Waiter) -> None:
        self._engine = engine
        self._session = session
        self._operations = operations
        self._waiter = waiter
        self._polled: deque[Batch] = deque()
        """Batches whose single operations may not all have ended."""

    def start(self, first: int, stop: int) -> Batch:
        last = stop - 1
        batch = Batch([], 0)
        self._polled.append(batch)
        try:
            if first == 0 < last:
                batch.singles.append(self._submit(0))
                first = 1
            if first < last:
                self._submit_others(batch, first, last)
            batch.singles.append(self._submit(last))
        except TransportError as error:
            if not batch.singles and not batch.others:
                self._polled.pop()
                raise
            raise PartlyStartedError(str(error), batch, last) from error
        return batch

    def check(self, handle: Batch) -> Check:
        """Look beyond the oldest batch as well, so that the waiter always has a batch to ask after."""
        while self._polled and self._singles_ended(self._polled[0]):
            batch = self._polled.popleft()
            if batch.others and batch.answer is None:
                self._waiter.ask(batch)
        if handle.singles or (handle.others and handle.answer is None):
            return Check(Progress.STALLED, handle.failure) if handle.failure else PENDING
        if handle.others and handle.answer != BATCH_DONE:
            told = (
                f"mooncake answered {handle.answer} for a batch, of which it cannot be known when it ends; {WHY_FAILED}"
            )
            return Check(Progress.LOST, handle.failure or told)
        return Check(Progress.FAILED, handle.failure) if handle.failure else DONE

    def _singles_ended(self, batch: Batch) -> bool:
        while batch.singles:
            answer = self._engine.status(batch.singles[0])
            if answer != STATUS_DONE:
                batch.failure = batch.failure or ("" if answer == STATUS_PENDING else _failure(answer))
            if answer in {STATUS_PENDING, STATUS_UNKNOWN}:
                return False
            del batch.singles[0]
        return True

    def _submit(self, index: int) -> int:
        operations = self._operations
        arguments = (array[index].item() for array in (operations.source, operations.destination, operations.length))
        try:
            single = self._engine.library.transfer_submit_write(self._session, *arguments)
        except LIBRARY_ERRORS as error:
            raise TransportError(_raised(self._session, error)) from error
        if single in NO_BATCH:
            raise TransportError(_refusal(operations, index))
        return single

    def _submit_others(self, batch: Batch, first: int, stop: int) -> None:
        """Give operations in one call. If the library refuses it, it may have posted some of them before."""
        operations = self._operations
        arrays = (operations.source, operations.destination, operations.length)
        submit = self._engine.library.batch_transfer_async_write
        refused = ""
        others = 0
        try:
            others = submit(self._session, *(array[first:stop].tolist() for array in arrays))
        except LIBRARY_ERRORS as error:
            refused = _raised(self._session, error)
        if not refused and others in NO_BATCH:
            refused = _refusal(operations, first, stop - first)
        if refused:
            batch.others, batch.answer = REFUSED, BATCH_FAILED
            raise TransportError(refused)
        batch.others = others


class Waiter:
    """A thread that asks after batches to one peer, one after another. It ends with the last reference to the waiter."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: Thread | None = None
        weakref.finalize(self, self._queue.put, None)

    def ask(self, batch: Batch) -> None:
        """Have the thread fill in `answer` of a batch. Raises TransportError when no thread can be started."""
        if self._thread is None:
            self._thread = start_thread(_answer_all, self._engine, self._queue, name=self._name)
        self._queue.put(batch)

    def end(self, timeout_s: float) -> bool:
        """Ask nothing more. Returns whether the library has answered the last question, at the latest after `timeout_s`."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True


def _answer_all(engine: Engine, queue: SimpleQueue[Batch | None]) -> None:
    while (batch := queue.get()) is not None:
        try:
            batch.answer = engine.library.get_batch_transfer_status([batch.others])
        except (TransportError, *LIBRARY_ERRORS):  # closed, or a defect of the library: the batch may not have ended
            batch.answer = BATCH_FAILED


def _numbers(array: AddressArray) -> Iterator[int]:
    """Yield the elements of an array as Python numbers."""
    return chain.from_iterable(array[at : at + CONVERTED].tolist() for at in range(0, len(array), CONVERTED))


def _refusal(operations: Operations, first: int, count: int = 1) -> str:
    what = f"operation {first}" if count == 1 else f"operations {first} to {first + count - 1}"
    length = int(operations.length[first : first + count].sum())
    return f"mooncake refused {what}: {length} bytes to {int(operations.destination[first]):#x}; {WHY_REFUSED}"


def _raised(session: str, error: Exception) -> str:
    return (
        f"mooncake failed over peer {session} ({type(error).__name__}: {error}); the peer's description cannot be read"
    )


def _failure(answer: int) -> str:
    ended = "" if answer == STATUS_FAILED else " (timed out, not ended)"
    return f"mooncake answered {answer}{ended} for an operation; {WHY_FAILED}"
