"""Records of cached pages: a flat map from keys, in which no page is without the page before it.

A key names all tokens up to a page's end. No record is without its *parent*, the record of the page before. The known pages of a
prompt are therefore a run from its first page on, and a binary search finds the end: there is no tree to walk, to split or to join.
Such a run is a *path*: records from a prompt's first page on, each the parent of the next. A record without children is a *leaf*.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, InvalidInputError
from kvbridge.core.ids import PageIdArray, Pages
from kvbridge.tier.keys import Keys, Link

RecordArray = npt.NDArray[np.int32]
"""Numbers of records, in the order of their pages in a prompt unless stated otherwise."""

NO_RECORD = -1
"""Stands for the parent of a prompt's first page, and for the number of children of a record that is not in a subtree."""
_UNUSED = -2
"""Stands for the parent of a number that is no record now."""
_NO_RECORDS = np.empty(0, dtype=np.int32)
_FEW = 16
"""Up to so many records, looking one by one is faster."""


class Records:
    """Up to `capacity` records, numbered from 0. Numbers are used again. Callers keep arrays of `capacity` places by number."""

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= np.iinfo(np.int32).max:
            raise InvalidInputError(f"an index has 1 to 2^31 - 1 records, got {capacity}")
        self.capacity = capacity
        self._record_of: dict[bytes, int] = {}
        # Zeros that nobody touches take no memory.
        self._key = np.zeros((capacity, 2), dtype=np.uint64)
        self._depth = np.zeros(capacity, dtype=np.int32)
        self._is_hidden = np.zeros(capacity, dtype=np.bool_)
        self.parent = np.full(capacity, _UNUSED, dtype=np.int32)
        self.parent_at = self.parent.data  # reading one element is several times faster through this
        self._unused = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        """A stack of the numbers that are no records; its first `_unused_count` places count."""
        self._unused_count = capacity
        self._is_changed = np.zeros(capacity, dtype=np.bool_)

    def changed(self, records: RecordArray | int) -> None:
        """Mark records whose pages have come, gone, or become unreachable."""
        self._is_changed[records] = True

    def take_changed(self) -> RecordArray:
        """Return the numbers that were marked since the last call; some may be no records, or other ones, by now."""
        found = np.flatnonzero(self._is_changed).astype(np.int32)
        self._is_changed[found] = False
        return found

    def __len__(self) -> int:
        """Number of records, also hidden ones."""
        return self.capacity - self._unused_count

    @property
    def reachable(self) -> int:
        """Number of records that keys lead to."""
        return len(self._record_of)

    def all(self) -> RecordArray:
        """Return all records, also hidden ones, by number."""
        return np.flatnonzero(self.parent != _UNUSED).astype(np.int32)

    def match(self, keys: Keys, at_most: int) -> RecordArray:
        """Return the path of the longest known run of `keys` from the first on, of at most so many pages."""
        known, stop, last = 0, min(len(keys), len(self), max(0, at_most)), NO_RECORD
        while known < stop:  # the key of page `known` (counted from 1) is known, keys behind `stop` are not
            middle = (known + stop + 1) // 2
            record = self._record_of.get(keys[middle - 1])
            if record is None:
                stop = middle - 1
            else:
                known, last = middle, record
        if not known:
            return _NO_RECORDS
        path = self.path(last) if self._depth[last] == known - 1 else _NO_RECORDS
        if keys.shared_with(self.keys(path)) == known:
            return path
        # Keys come from outside: a key may be that of a page on another path, and only the keys before it count.
        return self._walk(keys[:known])

    def _walk(self, keys: Keys) -> RecordArray:
        """Return the path of the longest run of keys in which each record is the child of the one before."""
        found, last = [], NO_RECORD
        for key in keys.to_list():
            record = self._record_of.get(key)
            if record is None or self.parent_at[record] != last:
                break
            found.append(record)
            last = record
        return np.array(found, dtype=np.int32)

    def path_to(self, key: bytes) -> RecordArray:
        """Return the path that ends with the record of this key; empty when there is none."""
        record = self._record_of.get(key)
        return _NO_RECORDS if record is None else self.path(record)

    def is_path(self, records: RecordArray) -> bool:
        """Return whether each is the parent of the next, wherever the first is."""
        if self.parent_at[records[0]] == _UNUSED:
            return False
        if len(records) <= _FEW:
            return all(self.parent_at[child] == parent for parent, child in pairwise(records.tolist()))
        return bool((self.parent[records[1:]] == records[:-1]).all())

    def is_hidden(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are hidden: no key leads to them any more."""
        return self._is_hidden[records]

    def create(self, keys: Keys, path: RecordArray) -> RecordArray:
        """Make records for the keys behind a path, up to a key that has a record elsewhere. They must enter a residence next.

        Raises IntegrityError when there are no numbers left.
        """
        known = len(path)
        new = keys[known:].to_list()
        if not self._record_of.keys().isdisjoint(new) or len(set(new)) != len(new):
            new = new[: self._unknown(new)]
        if not new:
            return _NO_RECORDS
        if len(new) > self._unused_count:
            raise IntegrityError(f"{len(new)} pages are cached beside {len(self)}, of {self.capacity} that there are")
        self._unused_count -= len(new)
        records = self._unused[self._unused_count : self._unused_count + len(new)][::-1].copy()
        self._record_of.update(zip(new, records.tolist(), strict=True))
        self._key[records] = np.frombuffer(keys.data, np.uint64).reshape(-1, 2)[known : known + len(new)]
        self._depth[records] = np.arange(known, known + len(new))
        parent = int(path[-1]) if known else NO_RECORD
        self.parent[records[0]] = parent
        self.parent[records[1:]] = records[:-1]
        return records

    def _unknown(self, keys: list[bytes]) -> int:
        """Count the first keys that have no record and that no key before repeats."""
        seen: set[bytes] = set()
        for key in keys:
            if key in self._record_of or key in seen:
                break
            seen.add(key)
        return len(seen)

    def hide(self, records: RecordArray) -> None:
        """Let no key lead to these any more. Every record that depends on them is among them, or hidden."""
        for key in self.keys(records).to_list():
            del self._record_of[key]
        self._is_hidden[records] = True
        self.changed(records)

    def forget(self, records: RecordArray) -> None:
        """Give back the numbers of records that are in no residence any more."""
        self.hide(records[~self._is_hidden[records]])
        self._is_hidden[records] = False
        self.parent[records] = _UNUSED
        self._unused[self._unused_count : self._unused_count + len(records)] = records
        self._unused_count += len(records)

    def descendants(self, records: RecordArray) -> RecordArray:
        """Return records and all that depend on them, deepest first. Each step looks twice as far up as the one before."""
        there, top = self.all(), self.capacity
        found = np.zeros(top + 1, dtype=np.bool_)
        found[records] = True
        above = np.full(top + 1, top, dtype=np.int32)
        above[there] = np.where(self.parent[there] == NO_RECORD, top, self.parent[there])
        while (above[there] != top).any():
            found[there] |= found[above[there]]
            above[there] = above[above[there]]
        return self.deepest_first(there[found[there]])

    def deepest_first(self, records: RecordArray) -> RecordArray:
        """Return records in an order in which each comes before its parent."""
        return records[np.argsort(-self._depth[records], kind="stable")]

    def runs(self, records: RecordArray) -> list[RecordArray]:
        """Cut records into runs, in each of which every record is the parent of the next; no run comes before its first parent."""
        if not len(records):
            return []
        next_of = np.full(self.capacity, NO_RECORD, dtype=np.int32)
        head = np.arange(self.capacity, dtype=np.int32)
        is_in = np.zeros(self.capacity, dtype=np.bool_)
        is_in[records] = True
        children = records[self.parent[records] != NO_RECORD]
        children = children[is_in[self.parent[children]]]
        next_of[self.parent[children]] = children  # one child of each record goes on in its run
        going_on = children[next_of[self.parent[children]] == children]
        head[going_on] = self.parent[going_on]
        while (head[head[going_on]] != head[going_on]).any():
            head[going_on] = head[head[going_on]]
        first = head[records]
        ordered = records[np.lexsort((self._depth[records], first, self._depth[first]))]
        return np.split(ordered, np.flatnonzero(np.diff(head[ordered])) + 1)

    def path(self, record: int) -> RecordArray:
        """Return all records from a prompt's first page to this one."""
        parent_at = self.parent_at
        found = []
        while record != NO_RECORD:
            found.append(record)
            record = parent_at[record]
        found.reverse()
        return np.array(found, dtype=np.int32)

    def links(self, records: RecordArray) -> list[Link]:
        """Return the links of records, in their order."""
        parents = self.parent[records]
        before = self.keys(parents).to_list()  # wrong for the first page of a prompt, where it is not used
        keys = self.keys(records).to_list()
        return [
            (b"" if parent == NO_RECORD else key_before, key)
            for parent, key_before, key in zip(parents.tolist(), before, keys, strict=True)
        ]

    def keys(self, records: RecordArray) -> Keys:
        """Return the keys of records."""
        return Keys(self._key[records].tobytes())


def join(pages: list[PageIdArray]) -> PageIdArray:
    """Return the ids of several arrays, or of none, as one."""
    return np.concatenate(pages) if pages else np.empty(0, dtype=np.int32)


def merged(parts: Sequence[Pages]) -> Pages:
    """Return pages of several origins, space by space."""
    found: Pages = {}
    for pages in parts:
        for space, ids in pages.items():
            found[space] = np.concatenate((found[space], ids)) if space in found else ids
    return found


def without_empty(pages: Pages) -> Pages:
    """Leave out spaces without a page: the node may not have them."""
    return {space: ids for space, ids in pages.items() if len(ids)}
