"""Pages of a pool into a store and back, compared before anybody uses them.

A store is believed only where it says no. A `hit` of `PageStore` means that every byte of the page has been compared with a digest
that was made where the page was computed. To read a page out of memory takes about as long as to compute its digest. Other
threads therefore compare the pages of a batch while the next batch is read, and make the digests of the batch that is written next.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvbridge.core.geometry.manifest import Region
from kvbridge.core.process import monotonic
from kvbridge.kernels.digest import checksum
from kvbridge.pool.memory.extent import registered_extents
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import (
    BAD,
    BATCH_LIMIT,
    Answer,
    Capabilities,
    ObjectStore,
    Outcome,
    StoredObject,
)
from kvbridge.tier.stores.objects import (
    TRAILER_BYTES,
    ObjectForm,
    PageIds,
    check_request,
    encode_trailer,
    names_of,
    object_name,
    read_trailer,
)

Trailers = npt.NDArray[np.uint8]
LATE = "the deadline came before its turn"


class PageStore:
    """A store of pages. Thread-safe as its store is; at most `calls` requests at once, further ones wait."""

    def __init__(
        self, store: ObjectStore, forms: Sequence[Sequence[Region]], *, model: str = "", calls: int = 4
    ) -> None:
        """`forms`: of each kind of object the regions of this process that its pages lie in; requests name them by position.

        `model`: see ObjectForm. Raises InvalidInputError for regions that cannot be one object, RegistrationError for memory that
        the store cannot use.
        """
        self._store = store
        self.forms = [ObjectForm(regions, model) for regions in forms]
        self._digests = ThreadPoolExecutor(calls, thread_name_prefix="store digests")
        self._free: queue.SimpleQueue[Trailers] = queue.SimpleQueue()
        """Memory for the trailers of one request each."""
        slots = []
        for _ in range(calls):
            memory = np.frombuffer(mmap.mmap(-1, BATCH_LIMIT * TRAILER_BYTES), dtype=np.uint8)
            slots.append(memory.reshape(BATCH_LIMIT, -1))
            self._free.put(slots[-1])
        extents = registered_extents(region for regions in forms for region in regions)
        store.use_memory(
            [(slot.ctypes.data, slot.nbytes) for slot in slots]
            + [(each.address, each.length_bytes) for each in extents]
        )

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities."""
        return self._store.capabilities

    def put(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Store pages that are whole and that nobody writes: `stored`, `full`, `timed_out` or `unreachable` for each.

        `pages`: int32 of shape (keys, spaces of the form). As all verbs: raises InvalidInputError for what names no page, and
        nothing for what the store does; the pages are in use until an answer that is settled.
        """

        def write(request: _Request, objects: list[StoredObject], first: int) -> Answer:
            if first == 0:
                request.begin(request.write_trailer, range(len(objects)))
            request.finish()
            then = first + len(objects)
            request.begin(request.write_trailer, range(then, min(len(keys), then + self.capabilities.batch)))
            return self._store.write(objects, until_s)

        return self._in_batches(form, keys, pages, until_s, write)

    def get(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Fill pages: `hit`, or a miss by its kind; then what the page holds is undefined. Bad objects are dropped."""

        def read(request: _Request, objects: list[StoredObject], first: int) -> Answer:
            answer = self._store.read(objects, until_s)
            # Pages that are not settled may change under our eyes, and so may the trailers.
            hits = [
                at for at, outcome in enumerate(answer.outcomes, first) if outcome is Outcome.HIT and answer.settled
            ]
            request.begin(request.compare, hits)
            if answer.settled:
                return answer
            late = (Outcome.TIMED_OUT if outcome is Outcome.HIT else outcome for outcome in answer.outcomes)
            return Answer(tuple(late), settled=False, detail=answer.detail)

        return self._in_batches(form, keys, pages, until_s, read)

    def has(self, form: int, keys: Keys, until_s: float) -> Answer:
        """Answer `present` or `absent`, which may be otherwise a moment later."""
        return self._by_name(self._store.present, form, keys, until_s)

    def drop(self, form: int, keys: Keys, until_s: float) -> Answer:
        """Answer `dropped`."""
        return self._by_name(self._store.remove, form, keys, until_s)

    def clear(self, form: int, until_s: float) -> Answer:
        """Remove all objects of a form, whoever has put them there."""
        return self._store.clear(names_of(self.forms[form]), until_s)

    def close(self) -> None:
        """Let go of the store."""
        self._digests.shutdown(wait=False)
        self._store.close()

    def _by_name(self, ask: Callable[[list[str], float], Answer], number: int, keys: Keys, until_s: float) -> Answer:
        form = check_request(self.forms, number, keys)
        names = [object_name(form, key) for key in keys.to_list()]
        return ask(names, until_s) if monotonic() < until_s else _late(len(keys))

    def _in_batches(self, number: int, keys: Keys, pages: PageIds, until_s: float, move: _Move) -> Answer:
        """Move the objects of a request, a batch after the other until the deadline, or until one is not settled."""
        form = check_request(self.forms, number, keys)
        form.check(pages, len(keys))
        try:
            trailers = self._free.get(timeout=max(0.0, until_s - monotonic()))
        except queue.Empty:
            return _late(len(keys))
        request = _Request(form, keys, pages, trailers, self._digests)
        outcomes: list[Outcome] = []
        settled, details = True, set()
        while settled and len(outcomes) < len(keys) and monotonic() < until_s:
            first = len(outcomes)
            answer = move(request, request.objects[first : first + self.capabilities.batch], first)
            outcomes += answer.outcomes
            settled = answer.settled
            details.add(answer.detail)
        request.finish()
        for index, outcome in request.wrong.items():
            outcomes[index] = outcome
        judged = zip(request.objects, outcomes, strict=False)
        bad = [each.name for each, outcome in judged if outcome in BAD]
        if bad:
            self._store.remove(bad, until_s)
        if settled:  # else the store may still look at the trailers
            self._free.put(trailers)
        late = len(keys) - len(outcomes)
        if late:
            details.add(LATE)
        return Answer((*outcomes, *[Outcome.TIMED_OUT] * late), settled, "; ".join(sorted(details - {""})))


class _Request:
    """Pages, the objects that they are in the store, and which of these turned out to be wrong."""

    def __init__(
        self, form: ObjectForm, keys: Keys, pages: PageIds, trailers: Trailers, digests: ThreadPoolExecutor
    ) -> None:
        self._form, self._keys, self._trailers, self._digests = form, keys.to_list(), trailers, digests
        self._addresses = form.addresses(pages)
        names = (object_name(form, key) for key in self._keys)
        self.objects = list(map(StoredObject, names, form.stretches(trailers.ctypes.data, self._addresses)))
        self.wrong: dict[int, Outcome] = {}
        self._under_way: list[Future[None]] = []

    def begin(self, task: Callable[[int], None], indexes: Iterable[int]) -> None:
        """Let other threads do something with objects."""
        self._under_way += [self._digests.submit(task, index) for index in indexes]

    def finish(self) -> None:
        """Wait for the end of all of it. Raises what a thread has raised: nobody must take its page for compared."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.result()

    def write_trailer(self, index: int) -> None:
        """Make the trailer of an object, whose page is whole."""
        trailer = encode_trailer(self._form, self._keys[index], self._checksum(index))
        self._trailers[index] = np.frombuffer(trailer, dtype=np.uint8)

    def compare(self, index: int) -> None:
        """Compare an object that has come with what it must be."""
        expected = read_trailer(self._form, self._keys[index], self._trailers[index].tobytes())
        if isinstance(expected, Outcome):
            self.wrong[index] = expected
        elif expected != self._checksum(index):
            self.wrong[index] = Outcome.WRONG_DIGEST

    def _checksum(self, index: int) -> int:
        return checksum(self._addresses[index].tolist(), self._form.lengths)


_Move = Callable[[_Request, list[StoredObject], int], Answer]
"""Moves some objects of a request; its last argument is the position of the first one."""


def _late(count: int) -> Answer:
    return Answer.of_all(Outcome.TIMED_OUT, count, detail=LATE)
