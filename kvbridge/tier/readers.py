"""Readers of an index: what each pins, and what an owner is told of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError, IntegrityError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.pages import Owner
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.records import RecordArray
from kvbridge.tier.residence import EvictedPages, Inserted, Pages, Residence
from kvbridge.tier.retention import Claim

log = structlog.get_logger(__name__)

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Reader:
    """Pins a path from a prompt's first page on: so many of its first records on the device, so many on the host."""

    path: RecordArray
    device: int
    host: int = 0
    checkpoints: tuple[tuple[Residence, int], ...] = ()
    """The checkpoints that it reads, each by where it is and its record."""
    checkpoint_own: PageIdArray = field(default_factory=lambda: NO_PAGES)
    """Pages of its own into which one is to be loaded."""
    kept: RecordArray = field(default_factory=lambda: NO_PAGES)
    """The records of its path whose pages on the device were its own."""
    claim: Claim | None = None
    """The retention that it asks for its path, with every use."""

    @classmethod
    def of(cls, index: PrefixIndex, path: RecordArray, device: int, *, from_checkpoint: bool) -> Reader:
        """Whoever goes on behind a path: on the device as far as that, then on the host, with its checkpoint where that is."""
        host, end = len(path) if device < len(path) else 0, path[-1:]
        if not (from_checkpoint and len(path)):
            return cls(path, device, host)
        if index.host is None or index.device.checkpointed(end)[0]:
            return cls(path, device, host, ((index.device, int(end[0])),))
        return cls(path, device, len(path), ((index.host, int(end[0])),))

    def pin(self, index: PrefixIndex) -> None:
        """Begin. Raises NotFoundError when a checkpoint is not there (any more), and pins nothing."""
        index.pin(self.path, device=self.device, host=self.host)
        begun: list[tuple[Residence, int]] = []
        try:
            for residence, record in self.checkpoints:
                residence.pin_checkpoint(record)
                begun.append((residence, record))
        except BridgeError:
            self.checkpoints = tuple(begun)
            self.unpin(index)
            raise

    def unpin(self, index: PrefixIndex) -> Pages:
        """End it, once. Returns pages of dropped records that nobody reads any more."""
        for residence, record in self.checkpoints:
            residence.checkpoints.unpin(record)
        return index.unpin(self.path, device=self.device, host=self.host)

    def shared(self, index: PrefixIndex) -> dict[IndexSpace, int]:
        """Return the number of cached pages of each space that it reads in place."""
        return {space: self.device if space in index.device.spaces else len(self.path) for space in index.spaces}

    def checkpoint(self, residence: Residence | None) -> PageIdArray:
        """The pages of the checkpoint that it reads in a residence; empty when there is none."""
        found = [residence.checkpoints.pages(record) for where, record in self.checkpoints if where is residence]
        return found[0] if found else NO_PAGES

    def admitted(self, index: PrefixIndex, own: Pages) -> Admitted:
        """Return the owner's answer, with these pages of its own."""
        return Admitted(
            prefix=index.device.pages(self.path[: self.device]) | index.home_pages(self.path),
            prefix_pages=len(self.path),
            device_pages=self.device,
            twins={} if index.host is None else some(index.host.pages(self.path[self.device :])),
            checkpoint=self.checkpoint(index.device),
            checkpoint_twin=self.checkpoint(index.host),
            checkpoint_own=self.checkpoint_own,
            own=own,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Admitted:
    """The pages that an owner got: cached ones of its prompt's first `prefix_pages` pages, and its own for the rest."""

    prefix: Pages
    """Cached pages, to be read only, until it lets go: on the device of the first `device_pages` of them, in the home of all."""
    prefix_pages: int
    device_pages: int
    twins: Pages
    """Twins of the others, which are on the host only. Their contents belong into the first of its `own` pages on the device."""
    checkpoint: PageIdArray
    """Windows and states at the end of the prefix, to be read only; empty unless they were asked for and are on the device."""
    checkpoint_twin: PageIdArray
    """The same when they are on the host only: they belong into `checkpoint_own`, pages of its own."""
    checkpoint_own: PageIdArray
    own: Pages
    """Pages that are its own alone, beside those."""


class Residency(NamedTuple):
    """Where pages of prompts are; one is a page of each space."""

    device: int
    """On the device alone."""
    both: int
    host: int
    """On the host alone."""
    evicted: EvictedPages
    """Pages evicted from the host so far."""

    @classmethod
    def of(cls, index: PrefixIndex) -> Residency:
        """Count those of an index."""
        device, host = len(index.device), 0 if index.host is None else len(index.host)
        evicted = EvictedPages() if index.host is None else index.host.evicted
        both = device + host - len(index)
        return cls(device=len(index) - host, both=both, host=len(index) - device, evicted=evicted)


class Dropped(NamedTuple):
    """Numbers of forgotten pages. One page is a page of each space that grows with the tokens."""

    pages: int
    """Pages of prompts and answers, which no request finds any more."""
    read: int
    """The ones among these that are still read."""


class PathWatcher(Protocol):
    """Told of prefixes on the device, in the middle of the call: takes note, and calls nothing back but where it says so."""

    def kept(self, keys: Keys) -> None:
        """Pages of this prompt are new on the device, its last ones."""

    def used(self, keys: Keys) -> None:
        """Somebody found this beginning of a prompt here."""

    def ending(self) -> None:
        """An owner is about to let go of what it has kept and used, which can be evicted from then on. Backups may begin now."""


@dataclass(frozen=True, slots=True, eq=False)
class PathPages:
    """Pages of a prompt on the host, from its first one on, that stay where they are until `Looks.end`."""

    path: RecordArray
    pages: Pages
    checkpoints: Mapping[int, PageIdArray]
    """By the number of pages at whose end they are."""


class Looks:
    """Readers that write pages on the host to a store."""

    def __init__(self, index: PrefixIndex, *, end: Callable[[Reader], None]) -> None:
        """`end`: is given every reader whose reading is over."""
        self._index, self._end = index, end
        self._readers: dict[PathPages, Reader] = {}

    @property
    def readers(self) -> list[Reader]:
        """All that are under way."""
        return list(self._readers.values())

    def begin_on_host(self, keys: Keys) -> PathPages:
        """Let somebody look at what of a prompt is on the host: twins, pages of the home, and checkpoints."""
        host = self._index.host
        assert host is not None, "only an index with twins has anything there"
        path = self._index.match(keys)
        path = path[: host.depth(path)]
        ends = {at + 1: int(path[at]) for at in np.flatnonzero(host.checkpointed(path)).tolist()}
        checkpoints = {page_count: host.checkpoints.pages(record) for page_count, record in ends.items()}
        looking = PathPages(path, host.pages(path) | self._index.home_pages(path), checkpoints)
        reader = Reader(path, 0, len(path), tuple((host, record) for record in ends.values()))
        reader.pin(self._index)
        self._readers[looking] = reader
        return looking

    def end(self, looking: PathPages) -> None:
        """End what `begin_on_host` began; harmless when it has been ended."""
        if looking in self._readers:
            self._end(self._readers.pop(looking))


def some(pages: Pages) -> Pages:
    """Leave out spaces of which there is no page: the node may not have them."""
    return {space: ids for space, ids in pages.items() if len(ids)}


def tell_left_out(owner: Owner, inserted: Inserted) -> None:
    """Write a line when pages of an owner were left out for their keys: engines that compute keys by the rules never meet that."""
    if inserted.left_out:
        reason = "the page has a key that a page of another prompt has: an engine states keys that are not those of its tokens"
        log.warning(
            "prefix_not_kept", room=owner.room, generation=owner.generation, pages=inserted.left_out, reason=reason
        )


def check_pages(index: PrefixIndex, cached: Pages) -> None:
    """Raise IntegrityError unless the pages of an index are the cached ones."""
    known = index.all_pages()
    for space in cached.keys() | known.keys():
        differing = np.setxor1d(cached.get(space, ()), known.get(space, ()))
        if len(differing):
            raise IntegrityError(f"pages of '{space}' are cached or in the index, not both: {differing.tolist()[:8]}")


def check_pins(index: PrefixIndex, readers: Iterable[Reader]) -> None:
    """Raise IntegrityError unless what these read is what is pinned, everywhere."""
    for residence in index.residences:
        pins, checkpoint_pins = residence.pins()
        expected, restoring = np.zeros_like(pins), dict.fromkeys(checkpoint_pins, 0)
        for reader in readers:
            stop = {id(index.device): reader.device, id(index.host): reader.host}.get(id(residence))
            expected[reader.path[:stop]] += 1  # a path has no record twice
            for where, record in reader.checkpoints:
                if where is residence:
                    restoring[record] = restoring.get(record, 0) + 1
        if not np.array_equal(pins, expected) or restoring != checkpoint_pins:
            raise IntegrityError(f"pins do not add up to what is read of {residence!r}")
