"""Pages of a pool into a store and back, compared before anybody uses them.

Owns: the headers' memory, making and checking digests. Must not know: which store it is, processes, who wants the pages.

What a store answers is believed only where it says no. A `hit` of `PageStore` means that every byte of the page has been compared
with a digest that was made where the page was computed, whatever came between. A digest is computed right before a batch is
written and right after it was read, while the bytes are still in the processor's caches.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Callable, Sequence

from kvbridge.core.clock import monotonic
from kvbridge.core.geometry.manifest import Region
from kvbridge.kernels.digest import checksum
from kvbridge.pool.memory.sharing import registered_extents
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import (
    BATCH_LIMIT,
    REMEDIES,
    Answer,
    Capabilities,
    ObjectStore,
    Outcome,
    Remedy,
    StoredObject,
)
from kvbridge.tier.stores.objects import (
    HEADER_BYTES,
    ObjectForm,
    PageIds,
    check_request,
    encode_header,
    object_name,
    read_header,
)

Move = Callable[[ObjectForm, list[bytes], list[StoredObject]], Answer]
"""What is done with a batch: the form, the page keys and the objects, one for each key."""


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
        memory = mmap.mmap(-1, calls * BATCH_LIMIT * HEADER_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        extents = registered_extents(region for regions in forms for region in regions)
        store.use_memory([(start, len(memory)), *((each.address, each.length_bytes) for each in extents)])
        self._headers: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Addresses of memory for the headers of one request each."""
        self._memory = memory
        for call in range(calls):
            self._headers.put(start + call * BATCH_LIMIT * HEADER_BYTES)

    @property
    def capabilities(self) -> Capabilities:
        """What the store is."""
        return self._store.capabilities

    def put(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Store pages that are whole and that nobody writes: `stored`, `full`, `timed_out` or `unreachable` for each.

        `pages`: int32 of shape (keys, spaces of the form). As all verbs: raises InvalidInputError for what names no page, and
        nothing for what the store does; the pages are in use until an answer that is settled.
        """

        def write(form: ObjectForm, keys: list[bytes], objects: list[StoredObject]) -> Answer:
            for key, (_, [header, *parts]) in zip(keys, objects, strict=True):
                header.raw = encode_header(form, key, checksum(parts))
            return self._store.write(objects, until_s)

        return self._in_batches(form, keys, pages, until_s, write)

    def get(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Fill pages: `hit`, or a miss by its kind; then what the page holds is undefined. Bad objects are dropped."""

        def read(form: ObjectForm, keys: list[bytes], objects: list[StoredObject]) -> Answer:
            answer = self._store.read(objects, until_s)
            if not answer.settled:  # what was read may change under our eyes, and so may the headers
                return _without_hits(answer)
            outcomes = tuple(
                _compare(form, key, each) if outcome is Outcome.HIT else outcome
                for key, each, outcome in zip(keys, objects, answer.outcomes, strict=True)
            )
            judged = zip(objects, outcomes, strict=True)
            bad = [each.name for each, outcome in judged if REMEDIES[outcome] is Remedy.REPLACE]
            if bad:
                self._store.remove(bad, until_s)
            return Answer(outcomes, detail=answer.detail)

        return self._in_batches(form, keys, pages, until_s, read)

    def has(self, form: int, keys: Keys, until_s: float) -> Answer:
        """`present` or `absent`, which may be otherwise a moment later."""
        names = self._names(form, keys)
        return self._store.present(names, until_s) if monotonic() < until_s else _late(len(keys))

    def drop(self, form: int, keys: Keys, until_s: float) -> Answer:
        """`dropped`."""
        names = self._names(form, keys)
        return self._store.remove(names, until_s) if monotonic() < until_s else _late(len(keys))

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _names(self, number: int, keys: Keys) -> list[str]:
        form = check_request(self.forms, number, keys)
        return [object_name(form, key) for key in keys.to_list()]

    def _in_batches(self, number: int, keys: Keys, pages: PageIds, until_s: float, move: Move) -> Answer:
        """Move the objects of a request, a batch after the other until the deadline, or until one is not settled."""
        form = check_request(self.forms, number, keys)
        form.check(pages, len(keys))
        try:
            headers = self._headers.get(timeout=max(0.0, until_s - monotonic()))
        except queue.Empty:
            return _late(len(keys))
        names, batch = keys.to_list(), self.capabilities.batch
        outcomes: list[Outcome] = []
        settled, details = True, set()
        while settled and len(outcomes) < len(names) and monotonic() < until_s:
            some = range(len(outcomes), min(len(names), len(outcomes) + batch))
            objects = [
                StoredObject(
                    object_name(form, names[index]),
                    [_stretch(headers + index * HEADER_BYTES, HEADER_BYTES), *_parts(form, pages[index])],
                )
                for index in some
            ]
            answer = move(form, [names[index] for index in some], objects)
            outcomes += answer.outcomes
            settled = answer.settled
            details.add(answer.detail)
        if settled:  # else the store may still look at the headers
            self._headers.put(headers)
        late = len(names) - len(outcomes)
        if late:
            details.add(LATE)
        return Answer((*outcomes, *[Outcome.TIMED_OUT] * late), settled, "; ".join(sorted(details - {""})))


LATE = "the deadline came before its turn"


def _late(count: int) -> Answer:
    return Answer.of_all(Outcome.TIMED_OUT, count, detail=LATE)


def _without_hits(read: Answer) -> Answer:
    outcomes = tuple(Outcome.TIMED_OUT if outcome is Outcome.HIT else outcome for outcome in read.outcomes)
    return Answer(outcomes, settled=False, detail=read.detail)


def _stretch(address: int, length: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * length).from_address(address)


def _parts(form: ObjectForm, page: PageIds) -> list[ctypes.Array[ctypes.c_char]]:
    return list(map(_stretch, form.addresses(page), form.lengths))


def _compare(form: ObjectForm, key: bytes, found: StoredObject) -> Outcome:
    header, *parts = found.pieces
    expected = read_header(form, key, header.raw)
    if isinstance(expected, Outcome):
        return expected
    return Outcome.HIT if expected == checksum(parts) else Outcome.WRONG_DIGEST
