"""The prefixes of a node: a record for each cached page, found by its key.

- A record is on the device, on the host as its *host copy*, or both; each `Residence` has its own pages, readers and checkpoints.
  The first records of a path are on the device, the others on the host only.
- A space without host copies (the host pool) is the *home* of records: they have a page there wherever else they are.
- Only records that nobody pins are evicted, leaf by leaf, so no page is ever without its parent. The longest unused go first; among
  the old ones, neighbours go together (`residence.py`). A record that is nowhere any more is gone.
- A dropped record is *unreachable* at once, for every key; its pinned pages come back with the last unpin.

Records are numbers, and arrays hold their facts: a page takes less than 300 bytes. A caller that uses the number of a record has
pinned the record, or pins it in the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import BridgeError, CapacityError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, Pages
from kvbridge.core.prefixes import Evicted
from kvbridge.tier.keys import Keys
from kvbridge.tier.records import NO_RECORD, RecordArray, Records, join, merged
from kvbridge.tier.residence import Inserted, Residence
from kvbridge.tier.retention import Claim, Retentions, base_rank

CHECKPOINT_SPACE = IndexSpace.SWA
NO_PAGES = np.empty(0, dtype=np.int32)


class PrefixIndex:
    """The cached pages of one node. Used by the event loop's thread only."""

    def __init__(
        self, spaces: Sequence[IndexSpace], capacity: int, *, has_copies: bool = False, retained_share: float = 0.0
    ) -> None:
        """`spaces`: a record has one page in each. `capacity`: the most records. `has_copies`: pages of `full` may be on the host.

        `retained_share`: see `Retentions`.
        """
        on_device = tuple(space for space in spaces if space in HOST_COPIES or not has_copies)
        if not on_device or len(set(spaces)) != len(spaces) or CHECKPOINT_SPACE in spaces:
            raise InvalidInputError(
                f"an index has a page of each of some spaces that grow with tokens, got {list(spaces)}"
            )
        self.spaces, self.capacity, self.records = tuple(spaces), capacity, Records(capacity)
        self._rank = np.zeros(capacity, dtype=np.float64)
        self.uses = np.zeros(capacity, dtype=np.int32)
        """Number of uses of each record; no record has more than its parent."""
        self.retentions = Retentions(capacity, share=retained_share)
        self.evicted: Counter[Evicted] = Counter()
        """Numbers of records that are gone, by reason."""
        self.device = Residence(self.records, on_device, self._rank, checkpoint_space=CHECKPOINT_SPACE)
        self.host: Residence | None = None
        """The host copies; None: there are none."""
        self.home: Residence | None = None
        """The pages that records have wherever they are. None: there are none, or no host copies, and `device` has them."""
        if has_copies:
            copies = [HOST_COPIES[space] for space in on_device]
            self.host = Residence(self.records, copies, self._rank, checkpoint_space=HOST_COPIES[CHECKPOINT_SPACE])
            if len(on_device) < len(spaces):
                homes = [space for space in spaces if space not in on_device]
                self.home = Residence(self.records, homes, self._rank)
        self.residences = tuple(one for one in (self.device, self.host, self.home) if one is not None)
        self.kept_since = -math.inf
        """Every record that was used after this is still there, with its checkpoint, unless it was dropped."""

    # ------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        """Number of records, also unreachable ones."""
        return len(self.records)

    def match(self, keys: Keys, *, at_most: int | None = None) -> RecordArray:
        """Return the path of the longest known run of `keys` from the first on, of at most so many pages.

        The first `device.depth(path)` records are on the device; if there are others, all of the path is on the host.
        """
        return self.records.match(keys, len(keys) if at_most is None else at_most)

    def prompt_of(self, key: bytes) -> Keys:
        """Return the keys of all pages up to the page of this key; empty when the key is not known."""
        return self.records.keys(self.records.path_to(key))

    def pages(self, records: RecordArray) -> Pages:
        """Return the pages of records that are on the device, in their order, by space."""
        return self.device.pages(records) | self.home_pages(records)

    def home_pages(self, records: RecordArray) -> Pages:
        """Return the pages that records have wherever they are."""
        return {} if self.home is None else self.home.pages(records)

    def checkpointed(self, path: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which records of a path have a checkpoint, on the device or the host."""
        found = self.device.checkpointed(path)
        return found if self.host is None else found | self.host.checkpointed(path)

    def evictable(self) -> dict[IndexSpace, int]:
        """Return the number of pages of each space that `evict` could give now."""
        found = self.device.evictable()
        for residence in self.residences[1:]:
            found |= residence.evictable()
        return found

    # ------------------------------------------------------------------------------------- use

    def pin(self, records: RecordArray, *, device: int | None = None, host: int = 0) -> None:
        """Count a reader on every record of a path, or of a part that continues a path which the same reader has pinned.

        The reader reads the first `device` records on the device (None: all), and the first `host` on the host. Raises
        IntegrityError, and changes nothing, when the records are no such path or not there.
        """
        parts = self._parts(records, device, host, "pin")
        for residence, part in parts:
            residence.require_pinnable(part)
        for residence, part in parts:
            residence.pin(part)

    def unpin(self, records: RecordArray, *, device: int | None = None, host: int = 0) -> Pages:
        """Undo all pins of one reader: a path from a prompt's first page on.

        Returns the pages of dropped records that nobody reads any more; mostly none. Raises IntegrityError, and changes nothing,
        when the records are no such path or have been unpinned before.
        """
        parts = self._parts(records, device, host, "unpin", whole=True)
        for residence, part in parts:
            residence.require_pinned(part)
        over = []
        for residence, part in parts:
            ended = residence.unpin(part)
            ended = ended[self.records.is_hidden(ended) | residence.lost(ended)]
            if len(ended):
                over.append((residence, ended[::-1]))
        return self._release(over) if over else {}

    def touch(self, records: RecordArray, now: float) -> None:
        """Note that a path was used at `now`, a time that never falls. Raises IntegrityError when it is no path."""
        if self._is_path(records, "touch", whole=True):
            self.uses[records] += 1
            self._rank[records] = now + self.retentions.added_rank(records)
            for residence in self.residences:
                residence.used(records)

    def retain(self, path: RecordArray, now: float, claim: Claim) -> bool:
        """Retain a path as a claim says, from `now` on; False when the namespace, or all, retain as much as they may."""
        if not self._is_path(path, "retain", whole=True):
            return True
        self.decay(now)
        if not self.retentions.retain(path, now, claim):
            return False
        self._rank_anew(path)
        return True

    def decay(self, now: float) -> None:
        """Lower priorities whose time is over."""
        self._rank_anew(self.retentions.decay(now))

    def _rank_anew(self, records: RecordArray) -> None:
        if len(records):
            self._rank[records] = base_rank(self._rank[records]) + self.retentions.added_rank(records)
            for residence in self.residences:
                residence.ranked_anew(records)

    # ------------------------------------------------------------------------------------- pages that come

    def insert(
        self, keys: Keys, start: int, pages: Mapping[IndexSpace, PageIdArray], *, now: float, to_host: bool = False
    ) -> Inserted:
        """Take the pages of `keys[start:]`, one of each space for each key; those of `keys[:start]` must be in the same place.

        The pages go to the device, or with `to_host` to the host, as host copies and home pages. A page that is known there keeps
        its first arrival. From the first key on that a page of another path has, nothing is taken. Raises NotFoundError when
        `keys[:start]` are not known there (any more), InvalidInputError for arrays of another length; nothing has changed then.
        """
        residence = self._host() if to_host else self.device
        count, lengths = len(keys) - start, {space: len(ids) for space, ids in pages.items()}
        spaces = residence.spaces + (() if self.home is None else self.home.spaces)
        if count < 0 or lengths != dict.fromkeys(spaces, count):
            raise InvalidInputError(f"{count} keys need so many pages of each of {list(spaces)}, got {lengths}")
        path = self.match(keys)
        known, here = len(path), residence.depth(path)
        if here < start:
            raise NotFoundError(f"page {start} cannot be cached: only {here} pages before it are known (any more)")
        if known < len(keys):
            records = self.records.create(keys, path)
            self.uses[records] = 0
            path = np.concatenate((path, records))
        stop = len(path)
        taken = {space: pages[space][here - start : stop - start] for space in residence.spaces}
        if here < stop:
            residence.add(path[here:], taken)
        if self.home is not None:
            taken |= {space: pages[space][known - start : stop - start] for space in self.home.spaces}
            if known < stop:
                self.home.add(path[known:], taken)
        self.touch(path, now)
        return Inserted(path[start:], residence, path[here:], taken, len(keys) - stop)

    def add_copies(self, path: RecordArray, start: int, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take host copies of records of a path from `start` on. These are on the device; those before are on the host, too."""
        self._host().add(path[start:], pages)
        self._host().used(path)

    def add_device(self, path: RecordArray, start: int, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take device pages of records of a path from `start` on. These are on the host; those before are on the device, too."""
        self.device.add(path[start:], pages)
        self.device.used(path)
        self._host().read_back(path[start:])

    # ------------------------------------------------------------------------------------- pages that go

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Pages:
        """Give up at least so many pages of each space, all or nothing: old leaves, neighbours together.

        A record gives its page of every space of the residence that it leaves, and its checkpoint there, so there may be more pages
        than asked for; a record that leaves the home leaves every residence. When only pages of checkpoints lack, checkpoints go
        and records stay. Raises CapacityError when `evictable` has fewer.
        """
        evictable = self.evictable()
        short = {space: count - evictable.get(space, 0) for space, count in lacking.items()}
        short = {space: count for space, count in short.items() if count > 0}
        if short:
            needs = ", ".join(f"{count} of '{space}'" for space, count in short.items())
            raise CapacityError(f"cached pages that nobody reads are too few, by {needs}", lacking=short)
        found: list[Pages] = []
        for residence in reversed(self.residences):  # the home first: records that leave it leave every residence
            given = merged(found)
            left = {space: count - len(given.get(space, ())) for space, count in lacking.items()}
            victims, pages = residence.take(max((left.get(space, 0) for space in residence.spaces), default=0))
            found.append(pages)
            if len(victims):
                others = self.residences if residence is self.home else ()
                if residence is self.home and self.host is not None:
                    self.host.note_evicted(victims[self.host.has(victims)])
                found += [other.remove(victims[other.has(victims)]) for other in others]
                gone, pages = self._forget(victims, evicted=True)
                self._note_evicted(gone)
                found.append(pages)
            space = residence.checkpoint_space
            if space is not None and space in lacking:
                wanted = lacking[space] - len(merged(found).get(space, ()))
                oldest, pages = residence.take_checkpoints(wanted, self.retentions)
                for other in self.residences:
                    if other is not residence:
                        oldest = oldest[~other.checkpointed(oldest)]
                self._note_evicted(oldest)
                found.append(pages)
        return merged(found)

    def drop(self, records: RecordArray | None = None) -> Pages:
        """Make records and all that depends on them unreachable at once; None: all records.

        Returns the pages that nobody reads. The others come with the last `unpin`.
        """
        dropped = self.records.descendants(self.records.all() if records is None else records)
        self.records.hide(dropped[~self.records.is_hidden(dropped)])
        return self._release([(one, one.unpinned(dropped)) for one in self.residences if one is not self.home])

    def unreachable_copies(self) -> Pages:
        """Return the host copies of unreachable records, which somebody still reads."""
        if self.host is None:
            return {}
        there = self.records.all()
        hidden = there[self.records.is_hidden(there) & self.host.has(there)]
        ends = [self.host.checkpoint_pages(int(record)) for record in hidden[self.host.checkpointed(hidden)]]
        return self.host.pages(hidden) | {HOST_COPIES[CHECKPOINT_SPACE]: join(ends)}

    def lose_device(self) -> Pages:
        """Lose the device's memory: records with host copies are on the host only, and all others are unreachable.

        Returns the pages that nobody reads. The others come with the last `unpin`.
        """
        there = self.records.deepest_first(self.records.all())
        there = there[self.device.has(there)]
        unread = self.device.unpinned(there)
        read = there[~np.isin(there, unread)]
        gone = there if self.host is None else there[~self.host.has(there)]
        self.records.hide(gone[~self.records.is_hidden(gone)])
        self.device.lose(read[~np.isin(read, gone)])
        return self._release([(self.device, unread)])

    def withdraw(self, inserted: Inserted) -> None:
        """Undo `insert`, in the same step: the pages are the caller's again."""
        self._release([(inserted.residence, inserted.new[::-1])])

    def __repr__(self) -> str:
        residences = ", ".join(map(repr, self.residences))
        known = self.records.reachable
        return f"<prefix index: {len(self)} of {self.capacity} records, {known} reachable; {residences}>"

    # ------------------------------------------------------------------------------------- inside

    def _host(self) -> Residence:
        if self.host is None:
            raise InvalidInputError(f"there are no host copies here: {self!r}")
        return self.host

    def _parts(
        self, records: RecordArray, device: int | None, host: int, verb: str, *, whole: bool = False
    ) -> list[tuple[Residence, RecordArray]]:
        """Return the records that a reader pins in each residence. Raises IntegrityError for records that are no path."""
        if not self._is_path(records, verb, whole=whole):
            return []
        if self.host is None:
            return [(self.device, records)]
        parts = [(self.device, records[:device]), (self.host, records[:host])]
        if self.home is not None:
            parts.append((self.home, records))
        return [(residence, part) for residence, part in parts if len(part)]

    def _is_path(self, records: RecordArray, verb: str, *, whole: bool = False) -> bool:
        """Return whether there is anything to do. Raises IntegrityError for records that are no path."""
        if not len(records):
            return False
        starts_right = not whole or self.records.parent_at[records[0]] == NO_RECORD
        if not (starts_right and self.records.is_path(records)):
            raise IntegrityError(f"{verb}: {len(records)} records from {records[0]} on are no path of {self!r}")
        return True

    def _note_evicted(self, records: RecordArray) -> None:
        if len(records):
            self.kept_since = max(self.kept_since, float(base_rank(self._rank[records]).max()))

    def _release(self, parts: Sequence[tuple[Residence, RecordArray]]) -> Pages:
        """Give up records that nobody reads in a residence; each comes before its parent there."""
        found = [residence.remove(records) for residence, records in parts]
        records = np.unique(np.concatenate([records for _, records in parts]))
        return merged([*found, self._forget(self.records.deepest_first(records))[1]])

    def _forget(self, records: RecordArray, *, evicted: bool = False) -> tuple[RecordArray, Pages]:
        """Forget those of the records, each before its parent, that are nowhere any more; return them and their home pages."""
        left = records if self.host is None else records[~self.host.has(records)]
        gone, lost = left[~self.device.has(left)], left[self.device.lost(left)]
        self.records.hide(lost[~self.records.is_hidden(lost)])
        pages = {} if self.home is None else self.home.remove(gone[self.home.has(gone)])
        if evicted:
            self.evicted += self.retentions.reasons(gone)
        self.retentions.forget(gone)
        self.records.forget(gone)
        return gone, pages


@dataclass(slots=True, eq=False)
class Reader:
    """Pins a path from a prompt's first page on: its first `device` records on the device, its first `host` on the host."""

    path: RecordArray
    device: int
    host: int = 0
    checkpoints: tuple[tuple[Residence, int], ...] = ()
    """The checkpoints that the reader reads: residence and record of each."""
    checkpoint_own: PageIdArray = field(default_factory=lambda: NO_PAGES)
    """Pages of the reader's own into which a checkpoint is to be loaded."""
    kept: RecordArray = field(default_factory=lambda: NO_PAGES)
    """The records of the path whose device pages were the reader's own."""
    claim: Claim | None = None
    """The retention that the reader asks for its path, with every use."""

    @classmethod
    def of(cls, index: PrefixIndex, path: RecordArray, device: int, *, from_checkpoint: bool) -> Reader:
        """Return a reader of the first `device` records on the device, and of all on the host if there are others.

        `from_checkpoint`: it also reads the checkpoint at the end of the path, on the device if it is there.
        """
        host, end = len(path) if device < len(path) else 0, path[-1:]
        if not (from_checkpoint and len(path)):
            return cls(path, device, host)
        if index.host is None or index.device.checkpointed(end)[0]:
            return cls(path, device, host, ((index.device, int(end[0])),))
        return cls(path, device, len(path), ((index.host, int(end[0])),))

    def pin(self, index: PrefixIndex) -> None:
        """Begin to read. Raises NotFoundError when a checkpoint is not there (any more), and pins nothing."""
        index.pin(self.path, device=self.device, host=self.host)
        pinned = 0
        try:
            for residence, record in self.checkpoints:
                residence.pin_checkpoint(record)
                pinned += 1
        except BridgeError:
            self.checkpoints = self.checkpoints[:pinned]
            self.unpin(index)
            raise

    def unpin(self, index: PrefixIndex) -> Pages:
        """End reading, once. Returns pages of dropped records that nobody reads any more."""
        for residence, record in self.checkpoints:
            residence.unpin_checkpoint(record)
        return index.unpin(self.path, device=self.device, host=self.host)

    def shared(self, index: PrefixIndex) -> dict[IndexSpace, int]:
        """Return the number of cached pages of each space that the reader reads in place."""
        return {space: self.device if space in index.device.spaces else len(self.path) for space in index.spaces}

    def checkpoint(self, residence: Residence | None) -> PageIdArray:
        """Return the pages of the checkpoint that it reads in a residence; empty when there is none."""
        found = (one.checkpoint_pages(record) for one, record in self.checkpoints if one is residence)
        return next(found, NO_PAGES)
