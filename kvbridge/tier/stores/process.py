"""The process that uses a store for its node: `python -m kvbridge.tier.stores.process`. Only `client` starts it.

A store's calls may take a minute and more, and go on moving bytes after their caller has given up. They happen here: the end of
this process is the proof that none of its pages is read or written any more.

A store is believed only where it says no. A `hit` of `PageStore` means that every byte of the page has been compared with a digest
that was made where the page was computed. To read a page out of memory takes about as long as to compute its digest. Other
threads therefore compare the pages of a batch while the next batch is read, and make the digests of the batch that is written next.
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import TypeAdapter

from kvbridge.config.tier import FileStoreSettings, StoreSettings
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.process import monotonic
from kvbridge.kernels.digest import checksum
from kvbridge.pool.memory.layout import registered_extents
from kvbridge.pool.memory.pools import MappedRegions
from kvbridge.processes import end_with_parent
from kvbridge.telemetry.logs import configure_logs
from kvbridge.tier.keys import NO_KEYS, Keys
from kvbridge.tier.stores.objects import (
    BAD,
    BATCH_LIMIT,
    LENGTH,
    NO_PAGES,
    NODE_TO_STORE,
    STORE_TO_NODE,
    TRAILER_BYTES,
    Answer,
    ObjectForm,
    Outcome,
    PageIds,
    StoredObject,
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

if TYPE_CHECKING:
    from kvbridge.tier.stores.files import FileStore
    from kvbridge.tier.stores.mooncake import MooncakeStore

ObjectStore: TypeAlias = "FileStore | MooncakeStore"
EXIT_FAILED = 3
"""The process could not serve. It has told the node why, or the log has the reason."""
LATE = "the deadline came before its turn"
Trailers = npt.NDArray[np.uint8]

log = structlog.get_logger(__name__)


def open_store(settings: StoreSettings) -> ObjectStore:
    """Open the store of a configuration section. Raises BridgeError, with cause and cure."""
    if isinstance(settings, FileStoreSettings):
        from kvbridge.tier.stores.files import FileStore  # noqa: PLC0415 - only the one that is asked for

        return FileStore(settings)
    from kvbridge.tier.stores.mooncake import MooncakeStore  # noqa: PLC0415

    return MooncakeStore(settings)


class PageStore:
    """A store of pages. Thread-safe as its store is; at most `calls` requests at once, further ones wait."""

    def __init__(
        self, store: ObjectStore, forms: Sequence[Sequence[Region]], *, model: str = "", calls: int = 4
    ) -> None:
        """`forms`: for each kind of object, the regions of this process that its pages lie in; requests name forms by position.

        `model`: see ObjectForm. Raises InvalidInputError for regions that cannot be one object, RegistrationError for memory that
        the store cannot use.
        """
        self.store = store
        self.forms = [ObjectForm(regions, model) for regions in forms]
        self._digests = ThreadPoolExecutor(calls, thread_name_prefix="store digests")
        self._free: queue.SimpleQueue[Trailers] = queue.SimpleQueue()
        """Memory for the trailers of one request each."""
        slots = [
            np.frombuffer(mmap.mmap(-1, BATCH_LIMIT * TRAILER_BYTES), dtype=np.uint8).reshape(BATCH_LIMIT, -1)
            for _ in range(calls)
        ]
        for slot in slots:
            self._free.put(slot)
        extents = registered_extents(region for regions in forms for region in regions)
        store.use_memory(
            [(slot.ctypes.data, slot.nbytes) for slot in slots]
            + [(each.address, each.length_bytes) for each in extents]
        )

    def ask(self, verb: Verb, form: int, keys: Keys = NO_KEYS, pages: PageIds = NO_PAGES, *, until_s: float) -> Answer:
        """Carry out a request. See `StoreClient.begin` for its arguments, and Verb for the outcomes.

        Raises InvalidInputError for a request that names no page, and nothing for the store's state. The pages are in use until an
        answer that is settled. A page that was not a `hit` is undefined; bad objects are dropped.
        """
        if verb is Verb.CLEAR:
            return self.store.clear(self.forms[form].prefix, until_s)
        known = check_request(self.forms, form, keys)
        if verb in {Verb.PUT, Verb.GET}:
            known.check(pages, len(keys))
            return self._move(verb, known, keys, pages, until_s)
        if monotonic() >= until_s:
            return Answer.of_all(Outcome.TIMED_OUT, len(keys), detail=LATE)
        names = [known.object_name(key) for key in keys.to_list()]
        return self.store.present(names, until_s) if verb is Verb.HAS else self.store.remove(names, until_s)

    def close(self) -> None:
        """Let go of the store."""
        self._digests.shutdown(wait=False)
        self.store.close()

    def _move(self, verb: Verb, form: ObjectForm, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Move the objects of a request, one batch after the other, until the deadline or until one is not settled."""
        try:
            trailers = self._free.get(timeout=max(0.0, until_s - monotonic()))
        except queue.Empty:
            return Answer.of_all(Outcome.TIMED_OUT, len(keys), detail=LATE)
        request, batch = _Request(form, keys, pages, trailers, self._digests), self.store.batch
        if verb is Verb.PUT:
            request.begin(request.write_trailer, range(min(len(keys), batch)))
        outcomes: list[Outcome] = []
        settled, details = True, set()
        while settled and len(outcomes) < len(keys) and monotonic() < until_s:
            first, then = len(outcomes), min(len(keys), len(outcomes) + batch)
            objects = request.objects[first:then]
            if verb is Verb.PUT:
                request.finish()
                request.begin(request.write_trailer, range(then, min(len(keys), then + batch)))
                answer = self.store.write(objects, until_s)
                outcomes += answer.outcomes
            else:
                answer = self.store.read(objects, until_s)
                if answer.settled:
                    hits = [at for at, outcome in enumerate(answer.outcomes, first) if outcome is Outcome.HIT]
                    request.begin(request.compare, hits)
                # Pages that are not settled may still change, and so may the trailers.
                hit = Outcome.HIT if answer.settled else Outcome.TIMED_OUT
                outcomes += [hit if outcome is Outcome.HIT else outcome for outcome in answer.outcomes]
            settled = answer.settled
            details.add(answer.detail)
        request.finish()
        for index, outcome in request.wrong.items():
            outcomes[index] = outcome
        bad = {each.name: outcome for each, outcome in zip(request.objects, outcomes, strict=False) if outcome in BAD}
        if bad:
            name, outcome = next(iter(bad.items()))
            log.warning("store_objects_refused", objects=len(bad), first=name, outcome=outcome.value)
            self.store.remove([*bad], until_s)
        if settled:  # else the store may still look at the trailers
            self._free.put(trailers)
        if late := len(keys) - len(outcomes):
            outcomes += [Outcome.TIMED_OUT] * late
            details.add(LATE)
        return Answer(outcomes=tuple(outcomes), settled=settled, detail="; ".join(sorted(details - {""})))


