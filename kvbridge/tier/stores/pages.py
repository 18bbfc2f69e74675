"""Pages of a pool into a store and back, compared before anybody uses them.

Owns: the headers' memory, making and checking digests. Must not know: which store it is, processes,
who wants the pages.

What a store answers is believed only where it says no. A `hit` of `PageStore` means that every byte of the page has been compared
with a digest that was made where the page was computed, whatever came between.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.clock import monotonic
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.digest import raw_checksums
from kvbridge.pool.memory.sharing import registered_extents
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import (
    BATCH_LIMIT,
    REMEDIES,
    Answer,
    Capabilities,
    ObjectStore,
    Outcome,
    Pieces,
    Remedy,
    StoredObject,
)
from kvbridge.tier.stores.objects import HeaderFault, ObjectForm, encode_header, object_name, read_header
from kvbridge.tier.stores.places import PageIds, PagePlaces, check_request

Rows = npt.NDArray[np.uint8]
"""Memory for the headers of one request, one row each."""


class PageStore:
    """A store of pages. Thread-safe as its store is; at most `calls` requests at once, further ones wait."""

    def __init__(self, store: ObjectStore, forms: Sequence[Sequence[Region]], *, calls: int = 4) -> None:
        """`forms`: of each kind of object the regions of this process that its pages lie in; requests name them by position.

        Raises InvalidInputError for regions that cannot be one object, RegistrationError for memory that the store cannot use.
        """
        self._store = store
        self.places = tuple(PagePlaces(regions) for regions in forms)
        self._row_bytes = -(-max(places.form.header_bytes for places in self.places) // 64) * 64
        memory = mmap.mmap(-1, calls * BATCH_LIMIT * self._row_bytes)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(calls, BATCH_LIMIT, self._row_bytes)
        extents = registered_extents(region for regions in forms for region in regions)
        store.use_memory([(rows.ctypes.data, len(memory)), *((each.address, each.length_bytes) for each in extents)])
        self._free: queue.SimpleQueue[Rows] = queue.SimpleQueue()
        for each in rows:
            self._free.put(each)

    @property
    def capabilities(self) -> Capabilities:
        """What the store is."""
        return self._store.capabilities

    def put(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Store pages that are whole and that nobody writes: `stored`, `full`, `timed_out` or `unreachable` for each.

        `pages`: int32 of shape (keys, spaces of the form). As all verbs: raises InvalidInputError for what names no page, and
        nothing for what the store does; the pages are in use until an answer that is settled.
        """
        places = self._checked(form, keys, pages)
        rows = self._rows(until_s)
        if rows is None:
            return _late(keys)
        objects = self._objects(places, keys, pages, rows)
        for row, key, each in zip(rows, keys.to_list(), objects, strict=False):
            header = encode_header(places.form, key, _digests(each.pieces[1:]))
            row[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        answer = self._store.write(objects, until_s)
        if answer.settled:  # else the store may still look at these rows
            self._free.put(rows)
        return answer

    def get(self, form: int, keys: Keys, pages: PageIds, until_s: float) -> Answer:
        """Fill pages: `hit`, or a miss by its kind; then what the page holds is undefined. Bad objects are dropped."""
        places = self._checked(form, keys, pages)
        rows = self._rows(until_s)
        if rows is None:
            return _late(keys)
        objects = self._objects(places, keys, pages, rows)
        read = self._store.read(objects, until_s)
        if not read.settled:  # what was read may change under our eyes, and so may these rows
            return _without_hits(read)
        outcomes = list(read.outcomes)
        for index, key in enumerate(keys.to_list()):
            if outcomes[index] is Outcome.HIT:
                header = rows[index, : places.form.header_bytes].tobytes()
                outcomes[index] = _compare(places.form, key, header, objects[index].pieces[1:])
        self._free.put(rows)
        bad = [
            each.name for each, outcome in zip(objects, outcomes, strict=True) if REMEDIES[outcome] is Remedy.REPLACE
        ]
        if bad:
            self._store.remove(bad, until_s)
        return Answer(tuple(outcomes), detail=read.detail)

    def has(self, form: int, keys: Keys, until_s: float) -> Answer:
        """`present` or `absent`, which may be otherwise a moment later."""
        names = self._names(form, keys)
        return self._store.present(names, until_s) if monotonic() < until_s else _late(keys)

    def drop(self, form: int, keys: Keys, until_s: float) -> Answer:
        """`dropped`."""
        names = self._names(form, keys)
        return self._store.remove(names, until_s) if monotonic() < until_s else _late(keys)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _names(self, form: int, keys: Keys) -> list[str]:
        places = check_request(self.places, form, keys)
        return [object_name(places.form, key) for key in keys.to_list()]

    def _checked(self, form: int, keys: Keys, pages: PageIds) -> PagePlaces:
        places = check_request(self.places, form, keys)
        places.check(pages, len(keys))
        return places

    def _objects(self, places: PagePlaces, keys: Keys, pages: PageIds, rows: Rows) -> list[StoredObject]:
        found = []
        for index, (key, page) in enumerate(zip(keys.to_list(), pages, strict=True)):
            pieces = np.empty((1 + len(places.form.parts), 2), dtype=np.uint64)
            pieces[0] = rows.ctypes.data + index * self._row_bytes, places.form.header_bytes
            pieces[1:, 0], pieces[1:, 1] = places.addresses(page), places.form.lengths
            found.append(StoredObject(object_name(places.form, key), pieces))
        return found

    def _rows(self, until_s: float) -> Rows | None:
        """Memory for the headers of one request; None at the deadline, until which other requests may have all of it."""
        try:
            left_s = until_s - monotonic()
            return self._free.get(timeout=left_s) if left_s > 0 else None
        except queue.Empty:
            return None


def _late(keys: Keys) -> Answer:
    return Answer.of_all(Outcome.TIMED_OUT, len(keys), detail="the deadline came before its turn")


def _without_hits(read: Answer) -> Answer:
    outcomes = tuple(Outcome.TIMED_OUT if outcome is Outcome.HIT else outcome for outcome in read.outcomes)
    return Answer(outcomes, settled=False, detail=read.detail)


def _digests(pieces: Pieces) -> npt.NDArray[np.uint32]:
    return raw_checksums(pieces[:, 0], pieces[:, 1].astype(np.int64), MemoryKind.DRAM)


def _compare(form: ObjectForm, key: bytes, header: bytes, pieces: Pieces) -> Outcome:
    expected = read_header(form, key, header)
    if isinstance(expected, HeaderFault):
        return Outcome(expected.value)
    return Outcome.HIT if np.array_equal(expected, _digests(pieces)) else Outcome.WRONG_DIGEST
