"""The prefixes of a node: a record for each cached page, found by its key.

- A record is on the device, on the host as its *host copy*, or both; each `Residence` has its own pages, readers and checkpoints.
  The first records of a path are on the device, the others on the host only.
- Pages of a space that has no host copies (the host pool) are the record's as such, wherever else it is: its *home*.
- Only records that nobody pins are evicted, leaf by leaf, so no page is ever without its parent. The longest unused go first; among
  the old ones, neighbours go together (`victims.py`). A record that is nowhere any more is gone.
- A dropped record is *unreachable* at once, for every key; its pinned pages come back with the last unpin.
- A *checkpoint* is the windows and states at exactly a record's end; it has pins of its own.

Records are numbers, and arrays hold what is known of them: a page takes less than 300 bytes. Whoever reads a record, or its number,
has pinned the record, or does so in the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, Pages
from kvbridge.core.prefixes import Evicted
from kvbridge.tier.keys import Keys
from kvbridge.tier.records import NO_RECORD, RecordArray, Records, join
from kvbridge.tier.residence import Inserted, Residence, merged
from kvbridge.tier.retention import Claim, Retentions, base_rank

CHECKPOINT_SPACE = IndexSpace.SWA


class PrefixIndex:
    """The cached pages of one node. Not thread-safe: only the node process's one deciding thread uses it."""

    def __init__(
        self,
        spaces: Sequence[IndexSpace],
        capacity: int,
        *,
        has_copies: bool = False,
        retained_share: float = 0.0,
    ) -> None:
        """`spaces`: those in which a record has one page. `capacity`: as many records as there can be.

        `has_copies`: pages of `full` may be on the host as well, or on the host only.
        """
        on_device = tuple(space for space in spaces if space in HOST_COPIES or not has_copies)
        if not on_device or len(set(spaces)) != len(spaces) or CHECKPOINT_SPACE in spaces:
            raise InvalidInputError(
                f"an index has one page of each of some spaces that grow with the tokens, got {list(spaces)}"
            )
        self.spaces = tuple(spaces)
        self.capacity = capacity
        self.records = Records(capacity)
        self._rank = np.zeros(capacity, dtype=np.float64)
        self._uses = np.zeros(capacity, dtype=np.int32)
        self.retentions = Retentions(capacity, share=retained_share)
        self.evicted: Counter[Evicted] = Counter()
        """Records that are gone, by why."""
        self.device = Residence(self.records, on_device, self._rank, checkpoint_space=CHECKPOINT_SPACE)
        self.host: Residence | None = None
        """Residence of host copies; None: there are none."""
        self.home: Residence | None = None
        """Residence of the pages that a record has wherever it is; None: none, or no host copies, and `device` has them."""
        if has_copies:
            copies = [HOST_COPIES[space] for space in on_device]
            self.host = Residence(self.records, copies, self._rank, checkpoint_space=HOST_COPIES[CHECKPOINT_SPACE])
            if len(on_device) < len(spaces):
                homes = [space for space in spaces if space not in on_device]
                self.home = Residence(self.records, homes, self._rank)
        self.residences = tuple(one for one in (self.device, self.host, self.home) if one is not None)
        self.kept_since = -math.inf
        """No record that was used after this has been evicted, nor its checkpoint."""

    # ------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        """Number of records, the unreachable ones among them."""
        return len(self.records)

    @property
    def reachable(self) -> int:
        """Number of records that keys lead to."""
        return len(self.records) - self.records.hidden_count

    def match(self, keys: Keys, *, at_most: int | None = None) -> RecordArray:
        """Return the path of the longest known run of `keys` from the first on, of at most so many pages. Changes nothing.

        The first `device.depth(path)` of them are on the device; if there are others, all of the path is on the host.
        """
        return self.records.match(keys, len(keys) if at_most is None else at_most)

    def prompt_of(self, key: bytes) -> Keys:
        """Return the keys of all pages up to the one of this key; empty when the key is not known."""
        return self.records.keys(self.records.path_to(key))

    def uses(self, path: RecordArray) -> npt.NDArray[np.int32]:
        """Return the number of uses of each record of a path; none has more than its parent."""
        return self._uses[path]

    def pages(self, records: RecordArray) -> Pages:
        """Return the pages of records that are on the device, in their order, by space."""
        return self.device.pages(records) | self.home_pages(records)

    def home_pages(self, records: RecordArray) -> Pages:
        """Return the pages that records have wherever they are."""
        return {} if self.home is None else self.home.pages(records)

    def is_found(self, path: RecordArray) -> bool:
        """Return whether others find a path: no record of it is dropped, or lost on the device."""
        return not (self.records.is_hidden(path).any() or self.device.is_lost(path))

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

    def all_pages(self) -> Pages:
        """Return every page that is the index's, those of checkpoints and of unreachable records too."""
        return merged([residence.all_pages() for residence in self.residences])

    # ------------------------------------------------------------------------------------- use

    def pin(self, records: RecordArray, *, device: int | None = None, host: int = 0) -> None:
        """Count a reader on every record of a path, or of a part that continues a path which the same reader has pinned.

        The reader reads the first `device` of them on the device (None: all), and the first `host` on the host. Raises
        IntegrityError, and changes nothing, when the records are no such path or not there.
        """
        parts = self._parts(records, device, host, "pin")
        for residence, part in parts:
            residence.require_pinnable(part)
        for residence, part in parts:
            residence.pin(part)

    def unpin(self, records: RecordArray, *, device: int | None = None, host: int = 0) -> Pages:
        """End what `pin` began, for all that one reader has pinned: a path from a prompt's first page on.

        Returns the pages that the last reader of dropped records has let go; mostly none. Raises IntegrityError, and
        changes nothing, when the records are no such path or somebody has unpinned them before.
        """
        parts = self._parts(records, device, host, "unpin", whole=True)
        for residence, part in parts:
            residence.require_pinned(part)
        over = []
        for residence, part in parts:
            ended = residence.unpin(part)
            ended = ended[self.records.is_hidden(ended) | residence.lost(ended)]
            if len(ended) and residence is not self.home:
                over.append((residence, ended[::-1]))
        return self._release(over) if over else {}

    def touch(self, records: RecordArray, now: float) -> None:
        """Note that a path was used at `now`, a number that never falls. Raises IntegrityError when it is no path."""
        if self._is_path(records, "touch", whole=True):
            self._uses[records] += 1
            self._rank[records] = now + self.retentions.added_rank(records)
            for residence in self.residences:
                residence.used(records)

    def retain(self, path: RecordArray, now: float, claim: Claim) -> bool:
        """Let a path go after others as a claim says, from `now` on; False when its namespace, or all, retain what they may."""
        if not self._is_path(path, "retain", whole=True):
            return True
        self.decay(now)
        if not self.retentions.retain(path, now, claim):
            return False
        self._rank_anew(path)
        return True

    def decay(self, now: float) -> None:
        """Let priorities of records fall whose time is over."""
        self._rank_anew(self.retentions.decay(now))

    def _rank_anew(self, records: RecordArray) -> None:
        if len(records):
            self._rank[records] = base_rank(self._rank[records]) + self.retentions.added_rank(records)
            for residence in self.residences:
                residence.ranked_anew(records)

    # ------------------------------------------------------------------------------------- pages that come

    def insert(
        self,
        keys: Keys,
        start: int,
        pages: Mapping[IndexSpace, PageIdArray],
        *,
        now: float,
        to_host: bool = False,
    ) -> Inserted:
        """Take the pages of `keys[start:]`, one of each space for each key; those of `keys[:start]` must be known where they go.

        They go to the device, or with `to_host` to the host, as host copies and pages of the home. A page that is known there keeps
        its first arrival; from the first key on that a page elsewhere has, nothing is taken. `Inserted` says which pages were
        taken. They count as used at `now`, like the path before them. Raises NotFoundError when `keys[:start]` are not known there
        (any more), InvalidInputError for arrays of another length; the index is as before then.
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
            self._uses[records] = 0
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
        """Let the records of a path from `start` on, which are on the device, be on the host as well; those before are."""
        self._host().add(path[start:], pages)
        self._host().used(path)

    def add_device(self, path: RecordArray, start: int, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Let the records of a path from `start` on, which are on the host, be on the device as well; those before are."""
        self.device.add(path[start:], pages)
        self.device.used(path)
        self._host().read_back(path[start:])

    # ------------------------------------------------------------------------------------- pages that go

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Pages:
        """Give up at least so many pages of each space, all or nothing: old leaves, neighbours together.

        A record gives its page of every space of the residence that it leaves, and its checkpoint there, so there may be more pages
        than asked for; from the home it goes with all that it has. When only checkpoints' pages lack, checkpoints go and records
        stay. Raises CapacityError when `evictable` has fewer.
        """
        evictable = self.evictable()
        short = {space: count - evictable.get(space, 0) for space, count in lacking.items()}
        short = {space: count for space, count in short.items() if count > 0}
        if short:
            needs = ", ".join(f"{count} of '{space}'" for space, count in short.items())
            raise CapacityError(f"cached pages that nobody reads are too few, by {needs}", lacking=short)
        found: list[Pages] = []
        for residence in reversed(self.residences):  # a record that goes from its home goes from everywhere
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
        """Make records and all that depends on them unreachable at once, wherever they are; None: all there are.

        Returns the pages that nobody reads. Those of the others come with the last `unpin`.
        """
        dropped = self.records.descendants(self.records.all() if records is None else records)
        self.records.hide(dropped[~self.records.is_hidden(dropped)])
        return self._release([(one, one.unpinned(dropped)) for one in self.residences if one is not self.home])

    def unreachable_copies(self) -> Pages:
        """Return the host copies of records which no key reaches any more, and somebody reads."""
        if self.host is None:
            return {}
        there = self.records.all()
        hidden = there[self.records.is_hidden(there) & self.host.has(there)]
        ends = [self.host.checkpoints.pages(int(record)) for record in hidden[self.host.checkpointed(hidden)]]
        return self.host.pages(hidden) | {HOST_COPIES[CHECKPOINT_SPACE]: join(ends)}

    def lose_device(self) -> Pages:
        """Lose the device's memory: records that are on the host as well are there only, the others unreachable.

        Returns the pages that nobody reads. Those of the others come with the last `unpin`.
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
        """Undo `insert`, in the same step: the pages are their owner's again."""
        self._release([(inserted.residence, inserted.new[::-1])])

    # ------------------------------------------------------------------------------------- for operators

    def check_integrity(self) -> None:
        """Compare every structure with every other. Raises IntegrityError that names the first contradiction."""
        self.records.check_integrity()
        self.retentions.check_integrity()
        there = self.records.all()
        is_hidden = np.zeros(self.records.capacity, dtype=np.bool_)
        is_hidden[there] = self.records.is_hidden(there)
        for residence in self.residences:
            residence.check_integrity(is_hidden)
        everywhere = self.device.has(there) if self.host is None else self.device.has(there) | self.host.has(there)
        if not everywhere.all() or (self.home is not None and not self.home.has(there).all()):
            raise IntegrityError(f"records are nowhere, or not in their home: {self!r}")

    def __repr__(self) -> str:
        residences = ", ".join(map(repr, self.residences))
        return (
            f"<prefix index: {len(self)} of {self.records.capacity} records, {self.records.hidden_count} unreachable; "
            f"{residences}>"
        )

    # ------------------------------------------------------------------------------------- inside

    def _host(self) -> Residence:
        if self.host is None:
            raise InvalidInputError(f"there are no host copies here: {self!r}")
        return self.host

    def _parts(
        self, records: RecordArray, device: int | None, host: int, verb: str, *, whole: bool = False
    ) -> list[tuple[Residence, RecordArray]]:
        """Return the records that a reader pins in each residence."""
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
        """Give up records that nobody reads in a residence; there, each comes before its parent."""
        found = [residence.remove(records) for residence, records in parts]
        records = np.unique(np.concatenate([records for _, records in parts]))
        return merged([*found, self._forget(self.records.deepest_first(records))[1]])

    def _forget(self, records: RecordArray, *, evicted: bool = False) -> tuple[RecordArray, Pages]:
        """Forget records, each before its parent, that are nowhere any more; return them and the pages of their home."""
        left = records if self.host is None else records[~self.host.has(records)]
        gone, lost = left[~self.device.has(left)], left[self.device.lost(left)]
        self.records.hide(lost[~self.records.is_hidden(lost)])
        pages = {} if self.home is None else self.home.remove(gone[self.home.has(gone)])
        if evicted:
            self.evicted += self.retentions.reasons(gone)
        self.retentions.forget(gone)
        self.records.forget(gone)
        return gone, pages