class _Request:
    """Pages, the objects that they are in the store, and which of these turned out to be wrong."""

    def __init__(
        self, form: ObjectForm, keys: Keys, pages: PageIds, trailers: Trailers, digests: ThreadPoolExecutor
    ) -> None:
        self._form, self._keys, self._trailers, self._digests = form, keys.to_list(), trailers, digests
        self._addresses = form.addresses(pages)
        names = map(form.object_name, self._keys)
        self.objects = list(map(StoredObject, names, form.stretches(trailers.ctypes.data, self._addresses)))
        self.wrong: dict[int, Outcome] = {}
        self._under_way: list[Future[None]] = []

    def begin(self, task: Callable[[int], None], indexes: Iterable[int]) -> None:
        """Let other threads do something with objects."""
        self._under_way += [self._digests.submit(task, index) for index in indexes]

    def finish(self) -> None:
        """Wait until all of it has ended. Raises the error of a thread: nobody must take its page for compared."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.result()

    def write_trailer(self, index: int) -> None:
        """Make the trailer of an object, whose page is whole."""
        trailer = self._form.trailer(self._keys[index], self._checksum(index))
        self._trailers[index] = np.frombuffer(trailer, dtype=np.uint8)

    def compare(self, index: int) -> None:
        """Compare an object that was read with its key and its digest."""
        expected = self._form.read_trailer(self._keys[index], self._trailers[index].tobytes())
        if isinstance(expected, Outcome):
            self.wrong[index] = expected
        elif expected != self._checksum(index):
            self.wrong[index] = Outcome.WRONG_DIGEST

    def _checksum(self, index: int) -> int:
        return checksum(self._addresses[index].tolist(), self._form.lengths)


# ------------------------------------------------------------------ the process


def main(arguments: list[str] | None = None) -> int:
    """Serve until the pipe ends. Returns the exit code."""
    # Signals that end services are the node's, which ends this process when its pages are settled.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="kvbridge store process")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    given = parser.parse_args(arguments)
    end_with_parent(given.parent, signal.SIGKILL)
    # Lines that libraries print go to the log, not between our messages.
    link = _Link(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    configure_logs(names={}, level=given.log_level, form="json")
    try:
        setup = link.receive()
        if not isinstance(setup, StoreSetup):
            return EXIT_FAILED
        mapped = MappedRegions(region for form in setup.forms for region in form)
        ends = accumulate((len(form) for form in setup.forms), initial=0)
        settings: StoreSettings = TypeAdapter(StoreSettings).validate_json(setup.settings)
        forms = [mapped.regions[start:stop] for start, stop in pairwise(ends)]
        store = PageStore(open_store(settings), forms, model=setup.model, calls=setup.calls)
    except BridgeError as error:
        log.error("store_cannot_open", code=error.code, reason=str(error))
        link.send(StoreFailed(message=str(error)))
        return EXIT_FAILED
    link.send(StoreReady(kind=store.store.kind))
    orders: queue.SimpleQueue[StoreOrder] = queue.SimpleQueue()
    for number in range(setup.calls):
        threading.Thread(target=_work, args=(store, orders, link), name=f"store {number}", daemon=True).start()
    while isinstance(order := link.receive(), StoreOrder):
        orders.put(order)
    store.close()
    return 0


def _work(store: PageStore, orders: queue.SimpleQueue[StoreOrder], link: _Link) -> None:
    """Carry out orders, one at a time, until the process ends."""
    try:
        while True:
            order = orders.get()
            keys = Keys(order.keys)
            pages = np.frombuffer(order.pages, dtype="<i4").reshape(max(1, len(keys)), -1)
            answer = store.ask(order.verb, order.form, keys, pages, until_s=order.until_s)
            link.send(StoreReport(number=order.number, **dict(answer)))
    except BridgeError as error:
        log.error("store_cannot_go_on", code=error.code, reason=str(error))
        link.send(StoreFailed(message=str(error)))
        os._exit(EXIT_FAILED)
    except Exception:  # other calls may be in any state, and end with this process
        log.exception("store_thread_failed")
        os._exit(EXIT_FAILED)


class _Link:
    """This process's ends of the pipes: one thread receives, any thread sends."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._sending = threading.Lock()

    def send(self, message: StoreReady | StoreFailed | StoreReport) -> None:
        """Send a message. When the node is gone, nobody wants it, and the receiving thread sees the end."""
        with self._sending:
            try:
                self._sink.write(framed(STORE_TO_NODE.encode_body(message)))
                self._sink.flush()
            except OSError as error:
                log.debug("store_report_unread", reason=str(error))

    def receive(self) -> StoreSetup | StoreOrder | None:
        """Wait for the next message; None when the node has ended the pipe. Raises FrameError for bytes that are no message."""
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        body = self._source.read(length := length_of(head))
        return NODE_TO_STORE.decode_body(body) if len(body) == length else None


if __name__ == "__main__":
    # Mooncake runs threads of its own that do not like the interpreter's orderly end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
